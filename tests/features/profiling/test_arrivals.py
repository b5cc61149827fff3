"""Each rank keeps few arrivals, and ranks keep those of the same collectives."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.features.profiling.arrivals import Arrivals, GroupArrivals, is_kept

ALL = (0, 1, 2)


def noted(arrivals: Arrivals, first: int, last: int) -> None:
    for number in range(first, last):
        arrivals.note("0", ALL, number, 100.0 + number)


def test_arrivals_are_taken_once_with_the_time_of_the_day() -> None:
    arrivals = Arrivals()
    before = time.time()
    arrivals.note("0", ALL, 1, time.perf_counter())
    (found,) = arrivals.take()
    assert (found.group, found.members, found.numbers) == ("0", ALL, (1,))
    assert found.times[0] == pytest.approx(before, abs=5.0)
    assert arrivals.take() == []


def test_few_are_kept_of_many() -> None:
    arrivals = Arrivals()
    counts = []
    for at in range(20):
        noted(arrivals, 1 + 5000 * at, 5001 + 5000 * at)
        (found,) = arrivals.take() or [GroupArrivals("0", ALL, (), ())]
        assert len(found.numbers) <= 64
        counts.append(len(found.numbers))
        assert list(found.numbers) == sorted(found.numbers)
    assert sum(counts) > 20 * 16
    noted(arrivals, 160_000, 160_010)
    for at in range(12):  # collectives are rare now
        arrivals.take()
        noted(arrivals, 170_000 + at * 10, 170_010 + at * 10)
    (found,) = arrivals.take()
    assert len(found.numbers) == 10


@given(st.integers(0, 100_000), st.integers(0, 9))
def test_what_a_rank_keeps_another_one_that_keeps_more_has_too(number: int, bits: int) -> None:
    mask = (1 << bits) - 1
    assert is_kept(number, 0)
    assert not is_kept(number, mask << 1 | 1) or is_kept(number, mask)
    assert is_kept(number, mask) == is_kept(number // 16 * 16, mask)  # of a whole block


def test_all_collectives_of_a_step_are_kept_sometimes() -> None:
    for per_step in (32, 48, 64, 100, 128, 1000):
        kept = {number % per_step for number in range(200 * per_step) if is_kept(number, 7)}
        assert len(kept) > 0.9 * per_step


def test_news_come_once_until_there_are_none() -> None:
    arrivals, told = Arrivals(), []
    arrivals.on_news = lambda: told.append(1)
    noted(arrivals, 1, 4)
    assert len(told) == 1
    arrivals.take()
    noted(arrivals, 4, 6)
    assert len(told) == 1
    arrivals.take()
    arrivals.take()
    noted(arrivals, 6, 8)
    assert len(told) == 2


def test_a_group_that_is_formed_again_counts_from_the_start() -> None:
    arrivals = Arrivals()
    noted(arrivals, 1, 9)
    noted(arrivals, 1, 3)
    (found,) = arrivals.take()
    assert found.numbers == (1, 2)
    arrivals.note("0", (0, 1), 3, 1.0)
    (found,) = arrivals.take()
    assert (found.members, found.numbers) == ((0, 1), (3,))
