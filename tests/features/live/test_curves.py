"""Curves are means over ranks, and stay small."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.base.events import CurvePoint
from monarch_kernel.features.live.curves import MAX_POINTS, Curve
from monarch_kernel.features.live.logged_values import MAX_VALUES, summed
from monarch_kernel.net.wire.messages import Logged


def one(step: int, value: float) -> Logged:
    return Logged(step, value, 1, value)


def test_values_of_ranks_are_averaged_by_step() -> None:
    curve = Curve()
    curve.add(0, [one(0, 4.0), one(1, 2.0)])
    assert curve.points == [CurvePoint(0, 4.0, 4.0, 4.0, 0, 0), CurvePoint(1, 2.0, 2.0, 2.0, 0, 0)]
    curve.add(1, [one(0, 2.0)])
    assert curve.points[0] == CurvePoint(0, 3.0, 2.0, 4.0, 1, 0)
    assert curve.last == {0: 2.0, 1: 2.0}
    assert curve.mean == 2.0


def test_nan_is_shown_and_does_not_change_means() -> None:
    curve = Curve()
    curve.add(0, [one(0, 1.0), Logged(1, 0.0, 0, math.nan)])
    curve.add(1, [one(0, 3.0), one(1, 5.0)])
    assert curve.points == [CurvePoint(0, 2.0, 1.0, 3.0, 0, 1), CurvePoint(1, 5.0, 5.0, 5.0, 1, 1)]
    assert math.isnan(curve.mean)
    alone = Curve()
    alone.add(0, [Logged(7, 0.0, 0, math.inf)])
    assert (alone.points[0].step, alone.points[0].least_rank, alone.points[0].most_rank) == (7, -1, -1)
    assert math.isnan(alone.points[0].mean)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(1, 3))
def test_a_long_curve_has_few_points_and_the_mean_of_all(values: list[float], ranks: int) -> None:
    curve = Curve()
    for step, value in enumerate(values):
        for rank in range(ranks):
            curve.add(rank, [one(step, value)])
    points = curve.points
    assert len(points) <= MAX_POINTS
    assert len(points) >= min(len(values), MAX_POINTS // 2)
    assert [point.step for point in points] == sorted({point.step for point in points})
    assert points[-1].step == len(values) - 1
    assert (min(point.least for point in points), max(point.most for point in points)) == (min(values), max(values))
    whole = sum(each.total for each in curve._by_step()) / (len(values) * ranks)
    assert whole == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_a_point_of_a_long_curve_keeps_the_ranks_with_its_extremes() -> None:
    curve = Curve()
    for step in range(2 * MAX_POINTS):
        for rank, value in enumerate((1.0, 1.0 + step % 2, 1.0 - step % 2)):
            curve.add(rank, [one(step, value)])
    first, *others = curve.points
    assert first == CurvePoint(0, 1.0, 1.0, 1.0, 0, 0)
    assert {(point.least, point.least_rank, point.most, point.most_rank) for point in others} == {(0.0, 2, 2.0, 1)}


@given(st.integers(0, 5000), st.integers(1, 1500), st.sampled_from([1, 3, 10]), st.integers(1, 64))
def test_a_curve_begins_at_the_first_step_with_its_value(start: int, number: int, every: int, ahead: int) -> None:
    """Also where the loop was resumed, and where another rank reports the first steps later."""
    curve = Curve()
    steps = [start + every * at for at in range(number)]
    for rank, order in [(1, steps[ahead:]), (0, steps), (1, steps[:ahead])]:
        for step in order:
            curve.add(rank, [one(step, step)])
    points = curve.points
    assert points[0] == CurvePoint(start, start, start, start, points[0].least_rank, points[0].most_rank)
    assert points[-1].step == steps[-1]
    assert len(points) <= MAX_POINTS
    assert sum(each.count for each in curve._by_step()) == 2 * number


def test_a_curve_whose_first_step_runs_again_begins_there() -> None:
    curve = Curve()
    curve.add(0, [one(step, 1.0) for step in range(7, 1000)])
    curve.forget_from(7)
    assert curve.points == []
    curve.add(0, [one(step, 2.0) for step in range(7, 1000)])
    assert curve.points[0] == CurvePoint(7, 2.0, 2.0, 2.0, 0, 0)
    curve.forget_from(8)
    assert curve.points == [CurvePoint(7, 2.0, 2.0, 2.0, 0, 0)]


def test_steps_that_run_again_are_dropped() -> None:
    curve = Curve()
    curve.add(0, [one(step, 1.0) for step in range(10)])
    curve.forget_from(6)
    assert [point.step for point in curve.points] == list(range(6))


def test_steps_that_run_again_count_once_in_a_point_of_many_steps() -> None:
    curve = Curve()
    curve.add(0, [one(step, 100.0) for step in range(4 * MAX_POINTS)])
    again = curve.width * 20 + 1  # within a bin
    curve.forget_from(again)
    assert max(point.step for point in curve.points) < again
    curve.add(0, [one(step, 1.0) for step in range(again, 4 * MAX_POINTS)])
    assert {point.mean for point in curve.points} == {100.0, 1.0}


@given(st.integers(1, 2000), st.integers(0, 100), st.integers(1, 3), st.booleans())
def test_a_report_of_many_steps_keeps_the_first_one(number: int, start: int, times: int, is_first: bool) -> None:
    """Also if the loop logs a value several times in a step."""
    values = [(step, float(step + again)) for step in range(start, start + number) for again in range(times)]
    reported = list(summed(values, is_first=is_first))
    assert [each.step for each in reported] == sorted({each.step for each in reported})
    assert len(reported) <= MAX_VALUES + 1 + is_first
    assert sum(each.count for each in reported) == len(values)
    assert sum(each.total for each in reported) == sum(value for _, value in values)
    assert (reported[-1].step, reported[-1].last) == values[-1]
    if is_first:
        assert reported[0] == Logged(start, sum(value for _, value in values[:times]), times, float(start + times - 1))
    curve = Curve()
    curve.add(0, reported)
    assert not is_first or curve.points[0].step == start


def test_the_ranks_with_extreme_values_are_those_of_the_same_step() -> None:
    curve = Curve()
    assert curve.ends == ()
    curve.add(0, [one(0, 5.0), one(1, 4.0)])
    assert curve.ends == ()
    curve.add(1, [one(0, 6.0)])
    assert curve.ends == ((0, 5.0), (1, 6.0))  # not its 4 of the next step
    curve.add(1, [one(1, 4.0), one(2, 3.0)])
    assert curve.ends == ()
    curve.add(0, [one(2, math.nan)])
    assert curve.ends[0][0] == 0
    assert math.isnan(curve.ends[0][1])
    curve.forget_from(2)
    curve.add(0, [one(2, 1.0)])
    assert curve.ends == ()


@given(st.integers(1, 64), st.integers(0, 63), st.integers(3, 9), st.sampled_from([1, 2, 10, 100]))
def test_ranks_that_report_different_steps_are_still_compared(size: int, ahead: int, reports: int, every: int) -> None:
    """Both report equally many steps at a time, but not the same ones."""
    curve = Curve()
    for begin in range(0, reports * size, size):
        for rank, first in [(0, begin), (1, begin + ahead % size)]:
            curve.add(rank, [one(step * every, step + rank) for step in range(first, first + size)])
    (low, least), (high, most) = curve.ends
    assert (low, high, most - least) == (0, 1, 1)
