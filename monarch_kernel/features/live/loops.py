"""The loops that ranks are in, as the controller has them: how far they are, what was logged, what is to be told; pure."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from monarch_kernel.base.events import CurveView, KnobView, LoopView
from monarch_kernel.features.live.curves import Curve
from monarch_kernel.features.live.pace import Grant, Pace
from monarch_kernel.features.live.rates import PER_SECOND
from monarch_kernel.net.wire.messages import Knob, Logged, LoopBegun, LoopGrant, LoopLeft, LoopReport, RankSpec

__all__ = ["Journal", "LoopBook", "LoopRecord", "Told"]

KEPT = 8
"""Loops that are over, of which one can still see what they logged."""

_RATE_S = 5.0
"""How many there are in a second is that of so many seconds."""

Told = tuple[int, LoopGrant]
"""The number of a process, and what it is to be told."""


@dataclass
class _Rate:
    """How many of something a rank does in a second, over the last few: it may be logged in some steps, or often in one."""

    told: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, seconds: float, count: float) -> None:
        self.told.append((seconds, count))
        while sum(seconds for seconds, _ in self.told) - self.told[0][0] >= _RATE_S:
            self.told.popleft()

    @property
    def per_s(self) -> float:
        told = self.told.copy()
        return sum(count for _, count in told) / sum(seconds for seconds, _ in told)


@dataclass
class LoopRecord:
    """One loop on several ranks.

    Attributes:
        request: in which it runs.
        number: counts the loops of that.
        mesh: name of the mesh of its ranks.
        where: in which it runs, in words, such as ``cell [5]``.
        steps: how many it has; None if it has no end.
        ranks: process -> flat rank, in the order in which they came.
        begun_at: when the first came, in seconds of a clock that only goes forward.
        knobs: by name, in the order in which they were first seen.
        curves: by name of what was logged.
        recovers: whether it is to go on by itself if a rank dies.
        rates: by name of what is counted, rank -> how many there are in a second.
        told: process -> the step with which its last report ended.
        peaks: rank -> how many floating-point operations a second its device can do, where that is known.
        follows: the loop in whose place this goes on by itself, since a rank has died.
        first: the step with which it goes on.
        is_hit: whether a rank has died in it.
    """

    request: int
    number: int
    mesh: str
    where: str
    steps: int | None
    begun_at: float
    recovers: bool = False
    pace: Pace = field(default_factory=Pace)
    ranks: dict[int, int] = field(default_factory=dict)
    knobs: dict[str, Knob] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    rates: dict[str, dict[int, _Rate]] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    step_s: dict[int, float] = field(default_factory=dict)
    peaks: dict[int, float] = field(default_factory=dict)
    follows: tuple[int, int] | None = None
    first: int = 0
    is_hit: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """What tells loops apart."""
        return self.request, self.number

    def follow(self, other: LoopRecord, step: int, *, is_recovery: bool) -> None:
        """Go on where another one was before a step.

        Args:
            other: that is over.
            step: with which this one begins.
            is_recovery: whether it goes on as the other would have, with later changes, too; else as it was then.
        """
        self.begun_at = other.begun_at
        self.first = step
        if is_recovery:
            self.follows = other.key
        self.knobs = dict(other.knobs)
        self.curves = copy.deepcopy(other.curves)
        for curve in self.curves.values():
            curve.forget_from(step)
        changes = [change for change in other.pace.changes if is_recovery or (change.name and change.step <= step)]
        self.pace.changes = changes
        self.pace.is_paused = is_recovery and other.pace.is_paused

    def tell(self, grant: Grant | None) -> list[Told]:
        """What all ranks that are in it are to be told."""
        if grant is None:
            return []
        message = self.message(grant)
        return [(proc, message) for proc in self.ranks if self.pace.is_in(proc)]

    def message(self, grant: Grant) -> LoopGrant:
        """A grant, as ranks are told of it."""
        return LoopGrant(self.request, self.number, grant.horizon, grant.ahead, grant.changes, grant.is_paused)

    def take(self, proc: int, report: LoopReport) -> None:
        """Note what a rank has logged."""
        self.knobs |= {knob.name: knob for knob in report.knobs}
        rank = self.ranks[proc]
        if report.step_s > 0:
            self.step_s[rank] = report.step_s
        if report.peak > 0:
            self.peaks[rank] = report.peak
        for name, values in report.logged.items():
            if name in PER_SECOND:
                self.rates.setdefault(name, {}).setdefault(rank, _Rate())
            else:
                self.curves.setdefault(name, Curve()).add(rank, values)
        seconds = report.step_s * (report.step - self.told.get(proc, 0))
        self.told[proc] = report.step
        if seconds > 0:
            for name, rates in self.rates.items():
                if rank in rates:
                    rates[rank].add(seconds, sum(value.total for value in report.logged.get(name, ())))

    def view(self, now: float, *, points: bool = True) -> LoopView:
        """As it is now.

        Args:
            now: the time.
            points: whether curves are to be told, or only their last values.
        """
        values = {change.name: change.value for change in self.pace.changes if change.name}
        return LoopView(
            self.key,
            self.mesh,
            self.where,
            self.pace.reached,
            self.steps,
            "over" if self.pace.is_over else "paused" if self.pace.is_paused else "running",
            now - self.begun_at,
            max(list(self.step_s.values()), default=0.0),
            tuple(
                KnobView(knob.name, values.get(knob.name, knob.value), knob.low, knob.high)
                for knob in list(self.knobs.values())
            ),
            tuple(
                CurveView(
                    name,
                    curve.mean,
                    tuple(sorted(curve.last.copy().items())),
                    tuple(curve.points) if points else (),
                    curve.ends,
                )
                for name, curve in list(self.curves.items())
            ),
            tuple((name, sum(self._per_s(name).values())) for name in list(self.rates)),
            self.utilisation,
        )

    def _per_s(self, name: str) -> dict[int, float]:
        return {rank: rate.per_s for rank, rate in self.rates.get(name, {}).copy().items() if rate.told}

    @property
    def utilisation(self) -> float | None:
        """Of the floating-point operations that the devices can do, the part that the model takes; None if nobody knows."""
        rates, peaks = self._per_s("flops"), self.peaks.copy()
        known = rates.keys() & peaks.keys()
        return sum(rates[rank] for rank in known) / sum(peaks[rank] for rank in known) if known else None


class Journal(Protocol):
    """Who notes what is logged in the loops of a mesh."""

    def told(self, loop: LoopRecord, logged: Mapping[str, tuple[Logged, ...]]) -> None:
        """A rank has told what it has logged, or has left the loop; with the baton held, so it must not wait."""
        ...

    def close(self) -> None:
        """Nothing more will be told."""
        ...


class LoopBook:
    """All loops of a session; all methods give what ranks are to be told.

    Attributes:
        journals: by name of the mesh whose loops they note.
    """

    def __init__(self) -> None:
        self.journals: dict[str, Journal] = {}
        self._loops: dict[tuple[int, int], LoopRecord] = {}

    def of(self, procs: Collection[int]) -> Iterator[LoopRecord]:
        """The loops that some of these processes are in, or were, in the order in which they were begun."""
        return (loop for loop in list(self._loops.values()) if not loop.ranks.keys().isdisjoint(procs))

    def shown(self, procs: Collection[int]) -> list[LoopRecord]:
        """Those that a view of these processes shows: all that are not over; if there is none, the last one."""
        loops = list(self.of(procs))
        return [loop for loop in loops if not loop.pace.is_over] or loops[-1:]

    def get(self, key: tuple[int, int]) -> LoopRecord | None:
        """A loop, as long as it is kept."""
        return self._loops.get(key)

    def begun(
        self,
        spec: RankSpec,
        where: str,
        message: LoopBegun,
        now: float,
        owing: Iterable[int] = (),
    ) -> list[Told]:
        """A rank begins a loop, in something that is called so; ``owing`` are the processes that are at work on that."""
        key = message.request, message.number
        loop = self._loops.get(key)
        if loop is None:
            steps = message.steps if message.steps >= 0 else None
            loop = self._loops[key] = LoopRecord(*key, spec.mesh, where, steps, now)
            self._forget()
            loop.pace.is_paused, loop.pace.apart, loop.recovers = message.is_paused, message.apart, message.recovers
            if message.recovers:  # all are in it, sooner or later
                loop.pace.awaited, loop.pace.first = set(owing), message.step
            if message.follows and (last := self._last(message.follows)) is not None:
                loop.follow(last, message.step, is_recovery=message.is_recovery)
        loop.ranks[spec.proc] = spec.rank
        loop.told[spec.proc] = message.step
        grant = loop.pace.joined(spec.proc, message.step, message.horizon)
        return [(spec.proc, loop.message(grant))]

    def recovers(self, request: int) -> bool:
        """Whether a request has a loop that is to go on by itself if a rank dies: the last one, or one around that."""
        last = self._last(request)
        return any(
            loop.recovers and (loop.is_hit or loop is last) for loop in self._loops.values() if loop.request == request
        )

    def reported(self, proc: int, message: LoopReport) -> list[Told]:
        """A rank says how far it is, and what it has logged."""
        loop = self._loops.get((message.request, message.number))
        if loop is None or proc not in loop.ranks:
            return []
        loop.take(proc, message)
        grant = loop.pace.progressed(proc, message.step, message.step_s)
        self._note(loop, message.logged)
        return loop.tell(grant)

    def left(self, proc: int, message: LoopLeft) -> list[Told]:
        """A rank has left a loop."""
        loop = self._loops.get((message.request, message.number))
        if loop is None or proc not in loop.ranks:
            return []
        return self._leave(loop, proc, message.steps)

    def request_over(self, proc: int, request: int) -> list[Told]:
        """What a rank did for a request is over, by whatever way, and so are its loops."""
        told: list[Told] = []
        for loop in self._loops.values():
            if loop.request == request:
                told += self._out(loop, proc)
        return told

    def gone(self, proc: int) -> list[Told]:
        """A process has ended."""
        told: list[Told] = []
        for loop in self._loops.values():
            loop.is_hit |= loop.pace.is_in(proc)
            told += self._out(loop, proc)
        return told

    def _out(self, loop: LoopRecord, proc: int) -> list[Told]:
        """A process is in a loop no more, and does not begin it."""
        if loop.pace.is_in(proc):
            return self._leave(loop, proc)
        return loop.tell(loop.pace.missed(proc)) if proc in loop.pace.awaited else []

    def _leave(self, loop: LoopRecord, proc: int, steps: int = 0) -> list[Told]:
        grant = loop.pace.left(proc, steps)
        self._note(loop, {})
        return loop.tell(grant)

    def _note(self, loop: LoopRecord, logged: Mapping[str, tuple[Logged, ...]]) -> None:
        journal = self.journals.get(loop.mesh)
        if journal is not None:
            journal.told(loop, logged)

    def _last(self, request: int) -> LoopRecord | None:
        """The last loop of a request."""
        return next((loop for loop in reversed(self._loops.values()) if loop.request == request), None)

    def _forget(self) -> None:
        over = [key for key, loop in self._loops.items() if loop.pace.is_over]
        for key in over[: max(0, len(over) - KEPT)]:
            del self._loops[key]
