"""The controller's records of live loops: their progress, what they logged, and the grants to send. Pure, no I/O."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from monarch_kernel.base.events import CurveView, KnobView, LoopState, LoopView
from monarch_kernel.features.live.curves import Curve
from monarch_kernel.features.live.limits import MAX_KNOBS, MAX_LOGGED, MAX_TEXT, name_problem, text_problem
from monarch_kernel.features.live.pace import ALARM, PREEMPTION, ROLLBACK, Grant, Pace
from monarch_kernel.features.live.rates import PER_SECOND
from monarch_kernel.features.watch.findings import Trouble
from monarch_kernel.net.wire.codec import replace
from monarch_kernel.net.wire.messages import (
    Knob,
    Logged,
    LoopAlarm,
    LoopGrant,
    LoopLeft,
    LoopPreempted,
    LoopReport,
    LoopStarted,
    LoopStep,
    RankSpec,
)

__all__ = ["AddressedGrant", "Journal", "LoopBook", "LoopListener", "LoopRecord"]

KEPT = 8
"""How many ended loops the controller keeps, with their logs."""

_RATE_S = 5.0
"""Rates are averages over this many seconds."""

_SPEED_S = 1.0
"""The speed of a loop is the mean over this time: a report may be of a single step, such as the last one before a pause."""

_STEPS_S = 60.0
"""The time that a loop still takes follows from its steps in this many seconds, so that a slow step changes it little."""

AddressedGrant = tuple[int, LoopGrant]
"""The number of a process, and the grant to send to it."""


@dataclass
class _Rate:
    """A rate per second of one rank over the last seconds. A rank may log a count in some steps only, or often in one step."""

    over_s: float = _RATE_S
    counts: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, seconds: float, count: float) -> None:
        self.counts.append((seconds, count))
        while sum(seconds for seconds, _ in self.counts) - self.counts[0][0] >= self.over_s:
            self.counts.popleft()

    @property
    def per_s(self) -> float:
        counts = self.counts.copy()
        return sum(count for _, count in counts) / sum(seconds for seconds, _ in counts)


@dataclass
class LoopRecord:
    """One loop on several ranks.

    Attributes:
        request: the request in which the loop runs.
        number: number of the loop among the loops of the request.
        mesh: name of the mesh of its ranks.
        where: description of the request, such as ``cell [5]``.
        steps: number of steps; None if the loop has no end.
        ranks: process -> flat rank, in the order in which they joined.
        started_at: when the first rank joined, in seconds of a monotonic clock.
        heard_at: when a rank has last reported something.
        knobs: by name, in the order in which they were first seen.
        curves: by name of the metric.
        recovers: whether the loop resumes automatically if a rank dies.
        rates: by name of the counter, rank -> its rate.
        speeds: rank -> its steps per second, over the last second.
        step_rates: the same over a longer time.
        loader_shares: rank -> seconds per second that it waits for a DataLoader; of ranks that have waited for one.
        reported_steps: process -> the step with which its last report ended.
        peaks: rank -> peak floating-point operations per second of its device, where known.
        follows: the loop that this one continues after a rank died.
        first: the step with which it continues.
        is_hit: whether a rank died in the loop.
        refused: why a name that a rank has reported is not kept, for the last such name; empty if all are.
        trouble: what the watch has found.
    """

    request: int
    number: int
    mesh: str
    where: str
    steps: int | None
    started_at: float
    heard_at: float = 0.0
    recovers: bool = False
    pace: Pace = field(default_factory=Pace)
    ranks: dict[int, int] = field(default_factory=dict)
    knobs: dict[str, Knob] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    rates: dict[str, dict[int, _Rate]] = field(default_factory=dict)
    step_rates: dict[int, _Rate] = field(default_factory=dict)
    loader_shares: dict[int, _Rate] = field(default_factory=dict)
    reported_steps: dict[int, int] = field(default_factory=dict)
    speeds: dict[int, _Rate] = field(default_factory=dict)
    peaks: dict[int, float] = field(default_factory=dict)
    follows: tuple[int, int] | None = None
    first: int = 0
    is_hit: bool = False
    refused: str = ""
    trouble: Trouble = field(default_factory=Trouble)

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the loop."""
        return self.request, self.number

    def follow(self, other: LoopRecord, step: int, *, is_recovery: bool) -> None:
        """Continue another loop from the state that it had before a step.

        Args:
            other: the loop to continue, which is over.
            step: the first step of this loop.
            is_recovery: whether to apply all changes of the other loop, also those to later steps, and its pause; otherwise
                only the knobs as they were before ``step``.
        """
        self.started_at = other.started_at
        self.first = step
        if is_recovery:
            self.follows = other.key
        self.knobs = dict(other.knobs)
        self.curves = copy.deepcopy(other.curves)
        for curve in self.curves.values():
            curve.forget_from(step)
        changes = [
            change
            for change in other.pace.changes
            if change.name != PREEMPTION
            and not change.name.startswith(ALARM)
            and (is_recovery or (change.name and change.step <= step))
        ]
        self.pace.changes = changes
        self.pace.is_paused = is_recovery and other.pace.is_paused

    def address(self, grant: Grant | None) -> list[AddressedGrant]:
        """Address a grant to all ranks in the loop."""
        if grant is None:
            return []
        message = self.message(grant)
        return [(proc, message) for proc in self.ranks if self.pace.is_in(proc)]

    def message(self, grant: Grant) -> LoopGrant:
        """The message that carries a grant."""
        return LoopGrant(self.request, self.number, grant.horizon, grant.ahead, grant.changes, grant.is_paused)

    def admit(self, report: LoopReport) -> LoopReport:
        """Return a report of a rank without the names that are too long or too many; `refused` says so."""
        known = {*self.curves, *self.rates}
        if report.alarms:
            report = replace(
                report, alarms=tuple(each for each in report.alarms if each.name in known | report.logged.keys())
            )
        if not report.knobs and report.logged.keys() <= known:
            return report
        logged = {name: values for name, values in report.logged.items() if self._admits(name, known, MAX_LOGGED)}
        of_knobs = set(self.knobs)
        knobs = tuple(knob for knob in report.knobs if self._admits(knob.name, of_knobs, MAX_KNOBS, knob.value))
        return replace(report, logged=logged, knobs=knobs)

    def _admits(self, name: str, known: set[str], most: int, value: object = None) -> bool:
        problem = name_problem(name, known, most) or text_problem(value)
        if problem:
            self.refused = problem
        else:
            known.add(name)
        return not problem

    def take(self, proc: int, report: LoopReport) -> None:
        """Record a report of a rank from `admit`."""
        self.knobs |= {knob.name: knob for knob in report.knobs}
        rank = self.ranks[proc]
        if report.peak > 0:
            self.peaks[rank] = report.peak
        steps = report.step - self.reported_steps.get(proc, 0)
        self.trouble.reported(rank, steps, report.step_s, report.loader_s)
        for name, values in report.logged.items():
            if name in PER_SECOND:
                self.rates.setdefault(name, {}).setdefault(rank, _Rate())
            else:
                self.curves.setdefault(name, Curve()).add(rank, values)
        steps = report.step - self.reported_steps.get(proc, 0)
        seconds = report.step_s * steps
        self.reported_steps[proc] = report.step
        if seconds > 0:
            self.speeds.setdefault(rank, _Rate(_SPEED_S)).add(seconds, steps)
            self.step_rates.setdefault(rank, _Rate(_STEPS_S)).add(seconds, steps)
            if report.loader_s > 0 or rank in self.loader_shares:
                self.loader_shares.setdefault(rank, _Rate()).add(seconds, report.loader_s * steps)
            for name, rates in self.rates.items():
                if rank in rates:
                    rates[rank].add(seconds, sum(value.total for value in report.logged.get(name, ())))

    def alarmed(self, rank: int, alarm: LoopAlarm) -> Grant | None:
        """Note an alarm of a rank; returns a grant if the loop is to do something about it at the same step on all ranks."""
        if problem := name_problem(alarm.name, (), 1):
            self.refused = problem
            return None
        texts = alarm.about[:MAX_TEXT], alarm.module[:MAX_TEXT]
        alarm = LoopAlarm(alarm.kind, alarm.name, alarm.step, alarm.value, alarm.usual, *texts, alarm.is_more)
        is_first = self.trouble.alarmed(rank, alarm)
        if self.pace.is_over or not is_first:
            return None
        action = self.trouble.action(alarm.kind)
        if action == "stop":
            return self.pace.stop()[1]
        if action not in ("call", "rollback"):
            return None
        value = json.dumps([alarm.kind, alarm.name, alarm.step, alarm.value, alarm.usual, rank])
        change, grant = self.pace.change(f"{ALARM if action == 'call' else ROLLBACK}{alarm.kind} {alarm.name}", value)
        if action == "rollback":
            self.trouble.rolled_back(change.step)
        return grant

    def view(self, now: float, *, points: bool = True) -> LoopView:
        """The current state of the loop.

        Args:
            now: the time.
            points: whether to include the points of curves, or only their last values.
        """
        values = {change.name: change.value for change in self.pace.changes if change.name}
        return LoopView(
            self.key,
            self.mesh,
            self.where,
            self.pace.progress,
            self.steps,
            self.state,
            max(0.0, (self.heard_at if self.pace.is_over else now) - self.started_at),
            max((1 / rate.per_s for rate in list(self.speeds.values())), default=0.0),
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
            self.refused,
            self.left_s,
            tuple(
                (rank, min(1.0, each.per_s)) for rank, each in sorted(self.loader_shares.copy().items()) if each.counts
            ),
        )

    @property
    def state(self) -> LoopState:
        """What the loop does: it is pausing until all ranks wait before the same step, and stopping until all have left it."""
        if self.pace.is_over:
            return "over"
        if self.pace.is_stopping:
            return "stopping"
        if self.pace.is_pausing:
            return "pausing"
        return "paused" if self.pace.is_paused else "running"

    @property
    def left_s(self) -> float | None:
        """How long the other steps take at the speed of the slowest rank, without pauses; None if unknown, or if it stops."""
        speeds = [rate.per_s for rate in list(self.step_rates.values()) if rate.counts]
        if self.steps is None or self.pace.is_over or self.pace.is_stopping or not speeds:
            return None
        return max(0, self.steps - self.pace.reached) / min(speeds)

    def _per_s(self, name: str) -> dict[int, float]:
        return {rank: rate.per_s for rank, rate in self.rates.get(name, {}).copy().items() if rate.counts}

    @property
    def utilisation(self) -> float | None:
        """Model FLOP utilisation: the model's FLOP/s divided by the devices' peak FLOP/s; None if either is unknown."""
        rates, peaks = self._per_s("flops"), self.peaks.copy()
        known = rates.keys() & peaks.keys()
        return sum(rates[rank] for rank in known) / sum(peaks[rank] for rank in known) if known else None


