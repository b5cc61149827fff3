"""The samples of an epoch are dealt to ranks, each once, also where the number of ranks changes in the middle."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from monarch_kernel.train import checkpoint
from monarch_kernel.train.checkpoint.sampler import Loader, Sampler, dealt_again, is_dealt, misfit
from monarch_kernel.train.stateful_loaders import StatefulLoader


def loaders(total: int, ranks: int, batch: int, *, workers: int = 0, **options: Any) -> list[Loader]:
    """The loaders of all ranks."""
    made = []
    for rank in range(ranks):
        sampler = Sampler(total, rank=rank, ranks=ranks, **options)
        made.append(Loader(DataLoader(range(total), batch_size=batch, sampler=sampler, num_workers=workers)))
    return made


def take(its: list[Iterator[torch.Tensor]], batches: int) -> list[int]:
    """Read some batches on each rank."""
    return [int(number) for it in its for _ in range(batches) for number in next(it)]


@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=4),
    st.booleans(),
)
def test_each_sample_comes_once_whatever_ranks_read_it(
    total: int, parts: list[tuple[int, int, int]], shuffle: bool
) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for ranks, steps, size in parts:
        made = loaders(total, ranks, size, shuffle=shuffle, drop_last=False)
        for loader in made if state else ():
            loader.load_state_dict(state or {})
        if min(map(len, made)) < steps:
            break
        seen += take([iter(loader) for loader in made], steps)
        states = [loader.state_dict() for loader in made]
        state = dealt_again(states)
        if any(each["epoch"] for each in states):
            return
        assert isinstance(state, dict), state
    made = loaders(total, 3, 2, shuffle=shuffle, drop_last=False)
    for loader in made if state else ():
        loader.load_state_dict(state or {})
    seen += [int(number) for loader in made for batch in loader for number in batch]
    assert sorted(seen) == list(range(total))


@pytest.mark.parametrize("steps", range(5))
def test_a_loader_goes_on_where_it_was(steps: int) -> None:
    def run(loader: Loader, batches: int) -> list[list[int]]:
        found: list[list[int]] = []
        while len(found) < batches:
            for batch in loader:
                found.append(batch.tolist())
                if len(found) == batches:
                    break
        return found

    whole = run(loaders(20, 2, 3)[1], 11)
    first, second = loaders(20, 2, 3)[1], loaders(20, 2, 3)[1]
    start = run(first, steps)
    second.load_state_dict(first.state_dict())
    assert start + run(second, 11 - steps) == whole
    assert whole[:4] != whole[4:8]  # epochs have different orders


def test_all_ranks_read_equally_many_unless_all_samples_are_wanted() -> None:
    assert [sum(map(len, loader)) for loader in loaders(10, 4, 2)] == [2, 2, 2, 2]
    assert [sum(map(len, loader)) for loader in loaders(10, 4, 2, drop_last=False)] == [3, 3, 2, 2]


def test_iterating_draws_no_number_from_the_global_generators() -> None:
    states = torch.get_rng_state(), random.getstate()
    list(loaders(8, 2, 2)[0])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_the_position_counts_what_the_program_has_received() -> None:
    """Workers read ahead."""
    loader = loaders(40, 2, 2, workers=1)[0]
    its = iter(loader)
    next(its), next(its)
    assert loader.state_dict()["read"] == 4


def test_a_position_of_another_order_is_refused() -> None:
    state = loaders(10, 2, 1)[0].state_dict()
    with pytest.raises(ValueError, match="total=12, but total=10 when the position was saved"):
        loaders(12, 2, 1)[0].load_state_dict(state)
    with pytest.raises(ValueError, match="the sampler has seed=3, but seed=0 when"):
        loaders(10, 2, 1, seed=3)[0].load_state_dict(state)


@pytest.mark.parametrize("options", [{"seed": 3}, {"shuffle": False}, {"drop_last": False}])
def test_a_misfit_is_found_without_a_change(options: dict[str, Any]) -> None:
    state = loaders(10, 2, 1)[0].state_dict()
    state["read"] = 1
    other = loaders(10, 2, 1, **options)[0]
    before = other.state_dict()
    (name,) = options
    for thing, saved in ((other, state), (other.loader, {"nested": {"of": state}})):
        assert f"the sampler has {name}={options[name]}, but {name}={state[name]} when" in (misfit(thing, saved) or "")
    assert other.state_dict() == before
    assert misfit(loaders(10, 2, 1)[0], state) is None
    assert misfit(loaders(10, 3, 2)[0], state) is None
    assert misfit(object(), state) is None
    assert "the saved state (int) is not the position" in (misfit(other, 3) or "")


def test_a_position_of_an_earlier_version_is_accepted() -> None:
    state = loaders(10, 2, 1)[0].state_dict()
    del state["shuffle"], state["drop_last"]
    loaders(10, 2, 1, shuffle=False)[0].load_state_dict(state)


def test_a_data_set_without_a_length_is_refused_when_the_sampler_is_created() -> None:
    unsized: Any = iter(range(3))
    with pytest.raises(
        TypeError, match="needs a data set with a length, and range_iterator has none: pass the number of"
    ):
        Sampler(unsized)
    assert "3 samples" in repr(Sampler([1, 2, 3]))
    assert Sampler(torch.iinfo(torch.int8).max).total == 127


def test_positions_of_ranks_that_are_not_in_step_are_not_combined() -> None:
    made = loaders(40, 3, 2)
    take([iter(made[0])], 2)
    take([iter(made[1])], 1)
    states = [loader.state_dict() for loader in made]
    assert dealt_again(states) == "its ranks have read different numbers of samples: 4, 2, 0"
    made[0].sampler.set_epoch(1)
    assert dealt_again([loader.state_dict() for loader in made]) == "its ranks are in different epochs"
    assert dealt_again([{"position": 1}, {"position": 2}]) == "it differs by rank"
    assert not is_dealt([{"position": 1}])


def test_other_loaders_are_refused() -> None:
    for loader in (DataLoader(range(4), batch_size=2), DataLoader(range(4), batch_size=None, sampler=Sampler(4))):
        with pytest.raises(TypeError, match="checkpoint.Loader needs DataLoader"):
            checkpoint.Loader(loader)
    with pytest.raises(ValueError, match="the rank must be below the number"):
        Sampler(4, rank=2, ranks=2)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata imports it
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stateful_data_loader_deals_the_rest_to_other_ranks(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    seen: list[int] = []

    def made(ranks: int) -> list[Any]:
        samplers = [Sampler(48, rank=rank, ranks=ranks) for rank in range(ranks)]
        return [
            stateful.StatefulDataLoader(
                range(48),
                batch_size=2,
                sampler=sampler,
                num_workers=workers,
                generator=torch.Generator().manual_seed(sampler.rank),
            )
            for sampler in samplers
        ]

    state: Any = None
    for ranks, steps in ((4, 2), (2, 3), (1, 10)):
        its = made(ranks)
        for each in its:
            if state:
                StatefulLoader(each).load_state_dict(state)
        seen += take([iter(each) for each in its], steps)
        assert len({tuple(each.generator.get_state().tolist()) for each in its}) == ranks
        state = dealt_again([StatefulLoader(each).state_dict() for each in its])
        assert is_dealt(state)
    assert Counter(seen) == Counter(range(48))
