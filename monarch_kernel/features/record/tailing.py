"""Follows a record while it is written, and gives each step of its loops once all ranks have reported it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch_kernel.features.record.reading import RecordReader, ranks_of
from monarch_kernel.features.record.tables import Knob, Metric

__all__ = ["Point", "Tail"]

_PATIENCE_S = 5.0
"""How long a step waits for ranks that have not reported it. A name that not all ranks log waits once."""


class Point(NamedTuple):
    """What ranks logged in a step of a loop, and the knobs that were turned at this step."""

    loop: int
    step: int
    metrics: tuple[Metric, ...]
    knobs: tuple[Knob, ...]


@dataclass
class _Followed:
    """A loop that is followed.

    Attributes:
        ranks: how many ranks are expected to log.
        given: the last step that was given.
        fewer: name -> how many ranks log it, if these are not all.
        seen_at: step -> when it was first seen, of the steps that are not given.
        knobs: the changes of knobs that were given.
    """

    ranks: int
    given: int = -1
    fewer: dict[str, int] = field(default_factory=dict)
    seen_at: dict[int, float] = field(default_factory=dict)
    knobs: set[tuple[str, int]] = field(default_factory=set)


class Tail:
    """Gives the steps of a record, each once, in their order. Where a loop goes back, it gives the steps that run again.

    Args:
        reader: the record.
    """

    def __init__(self, reader: RecordReader) -> None:
        self._reader = reader
        self._loops: dict[int, _Followed] = {}
        self._backs = 0

    def points(self, now: float, *, is_last: bool = False) -> list[Point]:
        """Return the steps that are complete and were not given before.

        Args:
            now: the time, in seconds.
            is_last: whether nothing more will come, so that nothing is waited for.
        """
        reader = self._reader
        reader.reload("loops", "knobs", "events")
        if any(loop.id not in self._loops for loop in reader.loops):
            reader.reload("cells")
            for loop in reader.loops:
                cell = reader.cell(loop.cell)
                self._loops.setdefault(loop.id, _Followed(len(ranks_of(cell.ranks)) if cell is not None else 1))
        backs = [event for event in reader.events if event.kind == "recovery" and event.loop in self._loops]
        for event in backs[self._backs :]:
            followed = self._loops[event.loop or 0]
            followed.given = min(followed.given, (event.step or 0) - 1)
            followed.seen_at.clear()
        self._backs = len(backs)
        return [point for loop, followed in self._loops.items() for point in self._of(loop, followed, now, is_last)]

    def _of(self, loop: int, followed: _Followed, now: float, is_last: bool) -> Iterator[Point]:
        by_step: dict[int, list[Metric]] = {}
        for metric in self._reader.metrics_after(loop, followed.given):
            by_step.setdefault(metric.step, []).append(metric)
        turned = [
            each for each in self._reader.knobs if each.loop == loop and (each.name, each.step) not in followed.knobs
        ]
        for step in sorted(by_step):
            metrics = by_step[step]
            since = followed.seen_at.setdefault(step, now)
            lacking = [each for each in metrics if each.ranks < followed.fewer.get(each.name, followed.ranks)]
            if lacking and not is_last:
                if now < since + _PATIENCE_S:
                    return
                followed.fewer |= {each.name: each.ranks for each in lacking}
            followed.seen_at.pop(step, None)
            followed.given = step
            knobs = tuple(each for each in turned if each.step <= step and (each.name, each.step) not in followed.knobs)
            followed.knobs |= {(each.name, each.step) for each in knobs}
            yield Point(loop, step, tuple(each for each in metrics if not math.isnan(each.mean) or each.ranks), knobs)
