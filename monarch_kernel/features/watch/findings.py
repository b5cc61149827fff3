"""What the watch has found in one loop, by rank, and its text. No I/O, no clock."""

from __future__ import annotations

import statistics
from bisect import bisect
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from monarch_kernel.base.text import format_ranks, format_seconds, one_line
from monarch_kernel.features.watch.stragglers import Straggler
from monarch_kernel.features.watch.values import AGAIN, NOT_FINITE, SPIKE
from monarch_kernel.net.wire.messages import LoopAlarm

__all__ = ["Trouble", "straggler_text"]

_WINDOW_S = 5.0
_LEAST_S = 3.0
_LEAST_STEPS = 10
_LOADER_SHARE = 0.3
_SLOWER = 1.5
_SAME = AGAIN
"""Alarms for a value that are fewer steps apart are about the same fault."""

_MAX_OF_NAME = 3
"""The most faults that begin with the same value and get a line: some values are not finite now and then."""

_MAX_ALARMS = 256
_MAX_ALARMS_OF_NAME = 100
"""So many alarms are kept; the loop acts on later ones, too."""

_MAX_ACTIONS = 1_000
_MAX_NAMES = 3


class _Times(NamedTuple):
    steps: int
    step_s: float
    loader_s: float

    @property
    def seconds(self) -> float:
        return self.steps * self.step_s


@dataclass
class _Pace:
    """How long the steps of one rank take, over the last seconds."""

    times: deque[_Times] = field(default_factory=deque)
    is_warm: bool = False

    def add(self, times: _Times) -> None:
        if not self.is_warm:  # the first steps start workers, compile, and allocate
            self.is_warm = True
            return
        self.times.append(times)
        while _is_enough(list(self.times)[2:], _WINDOW_S):  # without the longest ones, too
            self.times.popleft()

    @property
    def _typical(self) -> list[_Times]:
        """The times without the longest ones, which may be a breakpoint, a pause, or the first batch of an epoch."""
        times = sorted(self.times.copy(), key=lambda each: each.seconds)
        return times[:-1]

    @property
    def is_known(self) -> bool:
        return _is_enough(self._typical, _LEAST_S)

    @property
    def step_s(self) -> float:
        times = self._typical
        return sum(each.seconds for each in times) / sum(each.steps for each in times)

    @property
    def loader_share(self) -> float:
        times = self._typical
        return sum(each.steps * each.loader_s for each in times) / sum(each.seconds for each in times)


def _is_enough(times: Sequence[_Times], seconds: float) -> bool:
    return sum(each.seconds for each in times) >= seconds and sum(each.steps for each in times) >= _LEAST_STEPS


