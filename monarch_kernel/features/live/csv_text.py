"""Writes the curves of a loop as CSV. Pure."""

from __future__ import annotations

import csv
import io
import math

from monarch_kernel.base.events import LoopView

__all__ = ["csv_text"]

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet calculates a text that begins with one of these, and a formula can read other files or the network."""

_FIELDS = ("name", "step", "mean", "min", "min_rank", "max", "max_rank")


def csv_text(view: LoopView) -> str:
    """Write a line for each point of each curve: means over ranks, and the ranks with the extremes.

    A field is empty if it is not known, as the mean of a point without a number. A name that a spreadsheet would take for a
    formula begins with an apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_FIELDS)
    for curve in view.curves:
        name = f"'{curve.name}" if curve.name.startswith(_FORMULA) else curve.name
        for point in curve.points:
            ranks = (each if each >= 0 else "" for each in (point.least_rank, point.most_rank))
            least_rank, most_rank = ranks
            row = (point.mean, point.least, least_rank, point.most, most_rank)
            writer.writerow(
                [name, point.step, *("" if isinstance(x, float) and not math.isfinite(x) else x for x in row)]
            )
    return text.getvalue()
