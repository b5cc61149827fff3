"""Summaries of records for lists of runs: outcome, the curve of a metric in a few points, knobs, size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from monarch_kernel.features.record.differences import compare
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.tables import Metric

__all__ = ["comparison_of", "curve_of", "summary_of"]

POINTS = 60
"""Points of the curve of a run."""

_MAX_NAMES = 12
_MAX_LINES = 20
_MAX_TEXT = 300


def summary_of(record: RecordReader, *, is_running: bool = False) -> dict[str, Any]:
    """Return what a list of runs shows of a record, as JSON.

    Args:
        record: the record.
        is_running: whether it is being written.
    """
    run = record.run
    started = _number(run.get("started"))
    ended = _number(run.get("ended"))
    by_name: dict[tuple[int, str], list[Metric]] = {}
    for metric in record.metrics:
        by_name.setdefault((metric.loop, metric.name), []).append(metric)
    last = {name: rows[-1].mean for (_, name), rows in by_name.items()}
    # The curve of the loop that has the most steps; of its metrics the loss, if there is one.
    chosen = max(by_name, key=lambda key: (len(by_name[key]), key[1] == "loss"), default=None)
    turned = {knob.name: (knob.value, knob.step) for knob in record.knobs if not knob.is_default}
    defaults = {knob.name: (knob.value, 0) for knob in record.knobs if knob.is_default and knob.name not in turned}
    return {
        "started": started,
        "took": None if started is None or ended is None else round(ended - started, 1),
        "outcome": "running" if is_running else _outcome(record),
        "steps": sum(loop.reached for loop in record.loops),
        "cells": len(record.cells),
        "deaths": sum(event.kind == "death" for event in record.events),
        "metric": "" if chosen is None else chosen[1],
        "curve": [] if chosen is None else curve_of(by_name[chosen]),
        "last": [[name, _finite(value)] for name, value in list(last.items())[:_MAX_NAMES]],
        "knobs": [[name, value, step] for name, (value, step) in list({**turned, **defaults}.items())[:_MAX_NAMES]],
        "nbytes": record.nbytes,
        "damage": [text[:_MAX_TEXT] for text in record.damage[:1]],
    }


def curve_of(metrics: Sequence[Metric], points: int = POINTS) -> list[list[float | None]]:
    """Return steps and values of a curve, each the mean of neighbouring steps; null where none is finite."""
    size = max(1, math.ceil(len(metrics) / points))
    found: list[list[float | None]] = []
    for at in range(0, len(metrics), size):
        some = metrics[at : at + size]
        values = [each.mean for each in some if math.isfinite(each.mean)]
        found.append([some[-1].step, sum(values) / len(values) if values else None])
    return found


def comparison_of(old: RecordReader, new: RecordReader) -> dict[str, Any]:
    """Return how two records differ, as JSON: the first difference, the others, and the last values of both."""
    found = compare(old, new)
    lasts = [{metric.name: metric.mean for metric in record.metrics} for record in (old, new)]
    return {
        "first": "" if found.first is None else found.first.text[:_MAX_TEXT],
        "lines": [each.text[:_MAX_TEXT] for each in list(found)[:_MAX_LINES]],
        "more": max(0, len(found) - _MAX_LINES),
        "compared": found.counts,
        "last": [[name, _finite(lasts[0][name]), _finite(lasts[1][name])] for name in lasts[0] if name in lasts[1]][
            :_MAX_NAMES
        ],
    }


def _outcome(record: RecordReader) -> str:
    if "ended" not in record.run:
        return "no end"
    outcomes = [cell.outcome for cell in record.cells if cell.mesh] or [cell.outcome for cell in record.cells]
    return (outcomes[-1] or "no end") if outcomes else "ok"


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
