"""The rank that others wait for is found by looks at all ranks; a healthy loop has none."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_kernel.errors import Failure, Frame
from monarch_kernel.features.watch.stragglers import Look, Straggler, StragglerWatch, latest_of, look_at, place_of
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing


def test_the_rank_that_has_started_fewer_is_late() -> None:
    assert look_at({0: 5, 1: 5, 2: 4}) == Look(2, 5, False)
    assert look_at({0: 9, 1: 7, 2: 9}) == Look(1, 9, False)


@pytest.mark.parametrize(
    "started",
    [
        {0: 5, 1: 4, 2: 4},  # several are late
        {0: 5, 1: 5, 2: Failure("lost", "Lost", "the rank is dead")},
        {0: 5, 1: 5, 2: -1},  # it has no process group
        {0: 1, 1: 0},  # the first collective, which takes long
        {0: 5},
        {},
    ],
)
def test_a_look_without_one_late_rank_finds_none(started: dict[int, int | Failure]) -> None:
    look = look_at(started)
    assert (look.late, look.is_even) == (None, False)


def test_equal_numbers_are_even() -> None:
    assert look_at({0: 5, 1: 5}) == Look(None, 5, True)


def test_the_line_of_a_rank_is_that_where_all_others_wait_for_it() -> None:
    frame = Frame("<remote cell [3]>", 7, "augment", user=True)
    activity = Activity(1, "main", (frame,))
    behind, waits = Doing((activity,), (), {"": 4}), Doing((), (Collective("all_reduce", 5),), {"": 5})
    assert place_of(behind, [waits, waits]) == "cell [3], line 7, in augment"
    assert place_of(behind, [waits, Doing()]) == ""
    assert place_of(Doing((activity,), (), {"": 5}), [waits, waits]) == ""
    assert place_of(Doing((activity,), (Collective("all_reduce", 5),)), [waits]) == ""
    assert place_of(Doing(), [waits]) == ""
    assert place_of(None, [waits]) == ""


def looked(late: list[int | None], *, even: bool = True) -> list[Straggler]:
    watch = StragglerWatch()
    looks = [Look(rank, at, rank is None and even) for at, rank in enumerate(late, 1)]
    return [found for look in looks if (found := watch.take(look)) is not None]


def test_a_straggler_is_named_once_with_its_share() -> None:
    (found,) = looked([2, None] * 40)
    assert found.rank == 2
    assert 0.45 < found.share < 0.55


def test_a_few_looks_are_not_enough() -> None:
    assert looked([2] * 8 + [None] + [2] * 7) == []
    assert len(looked([2] * 8 + [None] + [2] * 8)) == 1


def test_numbers_that_are_never_equal_blame_nobody() -> None:
    """Ranks that send messages count these, too."""
    assert looked([2] * 100) == []
    assert looked([2, None] * 100, even=False) == []


def test_a_rare_wait_is_no_straggler() -> None:
    assert looked([2, *[None] * 11] * 30) == []


def test_one_look_may_find_another_rank() -> None:
    assert len(looked([*[2] * 8, None, 0, *[2] * 8])) == 1
    assert looked([2, 2, 2, 0, 1] * 20) == []


def test_one_long_wait_blames_nobody() -> None:
    watch = StragglerWatch()
    assert [watch.take(Look(0, 7)) for _ in range(100)] == [None] * 100
    assert not watch.is_close


def test_more_looks_are_useful_when_the_last_ones_agree() -> None:
    watch = StragglerWatch()
    for number, rank in enumerate((0, 1, 2, None, 2, None, 2), 1):
        watch.take(Look(rank, number))
    assert watch.is_close
    watch.take(Look(1, 9))
    assert not watch.is_close


class Late(NamedTuple):
    of: int
    behind: int
    behind_s: float


def test_the_rank_that_starts_nearly_all_collectives_after_the_others_is_named() -> None:
    late = {0: Late(30, 12, 0.0), 1: Late(30, 14, 0.001), 2: Late(30, 28, 0.02)}
    assert latest_of(late, 0.05) == Straggler(2, 28 / 30, late_s=0.02)


@pytest.mark.parametrize(
    "late",
    [
        {0: Late(20, 3, 0.0), 1: Late(20, 20, 0.02)},  # too few collectives
        {0: Late(30, 12, 0.0), 1: Late(30, 26, 0.02)},  # not often enough
        {0: Late(30, 12, 0.0), 1: Late(30, 30, 0.004)},  # less than a tenth of a step
        {0: Late(30, 24, 0.01), 1: Late(30, 30, 0.02), 2: Late(30, 1, 0.0)},  # two ranks are slow
        {1: Late(30, 30, 0.02)},  # there is nothing to compare with
        {},
    ],
)
def test_no_rank_is_blamed_without_need(late: dict[int, Late]) -> None:
    assert latest_of(late, 0.05) is None


def test_no_rank_is_blamed_while_the_time_of_a_step_is_unknown() -> None:
    assert latest_of({0: Late(30, 1, 0.0), 1: Late(30, 30, 0.02)}, 0.0) is None


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(3, 8))
def test_an_hour_of_a_healthy_loop_blames_nobody(seed: int, ranks: int) -> None:
    chance = random.Random(seed)
    assert looked([chance.choice([None, chance.randrange(ranks)]) for _ in range(1_500)]) == []
