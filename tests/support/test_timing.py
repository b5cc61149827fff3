"""Bounds on elapsed time count only in the timing tier; the clock leaves out the time that other programs take."""

from __future__ import annotations

import time

import pytest

from tests.support import timing
from tests.support.timing import Bar, undisturbed_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the clock shows, for the test to change."""
    now = [100.0]
    monkeypatch.setattr(timing, "undisturbed_s", lambda: now[0])
    return now


def test_a_failed_bound_names_the_operation_and_its_time(clock: list[float]) -> None:
    bar = Bar(is_asserted=True)
    message = r"the interrupt took 2\.00 s instead of less than 1\.5 s"
    with pytest.raises(AssertionError, match=message), bar.below(1.5, "the interrupt"):
        clock[0] += 2.0
    with pytest.raises(AssertionError, match=r"this took 2\.00 s instead of less than 2 s"):
        bar.check(2.0, 2.0)
    with pytest.raises(AssertionError, match=r"the grace took 0\.50 s instead of more than 0\.5 s"):
        bar.check_above(0.5, 0.5, "the grace")


def test_a_time_within_the_bound_passes(clock: list[float]) -> None:
    bar = Bar(is_asserted=True)
    with bar.below(1.5):
        clock[0] += 1.0
    bar.check(1.0, 1.5)
    bar.check_above(1.5, 1.0)


def test_bounds_do_not_count_outside_the_timing_tier(clock: list[float]) -> None:
    bar = Bar(is_asserted=False)
    with bar.below(1.5):
        clock[0] += 2.0
    bar.check(2.0, 1.5)
    bar.check_above(1.0, 1.5)


def test_an_error_within_the_block_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), Bar(is_asserted=True).below(0.0):
        raise ZeroDivisionError


def test_the_clock_advances_but_never_faster_than_time() -> None:
    begin, undisturbed_begin = time.monotonic(), undisturbed_s()
    time.sleep(0.05)
    undisturbed_end, end = undisturbed_s(), time.monotonic()
    assert undisturbed_end - undisturbed_begin <= end - begin