class Journal(Protocol):
    """Receives what the loops of a mesh log."""

    def record(self, loop: LoopRecord, logged: Mapping[str, tuple[Logged, ...]]) -> None:
        """Handle what a rank logged, or that a rank left the loop. Called with the I/O lock held, so it must not wait."""
        ...

    def close(self) -> None:
        """End the journal; `record` is not called again."""
        ...


class LoopListener(Protocol):
    """Follows all loops of a session, rank by rank. Called with the I/O lock held, so it must not wait."""

    def loop_started(self, loop: LoopRecord) -> None:
        """A loop starts; its changes, such as the values of knobs from a step on, can still be set."""
        ...

    def loop_reported(self, loop: LoopRecord, rank: int, logged: Mapping[str, tuple[Logged, ...]]) -> None:
        """A rank of the loop has reported what it logged."""
        ...

    def loop_left(self, loop: LoopRecord) -> None:
        """A rank has left the loop, which may be over now."""
        ...


class LoopBook:
    """All loops of a session. The methods that handle events return the grants to send to ranks.

    Attributes:
        journals: name of a mesh -> the journal of its loops.
        listeners: what follows the loops of all meshes.
    """

    def __init__(self) -> None:
        self.journals: dict[str, Journal] = {}
        self.listeners: list[LoopListener] = []
        self._loops: dict[tuple[int, int], LoopRecord] = {}

    def of(self, procs: Collection[int]) -> Iterator[LoopRecord]:
        """The loops that any of these processes is or was in, in the order in which they started."""
        return (loop for loop in list(self._loops.values()) if not loop.ranks.keys().isdisjoint(procs))

    def of_request(self, request: int) -> list[tuple[int, LoopRecord]]:
        """The loops of a request, with their numbers."""
        return [(loop.number, loop) for loop in list(self._loops.values()) if loop.request == request]

    def shown(self, procs: Collection[int]) -> list[LoopRecord]:
        """The loops that a view of these processes shows: all that still run; if there is none, the last one."""
        loops = list(self.of(procs))
        return [loop for loop in loops if not loop.pace.is_over] or loops[-1:]

    def get(self, key: tuple[int, int]) -> LoopRecord | None:
        """The record of a loop; None once it was dropped."""
        return self._loops.get(key)

    def started(
        self,
        spec: RankSpec,
        where: str,
        message: LoopStarted,
        now: float,
        owing: Iterable[int] = (),
    ) -> list[AddressedGrant]:
        """A rank starts a loop.

        Args:
            spec: the rank.
            where: description of the request, such as ``cell [5]``.
            message: the message of the rank.
            now: the time.
            owing: processes that have not answered the request yet.
        """
        key = message.request, message.number
        loop = self._loops.get(key)
        if loop is None:
            steps = message.steps if message.steps >= 0 else None
            loop = self._loops[key] = LoopRecord(*key, spec.mesh, where, steps, now - max(0.0, message.age_s))
            self._forget()
            loop.pace.is_paused, loop.pace.apart, loop.recovers = message.is_paused, message.apart, message.recovers
            if message.recovers:  # all of them will join the loop
                loop.pace.awaited, loop.pace.first = set(owing), message.step
            if message.follows and (last := self._last(message.follows)) is not None:
                loop.follow(last, message.step, is_recovery=message.is_recovery)
            for listener in self.listeners:
                listener.loop_started(loop)
        loop.heard_at = now
        loop.ranks[spec.proc] = spec.rank
        loop.trouble.hooks[spec.rank] = message.hooks
        loop.reported_steps[spec.proc] = message.step
        grant = loop.pace.joined(spec.proc, message.step, message.horizon)
        return [(spec.proc, loop.message(grant))]

    def recovers(self, request: int) -> bool:
        """Whether the last loop of a request, or one in which a rank died, resumes automatically after a death."""
        last = self._last(request)
        return any(
            loop.recovers and (loop.is_hit or loop is last) for loop in self._loops.values() if loop.request == request
        )

    def reported(self, proc: int, message: LoopReport, now: float) -> list[AddressedGrant]:
        """A rank reports its progress, and what it has logged."""
        loop = self._loops.get((message.request, message.number))
        if loop is None or proc not in loop.ranks:
            return []
        loop.heard_at = now
        message = loop.admit(message)
        loop.take(proc, message)
        grant = loop.pace.progressed(proc, message.step, message.step_s)
        self._note(loop, message.logged)
        for listener in self.listeners:
            listener.loop_reported(loop, loop.ranks[proc], message.logged)
        grants = loop.address(grant)
        for alarm in message.alarms:
            grants += loop.address(loop.alarmed(loop.ranks[proc], alarm))
        return grants

    def in_step(self, proc: int, message: LoopStep) -> list[AddressedGrant]:
        """A rank has been silent, and may hang; the next report covers the time and the steps since its last one."""
        loop = self._loops.get((message.request, message.number))
        if loop is None or not loop.pace.is_in(proc):
            return []
        return loop.address(loop.pace.progressed(proc, message.step, 0.0))

    def preempted(self, proc: int, message: LoopPreempted) -> list[AddressedGrant]:
        """A rank in a loop must end soon: all ranks of the loop save their work before the same step."""
        loop = self._loops.get((message.request, message.number))
        if loop is None or not loop.pace.is_in(proc):
            return []
        return loop.address(loop.pace.preempt())

    def left(self, proc: int, message: LoopLeft, now: float) -> list[AddressedGrant]:
        """A rank has left a loop."""
        loop = self._loops.get((message.request, message.number))
        if loop is None or proc not in loop.ranks:
            return []
        loop.heard_at = now
        return self._leave(loop, proc, message.steps)

    def request_over(self, procs: Iterable[int], request: int) -> list[AddressedGrant]:
        """Ranks have finished a request, successfully or not, and with it the loops of the request."""
        grants: list[AddressedGrant] = []
        for loop in self._loops.values():
            if loop.request == request:
                for proc in procs:
                    grants += self._out(loop, proc)
        return grants

    def gone(self, proc: int) -> list[AddressedGrant]:
        """A process has ended."""
        grants: list[AddressedGrant] = []
        for loop in self._loops.values():
            loop.is_hit |= loop.pace.is_in(proc)
            grants += self._out(loop, proc)
        return grants

    def _out(self, loop: LoopRecord, proc: int) -> list[AddressedGrant]:
        """Remove a process from a loop, or stop waiting for it to join."""
        if loop.pace.is_in(proc):
            return self._leave(loop, proc)
        return loop.address(loop.pace.missed(proc)) if proc in loop.pace.awaited else []

    def _leave(self, loop: LoopRecord, proc: int, steps: int = 0) -> list[AddressedGrant]:
        grant = loop.pace.left(proc, steps)
        self._note(loop, {})
        for listener in self.listeners:
            listener.loop_left(loop)
        return loop.address(grant)

    def _note(self, loop: LoopRecord, logged: Mapping[str, tuple[Logged, ...]]) -> None:
        journal = self.journals.get(loop.mesh)
        if journal is not None:
            journal.record(loop, logged)

    def _last(self, request: int) -> LoopRecord | None:
        """The last loop of a request."""
        return next((loop for loop in reversed(self._loops.values()) if loop.request == request), None)

    def _forget(self) -> None:
        over = [key for key, loop in self._loops.items() if loop.pace.is_over]
        for key in over[: max(0, len(over) - KEPT)]:
            del self._loops[key]
