"""Curves as CSV: a line for each point, that every reader of CSV understands."""

from __future__ import annotations

import csv
import io
import math

import pytest

from monarch_kernel.base.events import CurvePoint, CurveView, LoopView
from monarch_kernel.features.live.csv_text import csv_text


def test_a_line_has_the_mean_and_the_ranks_with_the_extremes() -> None:
    points = (CurvePoint(0, 2.0, 1.0, 3.5, 2, 0), CurvePoint(1, math.nan, math.inf, -math.inf))
    name = 'loss, "all"\nof it'
    view = LoopView((1, 1), "t", "", 2, 2, "over", 1.0, curves=(CurveView(name, 2.0, points=points),))
    header, *rows = csv.reader(io.StringIO(csv_text(view), newline=""))
    assert header == ["name", "step", "mean", "min", "min_rank", "max", "max_rank"]
    assert rows == [[name, "0", "2.0", "1.0", "2", "3.5", "0"], [name, "1", "", "", "", "", ""]]


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_name_is_a_formula_for_a_spreadsheet(start: str) -> None:
    name = f"{start}cmd|' /c calc'!A1"
    view = LoopView(
        (1, 1),
        "t",
        "",
        1,
        1,
        "over",
        1.0,
        curves=(CurveView(name, 1.0, points=(CurvePoint(0, -1.0, -1.0, -1.0, 0, 0),)),),
    )
    _, row = csv.reader(io.StringIO(csv_text(view), newline=""))
    assert row[:3] == [f"'{name}", "0", "-1.0"]
