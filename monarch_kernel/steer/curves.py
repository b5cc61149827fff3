"""What ranks have logged, by step: means over ranks, few enough points to draw, however long the loop is.

Curves are read by other threads than the one that adds to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch_kernel.wire.messages import Logged

__all__ = ["MAX_POINTS", "Curve", "Point"]

MAX_POINTS = 256
"""Of a curve; more than a chart has pixels for would cost what nobody sees."""


class Point(NamedTuple):
    """Some steps of a curve.

    Attributes:
        step: the last of them.
        mean: over steps and ranks; nan if no value was a number.
        least: the least value of a rank, each a mean over its steps where it has told only that.
        most: the greatest.
    """

    step: int
    mean: float
    least: float
    most: float


@dataclass
class _Bin:
    total: float = 0.0
    count: int = 0
    least: float = math.inf
    most: float = -math.inf
    step: int = 0

    def add(self, value: Logged) -> None:
        self.step = max(self.step, value.step)
        if value.count:
            mean = value.total / value.count
            self.merge(_Bin(value.total, value.count, mean, mean, value.step))

    def merge(self, other: _Bin) -> None:
        self.total += other.total
        self.count += other.count
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)
        self.step = max(self.step, other.step)


@dataclass
class Curve:
    """One metric. Steps are put into bins; when these get too many, each two become one.

    Attributes:
        last: rank -> its last value.
        width: steps in a bin.
    """

    last: dict[int, float] = field(default_factory=dict)
    width: int = 1
    _bins: dict[int, _Bin] = field(default_factory=dict)

    def add(self, rank: int, values: Iterable[Logged]) -> None:
        """Take what a rank has logged."""
        for value in values:
            self.last[rank] = value.last
            self._bins.setdefault(value.step // self.width, _Bin()).add(value)
        while len(self._bins) > MAX_POINTS:
            self._widen()

    def forget_from(self, step: int) -> None:
        """Drop what was logged for a step and later ones, which are done anew."""
        self._bins = {at: each for at, each in self._bins.items() if at * self.width < step}

    @property
    def points(self) -> list[Point]:
        """The curve as it is now, by step."""
        return [
            Point(each.step, each.total / each.count if each.count else math.nan, each.least, each.most)
            for _, each in sorted(self._bins.copy().items())
        ]

    @property
    def mean(self) -> float:
        """Of the last values of all ranks; nan if one is that, or there is none."""
        last = self.last.copy()
        return sum(last.values()) / len(last) if last else math.nan

    def _widen(self) -> None:
        self.width *= 2
        narrow, self._bins = self._bins, {}
        for at, each in narrow.items():
            self._bins.setdefault(at // 2, _Bin()).merge(each)
