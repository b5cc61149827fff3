"""Curves are means over ranks, and stay small."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.steer.curves import MAX_POINTS, Curve, Point
from monarch_kernel.wire.messages import Logged


def one(step: int, value: float) -> Logged:
    return Logged(step, value, 1, value)


def test_ranks_are_put_together_by_step() -> None:
    curve = Curve()
    curve.add(0, [one(0, 4.0), one(1, 2.0)])
    assert curve.points == [Point(0, 4.0, 4.0, 4.0), Point(1, 2.0, 2.0, 2.0)]
    curve.add(1, [one(0, 2.0)])
    assert curve.points[0] == Point(0, 3.0, 2.0, 4.0)
    assert curve.last == {0: 2.0, 1: 2.0}
    assert curve.mean == 2.0


def test_what_is_no_number_is_seen_and_spoils_no_mean() -> None:
    curve = Curve()
    curve.add(0, [one(0, 1.0), Logged(1, 0.0, 0, math.nan)])
    curve.add(1, [one(0, 3.0), one(1, 5.0)])
    assert curve.points == [Point(0, 2.0, 1.0, 3.0), Point(1, 5.0, 5.0, 5.0)]
    assert math.isnan(curve.mean)
    alone = Curve()
    alone.add(0, [Logged(7, 0.0, 0, math.inf)])
    assert alone.points[0].step == 7
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
    whole = sum(each.total for each in curve._bins.values()) / (len(values) * ranks)
    assert whole == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_steps_that_are_done_anew_are_forgotten() -> None:
    curve = Curve()
    curve.add(0, [one(step, 1.0) for step in range(10)])
    curve.forget_from(6)
    assert [point.step for point in curve.points] == list(range(6))