class Trouble:
    """What is wrong with one loop.

    Attributes:
        hooks: rank -> kind of an alarm -> what the rank wants then (`LoopStarted`); of each rank that has started the loop.
    """

    def __init__(self) -> None:
        self.hooks: dict[int, Mapping[str, str]] = {}
        self._alarms: list[tuple[int, LoopAlarm]] = []
        self._last: dict[tuple[str, str], LoopAlarm] = {}  # by kind and name, of those that are not kept
        self._later = 0  # of those, how many are no repetitions
        self._paces: dict[int, _Pace] = {}
        self._backs: list[int] = []

    def rolled_back(self, step: int) -> None:
        """All ranks restore a snapshot before a step: what goes wrong from then on is new."""
        self._backs.append(step)

    def alarmed(self, rank: int, alarm: LoopAlarm) -> bool:
        """Note an alarm of a rank; returns whether it is no repetition of an alarm of another rank, or of an earlier one."""
        is_first = not any(self._is_same(alarm, other) for _, other in self._alarms)
        for at, (other_rank, other) in enumerate(self._alarms):
            if other_rank == rank and (other.kind, other.name, other.step) == (alarm.kind, alarm.name, alarm.step):
                self._alarms[at] = rank, alarm
                return False
        of_name = sum((other.kind, other.name) == (alarm.kind, alarm.name) for _, other in self._alarms)
        if len(self._alarms) < _MAX_ALARMS and of_name < _MAX_ALARMS_OF_NAME:
            self._alarms.append((rank, alarm))
            return is_first
        before, last = self._later, self._last.get((alarm.kind, alarm.name))
        self._last[alarm.kind, alarm.name] = alarm
        self._later += is_first and (last is None or not self._are_close(alarm, last))
        return before < self._later <= _MAX_ACTIONS

    def action(self, kind: str) -> str:
        """What the loop does some steps after an alarm: the first of ``stop``, ``rollback`` and ``call`` that a rank wants."""
        wanted = {hooks.get(kind, "") for hooks in self.hooks.copy().values()}
        return next((each for each in ("stop", "rollback", "call") if each in wanted), "")

    def _done(self, kind: str) -> str:
        """Say what the loop does for an alarm, and on which ranks; empty if nothing."""
        action, hooks = self.action(kind), self.hooks.copy()
        if action == "stop":
            return f"The loop stops (on_{kind}). "
        if action == "rollback":
            return f"All ranks restore the last snapshot before that step, and go on (on_{kind}). "
        if any(each.get(kind) == "skip" for each in hooks.values()):
            return f"No rank applies the update of that step (on_{kind}). "
        callers = sorted(rank for rank, each in hooks.items() if each.get(kind) == "call")
        if not callers:
            return ""
        if len(callers) == len(hooks) > 1:
            return f"All ranks call on_{kind}. "
        return f"{format_ranks(callers)} call{'s' * (len(callers) == 1)} on_{kind}. "

    def _is_same(self, alarm: LoopAlarm, other: LoopAlarm) -> bool:
        if (alarm.kind, alarm.name) != (other.kind, other.name):
            return False
        return self._are_close(alarm, other)

    def _are_close(self, alarm: LoopAlarm, other: LoopAlarm) -> bool:
        return self._is_one_run(alarm, other) and abs(alarm.step - other.step) < _SAME

    def _is_one_run(self, alarm: LoopAlarm, other: LoopAlarm) -> bool:
        """Whether no snapshot was restored between two alarms."""
        return bisect(self._backs, alarm.step) == bisect(self._backs, other.step)

    def _not_finite(self, alarms: Sequence[tuple[int, LoopAlarm]]) -> list[list[tuple[int, LoopAlarm]]]:
        """Return the alarms for values that are not finite by faults, in an order to which later alarms only add."""
        faults: list[list[tuple[int, LoopAlarm]]] = []
        for rank, alarm in alarms:
            if alarm.kind != NOT_FINITE:
                continue
            fault = next((each for each in faults if any(self._are_close(alarm, other) for _, other in each)), None)
            if fault is None and alarm.is_more:
                fault = next((each for each in reversed(faults) if self._is_one_run(alarm, each[0][1])), None)
            if fault is None:
                faults.append([(rank, alarm)])
            else:
                fault.append((rank, alarm))
        started = Counter[tuple[int, str]]()
        told = []
        for fault in faults:
            first = fault[0][1]
            started[key := (bisect(self._backs, first.step), first.name)] += 1
            if started[key] <= _MAX_OF_NAME:
                told.append(fault)
        return told

    def reported(self, rank: int, steps: int, step_s: float, loader_s: float) -> None:
        """Take the times of some steps of a rank."""
        if steps > 0 and step_s > 0:
            self._paces.setdefault(rank, _Pace()).add(_Times(steps, step_s, loader_s))

    def step_s(self) -> float:
        """How long a step takes, in seconds: the median over ranks; 0 if that is not known."""
        known = [pace.step_s for pace in list(self._paces.values()) if len(pace.times) > 1]
        return statistics.median(known) if known else 0.0

    def texts(self) -> dict[str, str]:
        """Return what is wrong: a key that stays the same, and the current text."""
        alarms = list(self._alarms)
        found: dict[str, str] = {}
        for number, group in enumerate(self._not_finite(alarms)):
            key = f"{NOT_FINITE} {number}" if number else NOT_FINITE
            found[key] = not_finite_text(group, self._done(NOT_FINITE))
            first = min((each for each in group if each[1].module), key=lambda each: each[1].step, default=None)
            if first is not None:
                found[f"{key} module"] = f"on [{first[0]}] {one_line(first[1].module)}"
        spikes: list[list[tuple[int, LoopAlarm]]] = []
        for rank, alarm in alarms:
            if alarm.kind == SPIKE:
                same = next((each for each in spikes if self._is_same(alarm, each[0][1])), None)
                if same is None:
                    spikes.append([(rank, alarm)])
                else:
                    same.append((rank, alarm))
        for each in spikes:
            found[f"{SPIKE} {each[0][1].name} {each[0][1].step}"] = spike_text(each, self._done(SPIKE))
        known = {rank: pace for rank, pace in sorted(self._paces.items()) if pace.is_known}
        shares = {rank: pace.loader_share for rank, pace in known.items()}
        if text := loader_text(shares, {rank: pace.step_s for rank, pace in known.items()}):
            found["loader"] = text
        for rank, text in slow_texts({rank: pace.step_s for rank, pace in known.items()}).items():
            found[f"slow {rank}"] = text
        return found


