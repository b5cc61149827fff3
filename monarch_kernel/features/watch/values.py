"""Rules for logged values: the first value that is not finite, and a loss that jumps far above the last ones. No I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from monarch_kernel.net.wire.messages import LoopAlarm

__all__ = ["AGAIN", "NOT_FINITE", "SPIKE", "Alarm", "LossWatch", "ValueWatch", "is_loss"]

NOT_FINITE = "nan"
SPIKE = "spike"

_WINDOW = 128
_LEAST = 20
"""Values that must be known before one of them can be a spike."""

_MANY = 64
"""The limit is farther away while fewer values are known, because the largest of a few says little."""

_RENEW = 16
"""The limit is renewed after this many values, because it takes some microseconds."""

_MEMORY = 2048
"""Values whose largest excess counts, in units of the usual deviation at their time: some losses have rare peaks."""

_RARE = 2
"""So many alarms in the memory are faults; if there are more, such values are usual for this loss, and count as others do."""

_LEAST_PART = 1e-3  # of the median: a loss that hardly moves has no deviation to compare later ones with
_MOST_EXCESS = 1e6

_OVER_MAX = 5.0
_OVER_SIGMA = 12.0
_SIGMA_PER_MAD = 1.4826
_SHIFT = 32
"""After this many values above the limit in succession, they are the new normal."""

AGAIN = 64
"""After this many finite values in succession, a value that is not finite is a new fault."""


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
        self._count = 0
        self._unit = 0.0  # the usual deviation
        self._peaks: deque[tuple[int, float]] = deque()  # number and excess of the values that no later one exceeds
        self._alarms: deque[tuple[int, float]] = deque()

    def is_spike(self, value: float) -> bool:
        """Take a finite value; returns whether it is the first one above the limit."""
        return self.is_far_above(value) and len(self.above) == 1

    def is_far_above(self, value: float) -> bool:
        """Take a value; returns whether it is above the limit. Values that are not finite are no jumps."""
        if not math.isfinite(value):
            return False
        self._count += 1
        if value > self.limit:
            if not self.above and self._unit > 0:
                self._alarms.append((self._count, self._excess(value)))
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
        if self._unit > 0:
            excess = self._excess(value)
            while self._peaks and self._peaks[-1][1] <= excess:
                self._peaks.pop()
            self._peaks.append((self._count, excess))
        self._age += 1
        if self._age >= _RENEW and len(self.values) >= _LEAST:
            self._renew()
        return False

    def _renew(self) -> None:
        """Place the limit far above both the usual deviation and the largest values, the last ones and those of the memory."""
        self._age = 0
        ordered = sorted(self.values)
        middle = self.median = ordered[len(ordered) // 2]
        deviation = sorted(abs(value - middle) for value in ordered)[len(ordered) // 2]
        if ordered[0] == ordered[-1] == 0:  # as of a hinge loss: there is no scale to compare with
            self.limit = math.inf
            return
        self._unit = max(_SIGMA_PER_MAD * deviation, _LEAST_PART * abs(middle))
        largest = max(ordered[-1] - middle, self._unit * self._largest_excess())
        gap = max(_OVER_MAX * largest, _OVER_SIGMA * self._unit, 0.1 * abs(middle), 1e-9)
        self.limit = middle + gap * max(1.0, _MANY / len(ordered))

    def _excess(self, value: float) -> float:
        """Return how far a value is above the median, in units of the usual deviation."""
        return min((value - self.median) / self._unit, _MOST_EXCESS)

    def _largest_excess(self) -> float:
        """Return the largest excess over the median that is usual for this loss, in units of the usual deviation."""
        for known in (self._peaks, self._alarms):
            while known and known[0][0] <= self._count - _MEMORY:
                known.popleft()
        usual = sorted((excess for _, excess in self._alarms), reverse=True)[_RARE:]
        return max(0.0, self._peaks[0][1] if self._peaks else 0.0, usual[0] if usual else 0.0)


@dataclass
class _Streak:
    """The last values of one name that are not finite.

    Attributes:
        step: the step of the first one of them.
        value: its value.
        length: how many are not finite in succession; 0 if the last value is finite.
        finite: how many values are finite since then.
        has_alarm: whether there was an alarm.
    """

    step: int
    value: float
    length: int = 0
    finite: int = 0
    has_alarm: bool = False

    def take(self, step: int, value: float, patience: int) -> bool:
        """Take a value; returns whether it is the one that makes this an alarm."""
        if math.isfinite(value):
            self.length = 0
            self.finite += 1
            return False
        if self.finite >= AGAIN:
            self.has_alarm = False
        if self.length == 0:
            self.step, self.value = step, value
        self.length += 1
        self.finite = 0
        is_alarm = not self.has_alarm and self.length >= patience
        self.has_alarm |= is_alarm
        return is_alarm


class ValueWatch:
    """Watches the values that one rank logs in one loop."""

    def __init__(self) -> None:
        self._series: dict[str, LossWatch | None] = {}
        self._streaks: dict[str, _Streak] = {}

    def take(self, name: str, values: Iterable[tuple[int, float]], patience: int = 1) -> list[LoopAlarm]:
        """Take the values of some steps, and return what is wrong with them.

        Args:
            name: the name under which they are logged.
            values: pairs of step and value.
            patience: how many values in succession must not be finite.
        """
        if name not in self._series:
            self._series[name] = LossWatch() if is_loss(name) else None
        series, streak = self._series[name], self._streaks.get(name)
        found: list[LoopAlarm] = []
        for step, value in values:
            if streak is None and not math.isfinite(value):
                streak = self._streaks[name] = _Streak(step, value)
            if streak is not None and streak.take(step, value, patience):
                found.append(LoopAlarm(NOT_FINITE, name, streak.step, streak.value, is_more=self._has_others(name)))
            if series is not None and math.isfinite(value):
                median = series.median
                if series.is_spike(value):
                    found.append(LoopAlarm(SPIKE, name, step, value, median))
        return found

    def _has_others(self, name: str) -> bool:
        """Whether the last value of another name is not finite, either, and there was an alarm for it."""
        return any(each.has_alarm and each.length for other, each in self._streaks.items() if other != name)
