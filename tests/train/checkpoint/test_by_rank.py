"""State that differs by rank comes back on its rank; another number of ranks divides it, or refuses it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, WeightedRandomSampler

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train import checkpoint
from monarch_kernel.train.generators import stateful
from monarch_kernel.train.snapshots.capture import check
from tests.support.ranks import Ranks

PRELUDE = """
import contextlib, io, random, numpy, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from monarch_kernel import checkpoint

class Counter:
    def __init__(self, **state): self.state = state
    def state_dict(self): return self.state
    def load_state_dict(self, state): self.state = state

class Dealt(DistributedSampler):
    def __init__(self): super().__init__(range(16), 1, 0); self.read = 0
    def state_dict(self): return {'read': self.read}
    def load_state_dict(self, state): self.read = state['read']

class Picky(Counter):
    def load_state_dict(self, state):
        if rank == self.refuses or self.refuses == 'all': raise KeyError('weather')
        super().load_state_dict(state)

def seed(number):
    random.seed(number); numpy.random.seed(number); torch.manual_seed(number)

def draw():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))

def said(path, **things):
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        checkpoint.load(path, **things)
    return printed.getvalue()
"""


@pytest.fixture(scope="module")
def two(session: None) -> Iterator[Ranks]:
    ranks = Ranks(2, PRELUDE)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("wait", [True, False])
def test_each_rank_gets_its_own_state(two: Ranks, tmp_path: Path, wait: bool) -> None:
    path = tmp_path / "a"
    before = two.run(
        "seed(rank); own = torch.Generator().manual_seed(rank); counter = Counter(at=10 * rank, of={'a': 1})\n"
        f"saving = checkpoint.save({str(path)!r}, wait={wait}, rng=checkpoint.rng, own=own, counter=counter, best=0.5 + rank, "
        "tensor=torch.get_rng_state(), step=3)\n"
        "counter.state['at'] += 1\n"
        "if saving: saving.result()\n"
        "draw(), torch.rand(3, generator=own).tolist()"
    )
    after = two.run(
        "seed(9); own, counter = torch.Generator(), Counter()\n"
        f"values = checkpoint.load({str(path)!r}, rng=checkpoint.rng, own=own, counter=counter)\n"
        "seen = draw(), torch.rand(3, generator=own).tolist()\n"
        "torch.set_rng_state(values['tensor'])\n"
        "seen, counter.state, values['best'], values['step'], float(torch.rand(()))"
    )
    for rank, (seen, counter, best, step, number) in enumerate(after):
        assert seen == before[rank]
        assert counter == {"at": 10 * rank, "of": {"a": 1}}
        assert (best, step, number) == (0.5 + rank, 3, seen[0][2])
    assert before[0] != before[1]
    contents = checkpoint.describe(path)
    assert contents.by_rank == {"rng", "own", "counter", "best", "tensor"}
    assert "  rng (state, by rank)\n" in str(contents)
    assert "  step (value)" in str(contents)


def test_what_is_equal_on_all_ranks_is_stored_once(two: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a"
    two.run(f"seed(1)\ncheckpoint.save({str(path)!r}, rng=checkpoint.rng, counter=Counter(at=1), step=1)")
    assert not checkpoint.describe(path).by_rank
    assert not list(path.glob("values-*"))


def test_one_process_does_not_get_the_state_of_two_ranks(two: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "a"
    two.run(
        "seed(rank)\nmodel = nn.Linear(2, 2, bias=False); nn.init.ones_(model.weight)\n"
        f"checkpoint.save({str(path)!r}, model=model, rng=checkpoint.rng, counter=Counter(at=rank), "
        "dealt=Dealt(), best=rank, step=3)"
    )
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    model = names["nn"].Linear(2, 2, bias=False)
    values = checkpoint.load(path, model=model)
    assert values == {"step": 3}
    with pytest.raises(
        CheckpointError, match="best of .*/a differs by rank: it was saved by 2 ranks, and 1 rank can't share"
    ):
        values["best"]
    with pytest.raises(KeyError):
        values["other"]
    names["seed"](7)
    expected = names["draw"]()
    names["seed"](7)
    things = {"rng": checkpoint.rng, "counter": names["Counter"](at=5), "dealt": names["Dealt"]()}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, model=model, **things)
    lines = str(caught.value).splitlines()
    assert "/a was saved by 2 ranks, and can't be loaded by 1 rank, because they can't share these states" in lines[0]
    assert lines[1:4] == [
        "  rng: it differs by rank",
        "  counter: it differs by rank",
        "  dealt: a Dealt counts what one rank has read; with checkpoint.Sampler as its sampler it can be divided",
    ]
    assert 'checkpoint.load(..., on_resize="reseed"): generators get new seeds' in lines[4]
    assert names["draw"]() == expected
    said = names["said"](path, model=model, on_resize="reseed", **things)
    assert said == "a was saved by 2 ranks and loaded by 1: new seeds for rng; not loaded: counter, dealt\n"
    assert things["counter"].state == {"at": 5}
    numbers = names["draw"]()
    names["said"](path, model=model, on_resize="reseed", **things)
    assert names["draw"]() == numbers != expected
    with pytest.raises(ValueError, match="use 'refuse' or 'reseed'"):
        checkpoint.load(path, on_resize="other")


@pytest.mark.slow  # other ranks
def test_more_ranks_get_different_seeds(two: Ranks, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    two.run(f"seed(rank)\ncheckpoint.save({str(tmp_path / 'a')!r}, rng=checkpoint.rng)")
    three = Ranks(3, PRELUDE)
    said = three.fails(f"checkpoint.load({str(tmp_path / 'a')!r}, rng=checkpoint.rng)")
    assert "was saved by 2 ranks, and can't be loaded by 3 ranks" in said
    found = three.run(f"said({str(tmp_path / 'a')!r}, rng=checkpoint.rng, on_resize='reseed'), draw()")
    assert [text for text, _ in found] == ["a was saved by 2 ranks and loaded by 3: new seeds for rng\n", "", ""]
    assert len({numbers for _, numbers in found}) == 3
    three.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 2}, "the sampler has seed=2, but seed=1 when the position was saved"),
        ({"source": 12}, "the sampler has total=12, but total=8 when"),
        ({"shuffle": False}, "the sampler has shuffle=False, but shuffle=True when"),
    ],
)
def test_a_loader_that_does_not_fit_changes_nothing(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    def things(source: int = 8, **options: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        sampler = checkpoint.Sampler(source, **options)
        loader = checkpoint.Loader(DataLoader(range(source), batch_size=2, sampler=sampler))
        return {"model": model, "rng": checkpoint.rng, "loader": loader}

    path = tmp_path / "a"
    checkpoint.save(path, **things(seed=1))
    others = things(**{"seed": 1, **options})
    before, drawn = others["model"].weight.clone(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=said) as caught:
        checkpoint.load(path, **others)
    assert f"the checkpoint {path} does not fit loader; nothing has changed\n  loader: " in str(caught.value)
    assert torch.equal(before, others["model"].weight)
    assert torch.equal(drawn, torch.get_rng_state())


def test_a_loader_that_does_not_fit_on_one_rank_changes_no_rank(two: Ranks, tmp_path: Path) -> None:
    made = (
        "counter, sampler = Counter(at={at}), checkpoint.Sampler(8, seed={seed})\n"
        "loader = checkpoint.Loader(DataLoader(range(8), batch_size=2, sampler=sampler))\n"
    )
    path = str(tmp_path / "a")
    two.run(made.format(at=1, seed=1) + f"checkpoint.save({path!r}, counter=counter, loader=loader)")
    found = two.run(
        made.format(at=2, seed="1 + rank")
        + f"try: checkpoint.load({path!r}, counter=counter, loader=loader)\nexcept Exception as error: caught = error\n"
        "type(caught).__name__, str(caught), counter.state"
    )
    for kind, text, state in found:
        assert kind == "CheckpointError"
        assert "does not fit loader; nothing has changed" in text
        assert state == {"at": 2}
    assert "on [1]: CheckpointError: " in found[0][1]


@pytest.mark.parametrize("refuses", [1, "all"])
def test_an_object_that_refuses_its_state_is_an_error_on_all_ranks(
    two: Ranks, tmp_path: Path, refuses: int | str
) -> None:
    path = str(tmp_path / "a")
    two.run(
        f"seed(1)\ncheckpoint.save({path!r}, model=nn.Linear(1, 1), one=Counter(at=1), picky=Counter(), last=Counter())"
    )
    found = two.run(
        "one, picky, last = Counter(), Picky(), Counter(at=5)\n"
        f"picky.refuses = {refuses!r}\n"
        f"try: checkpoint.load({path!r}, one=one, picky=picky, model=nn.Linear(1, 1), last=last)\n"
        "except Exception as error: caught = error\n"
        "type(caught).__name__, str(caught), repr(caught.__cause__), one.state, last.state"
    )
    where = {1: "[1]", "all": "[0-1]"}[refuses]
    for rank, (kind, text, cause, one, last) in enumerate(found):
        assert kind == "CheckpointError"
        assert text == (
            f"{path} was loaded only in part: picky, a Picky, refused its state on {where} (KeyError: 'weather'); "
            "model and one have been loaded; picky has not, or only in part; last has not. Create the objects again before you "
            "load again"
        )
        assert cause == ("KeyError('weather')" if refuses in (rank, "all") else "None")
        assert (one, last) == ({"at": 1}, {"at": 5})


def test_ranks_that_load_different_objects_are_refused(two: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    two.run(f"checkpoint.save({path!r}, one=Counter(at=1), other=Counter(at=2))")
    found = two.run(
        "one, other = Counter(), Counter()\n"
        f"checkpoint.load({path!r}, **(dict(one=one, other=other) if rank else dict(other=other, one=one)))\n"
        f"try: checkpoint.load({path!r}, **(dict(one=Counter(), other=other) if rank else dict(other=Counter())))\n"
        "except Exception as error: caught = error\n"
        "type(caught).__name__, str(caught), one.state, other.state"
    )
    said = (
        f"load {path}: all ranks must give the same names; nothing has changed\n  rank 0: other\n  rank 1: one, other"
    )
    assert found == (("CheckpointError", said, {"at": 1}, {"at": 2}),) * 2


def test_a_module_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    """Its tensors, and those of the optimizer, have been read in place by then."""
    names: dict[str, Any] = {}
    exec(PRELUDE, names)

    def things() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"counter": names["Counter"](at=1), "model": model, "optimizer": torch.optim.SGD(model.parameters())}

    checkpoint.save(tmp_path / "a", **things())
    others = things()

    def refuse(*_: Any) -> None:
        raise RuntimeError("no")

    others["model"].register_load_state_dict_post_hook(refuse)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path / "a", **others)
    assert (
        "model, a Linear, refused its state (RuntimeError: no); model and optimizer have not, or only in part; counter has not"
        in str(caught.value)
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


TRAIN = """
from monarch_kernel.train.parallel import parallelize
torch.manual_seed(0)
model = parallelize(nn.Sequential(nn.Embedding(96, 8), nn.Dropout(0.5), nn.Linear(8, 1)), mesh, 'fsdp', quiet=True)
optimizer = torch.optim.AdamW(model.parameters())
sampler = checkpoint.Sampler(96, seed=3)
loader = checkpoint.Loader(DataLoader(range(96), batch_size=4, sampler=sampler, num_workers=2))
things = dict(model=model, optimizer=optimizer, loader=loader, rng=checkpoint.rng)
seed(rank)
if {before!r}: checkpoint.load({before!r}, on_resize='reseed', **things)
seen = []
for step, batch in zip(range({steps}), loader):
    seen += batch.tolist()
    optimizer.zero_grad(); model(batch).mean().backward(); optimizer.step()
