"""Curves of logged values by step: means over ranks, with a bounded number of points however long the loop is.

One thread adds to a curve while other threads read it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from monarch_kernel.base.events import CurvePoint
from monarch_kernel.net.wire.messages import Logged

__all__ = ["MAX_POINTS", "Curve"]

MAX_POINTS = 256
"""Points of a curve; a chart has no pixels to show more."""

_COMPARED = 32
"""Steps kept per rank, to compare ranks at a step that all have logged."""


@dataclass
class _Bin:
    total: float = 0.0
    count: int = 0
    least: float = math.inf
    most: float = -math.inf
    step: int = 0
    least_rank: int = -1
    most_rank: int = -1

    def add(self, rank: int, value: Logged) -> None:
        self.step = max(self.step, value.step)
        if value.count:
            mean = value.total / value.count
            self.merge(_Bin(value.total, value.count, mean, mean, value.step, rank, rank))

    def merge(self, other: _Bin) -> None:
        self.total += other.total
        self.count += other.count
        if other.least < self.least:
            self.least, self.least_rank = other.least, other.least_rank
        if other.most > self.most:
            self.most, self.most_rank = other.most, other.most_rank
        self.step = max(self.step, other.step)


def _weight(value: Logged) -> int:
    """Rank a step by how likely other ranks keep it too, whichever steps they report: like the marks on a ruler."""
    step = value.step
    return max(step & -step, (step + 1) & -(step + 1))


@dataclass
class Curve:
    """One metric over the steps of a loop. When there are too many bins, pairs of bins are merged.

    A bin stands at its last step, so that the curve ends where the loop is. The first step has a bin that is never merged, so
    that the curve also begins where the loop began.

    Attributes:
        last: rank -> its last value.
        width: steps in a bin.
    """

    last: dict[int, float] = field(default_factory=dict)
    width: int = 1
    _first: _Bin | None = None
    _bins: dict[int, _Bin] = field(default_factory=dict)
    _recent: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)

    def add(self, rank: int, values: Iterable[Logged]) -> None:
        """Add what a rank has logged."""
        values = list(values)
        for value in values:
            self.last[rank] = value.last
            self._bin_of(value.step).add(rank, value)
        kept = {value.step: value.last for value in [*heapq.nlargest(3, values, _weight), *values[-1:]]}
        self._recent.setdefault(rank, deque(maxlen=_COMPARED)).extend(sorted(kept.items()))
        while len(self._bins) + 1 > MAX_POINTS:
            self._widen()

    def forget_from(self, step: int) -> None:
        """Drop what was logged for a step and later ones, because the loop runs them again.

        A bin that also has earlier steps is dropped as a whole, since its sum can't be divided.
        """
        if self._first is None or self._first.step >= step:
            self._first, self._bins = None, {}
        self._bins = {at: each for at, each in self._bins.items() if each.step < step}
        self._recent = {}

    @property
    def points(self) -> list[CurvePoint]:
        """The current points, by step."""
        return [
            CurvePoint(
                each.step,
                each.total / each.count if each.count else math.nan,
                each.least,
                each.most,
                each.least_rank,
                each.most_rank,
            )
            for each in self._by_step()
        ]

    @property
    def mean(self) -> float:
        """The mean of the last values of all ranks; nan if one of them is nan, or there is none."""
        last = self.last.copy()
        return sum(last.values()) / len(last) if last else math.nan

    @property
    def ends(self) -> tuple[tuple[int, float], ...]:
        """The ranks with the least and the greatest value in the last step that all ranks have logged, with these values.

        If the last value of a rank is not finite, only this rank. Empty if all values are equal, or no step is known of all.
        """
        for rank, value in sorted(self.last.copy().items()):
            if not math.isfinite(value):
                return ((rank, value),)
        recent = {rank: dict(list(steps)) for rank, steps in sorted(self._recent.copy().items())}
        common = set.intersection(*(set(steps) for steps in recent.values())) if recent else None
        if not common:
            return ()
        by_value = sorted(((rank, steps[max(common)]) for rank, steps in recent.items()), key=lambda each: each[1])
        return (by_value[0], by_value[-1]) if by_value[0][1] < by_value[-1][1] else ()

    def _bin_of(self, step: int) -> _Bin:
        """Return the bin that a step belongs to. A rank may report a step that is earlier than the first one so far."""
        first = self._first
        if first is None or step < first.step:
            self._first = _Bin(step=step)
            if first is not None:
                self._bins.setdefault(first.step // self.width, _Bin()).merge(first)
            return self._first
        return first if step == first.step else self._bins.setdefault(step // self.width, _Bin())

    def _by_step(self) -> list[_Bin]:
        """Return the bins in the order of their steps."""
        later = [each for _, each in sorted(self._bins.copy().items())]
        return later if self._first is None else [self._first, *later]

    def _widen(self) -> None:
        self.width *= 2
        narrow, self._bins = self._bins, {}
        for at, each in narrow.items():
            self._bins.setdefault(at // 2, _Bin()).merge(each)
