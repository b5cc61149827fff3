"""Rules for logged values: the first value that is not finite, and a loss that jumps far above the last ones. No I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from monarch_kernel.net.wire.messages import LoopAlarm

__all__ = ["NOT_FINITE", "SPIKE", "Alarm", "LossWatch", "ValueWatch", "is_loss"]

NOT_FINITE = "nan"
SPIKE = "spike"

_WINDOW = 128
_LEAST = 20
"""Values that must be known before one of them can be a spike."""

_MANY = 64
"""The limit is farther away while fewer values are known, because the largest of a few says little."""

_RENEW = 16
"""The limit is renewed after this many values, because it takes some microseconds."""

# With these two, 36,000 steps of normal or exponential noise had no alarm in 10 of 10 runs.
_OVER_MAX = 5.0
_OVER_SIGMA = 12.0
_SIGMA_PER_MAD = 1.4826
_SHIFT = 32
"""After this many values above the limit in succession, they are the new normal."""


class Alarm(NamedTuple):
    """What a function gets that a loop calls for a value: ``on_nan``, ``on_spike``.

    Attributes:
        kind: ``nan`` or ``spike``.
        name: the name under which the value was logged.
        step: the step in which it was logged; the ranks are some steps further.
        value: the value.
        usual: the median of the values before a spike.
        rank: the rank that has reported it first.
    """

    kind: str
    name: str
    step: int
    value: float
    usual: float
    rank: int


def is_loss(name: str) -> bool:
    """Whether the values of this name are watched for spikes."""
    return "loss" in name.lower()


class LossWatch:
    """The last values of one loss on one rank."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=_WINDOW)
        self.limit = math.inf
        self.median = math.nan
        self.above: list[float] = []
        self._age = 0

    def is_spike(self, value: float) -> bool:
        """Take a finite value; returns whether it is the first one above the limit."""
        return self.is_far_above(value) and len(self.above) == 1

    def is_far_above(self, value: float) -> bool:
        """Take a value; returns whether it is above the limit. Values that are not finite are no jumps."""
        if not math.isfinite(value):
            return False
        if value > self.limit:
            self.above.append(value)
            if len(self.above) >= _SHIFT:
                self.values.clear()
                self.values.extend(self.above)
                self.above.clear()
                self._renew()
                return False
            return True
        self.above.clear()
        self.values.append(value)
        self._age += 1
        if self._age >= _RENEW and len(self.values) >= _LEAST:
            self._renew()
        return False

    def _renew(self) -> None:
        """Place the limit far above both the largest of the last values and their usual deviation."""
        self._age = 0
        ordered = sorted(self.values)
        middle = self.median = ordered[len(ordered) // 2]
        deviation = sorted(abs(value - middle) for value in ordered)[len(ordered) // 2]
        gap = max(_OVER_MAX * (ordered[-1] - middle), _OVER_SIGMA * _SIGMA_PER_MAD * deviation, 0.1 * abs(middle), 1e-9)
        self.limit = middle + gap * max(1.0, _MANY / len(ordered))


class ValueWatch:
    """Watches the values that one rank logs in one loop."""

    def __init__(self) -> None:
        self._series: dict[str, LossWatch | None] = {}
        self._not_finite: set[str] = set()

    def take(self, name: str, values: Iterable[tuple[int, float]]) -> list[LoopAlarm]:
        """Take the values of some steps, and return what is wrong with them.

        Args:
            name: the name under which they are logged.
            values: pairs of step and value.
        """
        if name not in self._series:
            self._series[name] = LossWatch() if is_loss(name) else None
        series = self._series[name]
        found: list[LoopAlarm] = []
        for step, value in values:
            if not math.isfinite(value):
                if name not in self._not_finite:
                    self._not_finite.add(name)
                    found.append(LoopAlarm(NOT_FINITE, name, step, value))
            elif series is not None:
                median = series.median
                if series.is_spike(value):
                    found.append(LoopAlarm(SPIKE, name, step, value, median))
        return found