checkpoint.save({after!r}, **things)
seen, sampler.epoch
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_sample_of_an_epoch_comes_once_on_four_then_two_then_three_ranks(session: None, tmp_path: Path) -> None:
    """4 ranks read 48 samples, 2 ranks 24, 3 ranks the last 24."""
    seen: list[int] = []
    before = ""
    for n, steps in ((4, 3), (2, 3), (3, 9)):
        ranks = Ranks(n, PRELUDE)
        after = str(tmp_path / str(n))
        found = ranks.run(TRAIN.format(before=before, steps=steps, after=after))
        seen += [number for numbers, _ in found for number in numbers]
        assert {epoch for _, epoch in found} == {int(n == 3)}
        ranks.close()
        before = after
    assert sorted(seen) == list(range(96))


def test_a_checkpoint_of_an_earlier_version_is_loaded(tmp_path: Path) -> None:
    """Written by version 1 of the format: without values by rank and without checksums."""
    path = tmp_path / "a"
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.save(path, model=model, step=3)
    about = json.loads((path / "monarch.json").read_text())
    for name in ("checksum", "checksums", "by_rank"):
        del about[name]
    (path / "monarch.json").write_text(json.dumps({**about, "version": 1}))
    (path / "checksums.json").unlink()
    assert checkpoint.load(path, model=other) == {"step": 3}
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(
        CheckpointError, match="written by an earlier version of monarch_kernel, which stored no checksums"
    ):
        checkpoint.verify(path)
    (path / "values.pt").unlink()
    with pytest.raises(CheckpointError, match="nothing has changed:\n  values.pt is missing: step"):
        checkpoint.load(path, model=other)