def not_finite_text(alarms: Sequence[tuple[int, LoopAlarm]], done: str) -> str:
    """Describe values that are not finite: the first rank and step, how far it has spread, and what the loop does."""
    rank, first = min(alarms, key=lambda each: (each[1].step, each[0]))
    names = list(dict.fromkeys(alarm.name for _, alarm in alarms if alarm.name != first.name))
    steps = {
        other: alarm.step for other, alarm in sorted(alarms, key=lambda each: -each[1].step) if alarm.name == first.name
    }
    later = sorted(other for other, step in steps.items() if other != rank and step > first.step)
    same = sorted(other for other, step in steps.items() if step == first.step)
    text = f"{one_line(first.name)} is {first.value} in step {first.step:,}, first on {format_ranks(same)}"
    if later:
        text += f", then on {format_ranks(later)} from step {min(steps[each] for each in later):,}"
    if names:
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        text += f"; later {', '.join(map(one_line, names[:_MAX_NAMES]))}{more} too"
    if first.about:
        text += f". On [{rank}]: {one_line(first.about)}"
    return (
        f"{text}. Usual causes: too high a learning rate, a logarithm or a division of 0, a bad batch on that rank. "
        f"{done}%mesh rollback goes back to a snapshot before that step"
    )


def spike_text(alarms: Sequence[tuple[int, LoopAlarm]], done: str) -> str:
    """Describe a spike: the ranks, the step, the value against the median of the last ones, and what the loop does."""
    _, first = min(alarms, key=lambda each: each[1].step)
    of, largest = max(alarms, key=lambda each: each[1].value)
    about = f". On [{of}]: {one_line(largest.about)}" if largest.about else ""
    ranks = format_ranks(sorted({rank for rank, _ in alarms}))
    return (
        f"{one_line(first.name)} jumps to {largest.value:.4g} in step {first.step:,} on {ranks}; the median of the last "
        f"steps is {first.usual:.4g}{about}. Usual causes: a bad batch, too high a learning rate. {done}%mesh rollback goes "
        "back to a snapshot before that step, %mesh loop KNOB=VALUE lowers a learning rate"
    )


def loader_text(shares: Mapping[int, float], step_s: Mapping[int, float]) -> str:
    """Describe ranks that wait long for their loader; empty if there are none."""
    slow = sorted((rank for rank, share in shares.items() if share >= _LOADER_SHARE), key=lambda rank: -shares[rank])
    if not slow:
        return ""
    worst = slow[0]
    mean = sum(shares[rank] for rank in slow) / len(slow)
    waits = f"{format_ranks(sorted(slow))} wait{'s' * (len(slow) == 1)}"
    most = f"rank {worst}: {_percent(shares[worst])} of {_duration(step_s[worst])}"
    return (
        f"{waits} for the DataLoader for {_percent(mean)} of a step ({most}): the loader is the bottleneck. Try more workers "
        "(num_workers=), pin_memory=True, prefetch_factor=, or cheaper transforms"
    )


def slow_texts(step_s: Mapping[int, float]) -> dict[int, str]:
    """Describe the ranks whose steps take much longer than the median of all ranks."""
    if len(step_s) < 2:
        return {}
    median = statistics.median_low(step_s.values())
    return {
        rank: (
            f"[{rank}] takes {_duration(seconds)} a step, the median of the ranks is {_duration(median)}. "
            "%mesh stacks shows where it is"
        )
        for rank, seconds in step_s.items()
        if seconds > _SLOWER * median and seconds > median + 0.001
    }


def straggler_text(straggler: Straggler, step_s: float) -> str:
    """Describe a rank that the others wait for."""
    step = f" (a step takes {_duration(step_s)})" if step_s else ""
    where = f", while it is at {straggler.place}" if straggler.place else ""
    often = f"in {_percent(straggler.share)} of the looks at them"
    if straggler.late_s:
        often = f"for {_duration(straggler.late_s)}, in {_percent(straggler.share)} of the collectives compared"
    return (
        f"the other ranks wait for [{straggler.rank}] {often}{step}{where}. Usual causes: more or longer data on that rank, "
        "work that only it does (logging, evaluation), a slower or shared device"
    )


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else format_seconds(seconds)


def _percent(share: float) -> str:
    return f"{100 * min(share, 1.0):.0f} %"