GENERATORS: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: random.Random(3),
    "torch": lambda: torch.Generator().manual_seed(3),
    "RandomState": lambda: np.random.RandomState(3),
    "RandomState of PCG64": lambda: np.random.RandomState(np.random.PCG64(3)),
    **{
        name: lambda name=name: np.random.Generator(getattr(np.random, name)(3))
        for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
    },
}


def drawn(generator: Any) -> list[Any]:
    """Numbers of all kinds, some of which a generator makes in pairs."""
    if isinstance(generator, torch.Generator):
        return [torch.rand(3, generator=generator).tolist(), torch.randn(1, generator=generator).item()]
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1), generator.randrange(10)]
    bits = generator.integers if isinstance(generator, np.random.Generator) else generator.randint
    return [float(generator.normal()), float(generator.uniform()), int(bits(1 << 31, dtype=np.int32))]


@pytest.mark.parametrize("name", GENERATORS)
def test_each_kind_of_generator_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    mine, other = GENERATORS[name](), GENERATORS[name]()
    drawn(mine)
    checkpoint.save(tmp_path / "a", generator=mine)
    checkpoint.load(tmp_path / "a", generator=other)
    assert [drawn(other) for _ in range(3)] == [drawn(mine) for _ in range(3)]
    for each in (mine, other):
        stateful(each).reseed(1 << 63 | 5)
    assert drawn(mine) == drawn(other)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata imports it
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("generator", ["own", "global", "of the sampler"])
def test_a_stateful_data_loader_is_resumed_exactly(tmp_path: Path, workers: int, generator: str) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def run(first: int, last: int, saves: bool = False) -> list[tuple[list[int], float]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(24, 4), nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters())
        seeds = torch.Generator().manual_seed(5)
        options: dict[str, Any] = {"shuffle": True, "generator": None if generator == "global" else seeds}
        if generator == "of the sampler":
            options = {"sampler": checkpoint.Sampler(24), "generator": seeds}
        loader = loaders.StatefulDataLoader(range(24), 4, num_workers=workers, **options)
        things = {"rng": checkpoint.rng, "model": model, "optimizer": optimizer, "loader": loader}
        if first:
            checkpoint.load(tmp_path / str(first), **things)
        found = []
        for _, batch in zip(range(first, last), itertools.chain.from_iterable(itertools.repeat(loader))):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            found.append((batch.tolist(), loss.item()))
        if saves:
            checkpoint.save(tmp_path / str(last), **things)
        return found

    whole = run(0, 14)
    for at in (3, 6, 8):  # within an epoch of six batches, at its end, and in the next one
        assert run(0, at, saves=True) + run(at, 14) == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_data_loader_whose_order_is_lost_is_refused(tmp_path: Path) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    seeds = torch.Generator()

    def loader(sampler: Any) -> Any:
        return loaders.StatefulDataLoader(range(8), 2, sampler=sampler)

    for sampler in (WeightedRandomSampler([1.0] * 8, 8), SubsetRandomSampler(range(8))):
        with pytest.raises(
            CheckpointError, match=r"Sampler draws each epoch from torch's global generator, so .*: use sh"
        ):
            checkpoint.save(tmp_path / "a", loader=loader(sampler))
        with pytest.raises(
            TypeError, match=r"live.snapshot\(loader=...\): its \w+ draws each epoch from torch's global"
        ):
            check({"loader": loader(sampler)})
    seeded = loader(WeightedRandomSampler([1.0] * 8, 8, generator=seeds))
    with pytest.raises(CheckpointError, match="from a generator that is saved, too, as it is after that"):
        checkpoint.save(tmp_path / "a", loader=seeded, seeds=seeds)
    checkpoint.save(tmp_path / "a", loader=seeded)  # the program may seed it before each epoch


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("reader", ["alone", "in a loader"])
def test_a_data_set_of_hugging_face_goes_on_where_it_was(tmp_path: Path, reader: str) -> None:
    datasets = pytest.importorskip("datasets")
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def run(first: int, last: int, saves: bool = False) -> list[Any]:
        rows = datasets.Dataset.from_dict({"x": list(range(64))}).to_iterable_dataset(num_shards=4)
        if reader != "alone":
            rows = loaders.StatefulDataLoader(rows, 4, collate_fn=lambda rows: [row["x"] for row in rows])
        if first:
            checkpoint.load(tmp_path / "a", rows=rows)
        found = [row for _, row in zip(range(first, last), rows)]
        if saves:
            checkpoint.save(tmp_path / "a", rows=rows)
        return found

    assert run(0, 6, saves=True) + run(6, 14) == run(0, 14)


def test_a_plain_loader_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for thing in (DataLoader(range(4)), DistributedSampler(range(4), 1, 0)):
        with pytest.raises(
            CheckpointError, match=r"it is a \w+, which can't go on .*checkpoint.Loader\(DataLoader\(data, "
        ):
            checkpoint.save(tmp_path / "a", it=thing)
