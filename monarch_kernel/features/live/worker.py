"""The rank's part of live loops: implements `monarch_kernel.live`.

Theory of operation. A loop starts the steps that the controller granted (`features.live.pace`), which usually costs one
comparison. Half way through its grant it reports, so that the next grant arrives before it is needed: its step, the duration
of a step without pauses, and the logged values. Only when the controller grants no more, because the loop is paused, the loop
waits like any code that waits for an answer, so that an interrupt works there, too. Logged values, also tensors, stay unread
until the report: to read a tensor on a GPU is to wait for all of its queued work.

A rank that hangs in a step reports nothing itself. So a timer checks a second after a report whether there was another one; if
not, it reports the step that the rank is in (`LoopStep`). A step that starts later than this reports itself.

At SIGTERM from outside, a rank whose loop has an ``on_preempt`` asks the controller for a step before which all ranks of the
loop call it: so a checkpoint, which needs all ranks, is of one step. Then the rank ends.

If a detached mesh has lost its controller, a loop that reaches the end of its grant runs freely, unless it was paused. A new
controller learns the step of the loop from a message, and controls the loop from there.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from monarch_kernel.features.live.device_flops import device_peak
from monarch_kernel.features.live.limits import MAX_KNOBS, MAX_LOGGED, name_problem
from monarch_kernel.features.live.logged_values import MAX_VALUES, kept_value, numbers_of, summed
from monarch_kernel.features.live.pace import ROLLBACK, Grant, StepGrant
from monarch_kernel.features.live.rates import PER_SECOND
from monarch_kernel.features.live.skipping import UpdateSkipper
from monarch_kernel.features.watch.loader import rows_read, waited_s
from monarch_kernel.features.watch.surroundings import (
    SCALER_PATIENCE,
    FirstModule,
    has_scaler,
    is_learning_rate,
    rates_text,
    rows_text,
    variables_of_caller,
)
from monarch_kernel.features.watch.values import NOT_FINITE, SPIKE, Alarm, ValueWatch
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.wire.codec import Frame, Packed, pack, replace
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
    Rewind,
)
from monarch_kernel.runtime.diagnostics.stacks import LoopPlace
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.executor import working
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank
from monarch_kernel.runtime.worker.timers import later

__all__ = ["Loops", "RankLoop"]

_log = logging.getLogger(__name__)

_REPORT_S = 1.0
"""A rank reports at the first step after this time, so that a rank that is far slower than others reports, too."""

_MAX_KEPT = 10_000
"""Unreported values of a metric that a rank keeps while there is no controller; beyond this it drops the oldest."""

_MAX_BATCHES = 1024
"""Batches since the last report whose rows are known."""

_LOOK_EVERY_S = 0.5
"""How often a waiting loop checks whether there is a controller."""

_SETTLE_S = 5.0
"""For this long after a new controller connects, the process may still be marked as detached."""

_ENDED = 8
"""Requests whose loops are remembered after their end."""

_COUNTED = 64
"""Requests whose loops are counted; far more than run at once."""


def working_request() -> int:
    """The request that this thread executes; 0 if none."""
    executor = working.get()
    return 0 if executor is None else executor.current


def release_working() -> None:
    """Mark errors that this thread raises from now on as consequences of the death of another rank."""
    executor = working.get()
    if executor is not None:
        executor.released = executor.current


Hooks = Mapping[str, Callable[[Alarm], object] | str | None]
"""Kind of an alarm -> what the loop does about it."""


class LoopPort(NamedTuple):
    """Functions of the process that loops use.

    Attributes:
        submit: sends a message to the controller; thread-safe.
        wait: waits for a waiter, in the code that this thread runs.
        is_detached: whether there is no controller now, though a new one may connect later.
        request: returns the request that this thread executes; 0 if none.
        is_cell: whether that request is a cell of a notebook.
        peak: returns the peak floating-point operations per second of the device; 0 if unknown.
        release: marks errors that this thread raises from now on as consequences of a death.
        is_ending: whether SIGTERM has told the process to end.
        finish: ends the process in this case.
        later: calls a function on a separate thread after some seconds.
    """

    submit: Callable[[Packed], object]
    wait: Callable[[Waiter, float | None], bool]
    is_detached: Callable[[], bool] = lambda: False
    request: Callable[[], int] = working_request
    is_cell: Callable[[], bool] = lambda: False
    peak: Callable[[], float] = lambda: 0.0
    release: Callable[[], None] = release_working
    is_ending: Callable[[], bool] = lambda: False
    finish: Callable[[], None] = lambda: None
    later: Callable[[float, Callable[[], None]], None] = lambda seconds, function: None


class SnapshotTaker(Protocol):
    """The snapshots that a loop takes between its steps."""

    first: int
    """The first step of the loop."""

    rewound: Rewind | None
    """The snapshot that was restored before the loop, if any."""

    @property
    def apart(self) -> int:
        """How many steps ranks may be apart, so that there is a step of which every rank has a snapshot."""
        ...

    def begin(self) -> None:
        """The loop starts."""
        ...

    def before(self, step: int) -> None:
        """A step is about to start."""
        ...

    def roll_back(self, before: int, step: int) -> int:
        """Restore the newest snapshot of a step before ``before``, as the state before ``step``; returns its step."""
        ...


class SnapshotHome(Protocol):
    """The store of the snapshots of a process."""

    def begin(self, things: dict[str, Any], every: int, most: int) -> int | None:
        """Register the state of the next loop; returns the first step of that loop if the state was restored."""
        ...

    def take_series(self) -> SnapshotTaker | None:
        """The snapshots of the loop that starts now."""
        ...


class StepRecorder(Protocol):
    """Notes what a run record needs of each step (`features.record.worker`)."""

    is_on: bool
    """Whether a record runs; then reports have the values of each step."""

    def before(self, key: tuple[int, int], step: int) -> None:
        """A step of a loop is about to start."""
        ...

    def report(self, key: tuple[int, int], step: int, *, is_last: bool) -> None:
        """The loop reports its progress, or has ended."""
        ...


class RankLoop:
    """One loop of this rank, from its start until it is left.

    Args:
        request: the request in which the loop runs.
        number: number of the loop among the loops of the request.
        steps: number of steps; None if the loop has no end.
        port: connects the loop to its process.
        series: its snapshots, if any.
        recovers: whether the loop resumes automatically if a rank dies.
        on_preempt: called before a step if a rank of the loop must end after it.
        hooks: kind of an alarm -> ``stop``, ``rollback``, ``skip``, or a function that all ranks call before the same step.
        recorder: notes what a run record needs.

    Attributes:
        step: the current step; -1 before the first.
        turn: the current step, and when it began, by the clock of `time.time`; for other threads.
        recovers: whether the loop resumes automatically if a rank dies.
    """

    def __init__(
        self,
        request: int,
        number: int,
        steps: int | None,
        port: LoopPort,
        series: SnapshotTaker | None = None,
        *,
        recovers: bool = False,
        on_preempt: Callable[[], object] | None = None,
        hooks: Hooks | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._has_failed = self._is_over = False
        self._has_timer = False  # whether `_report_hang` will be called
        self.on_preempt = on_preempt
        self._hooks = hooks or {}
        self._watch = ValueWatch()
        self._skipper = UpdateSkipper(lambda: self.step) if self._hooks.get(SPIKE) == "skip" else None
        self._loader_s = waited_s()
        self._rows: deque[tuple[int, Any]] = deque(maxlen=_MAX_BATCHES)
        self._look: tuple[LoopAlarm, FirstModule] | None = None  # during the step after an alarm
        self.step = -1
        self.turn = -1, 0.0
        self.steps = steps
        self._key = request, number
        self._port = port
        self._lease = StepGrant()
        self._waiter: Waiter | None = None
        self._knobs: dict[str, Knob] = {}
        self._new_knobs: list[Knob] = []
        self._met_at = -math.inf  # when a new controller connected
        self._tells_all = False  # the next report must include all knobs, for a new controller
        self._logged: dict[str, list[tuple[int, Any]]] = {}
        self._names: set[str] = set()  # all that were logged
        self._reported_names: set[str] = set()
        self._series = series
        self.recovers = recovers
        self._lost = ""
        self._reported = 0 if series is None else series.first, time.perf_counter()
        self._due = self._reported[1] + _REPORT_S
        self._began = self._reported[1]
        self._paused_s = 0.0  # since the last report

    @property
    def key(self) -> tuple[int, int]:
        """Its request, and its number in it."""
        return self._key

    def run(self) -> Iterator[int]:
        """Yield the steps, each once it may start."""
        lease, steps, step, series = self._lease, self.steps, 0, self._series
        start = LoopStarted(*self._key, -1 if steps is None else steps, recovers=self.recovers, hooks=self._wanted())
        if series is not None:
            series.begin()
            start = replace(start, apart=series.apart)
            if series.rewound is not None:
                step = series.first
                rewound = series.rewound
                start = replace(
                    start, step=step, horizon=step + 1, follows=rewound.key[0], is_recovery=rewound.is_recovery
                )
        if self._skipper is not None:
            self._skipper.begin()
        self._port.submit(pack(start))
        try:
            while steps is None or step < steps:
                if step >= lease.horizon:
                    self._wait(step)
                if self._lost:
                    self._port.release()
                    raise RuntimeError(f"live.loop: {self._lost}")
                lease.begin(step)
                if lease.is_stopped:
                    break
                if lease.is_preempted:
                    lease.is_preempted = False
                    self._save_work()
                if lease.alarms:
                    self._act_on_alarms(step)
                if self._look is not None or lease.should_report(step) or time.perf_counter() > self._due:
                    self._report(step)
                self.step = step
                self.turn = step, time.time()
                if self._recorder is not None and self._recorder.is_on:
                    self._recorder.before(self._key, step)
                if series is not None:
                    series.before(step)
                yield step
                step += 1
        except GeneratorExit:  # the code has left the loop
            raise
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._is_over = True
            if self._skipper is not None:
                self._skipper.end()
            self._report(step, is_last=True)
            self._port.submit(pack(LoopLeft(*self._key, step)))

    def lose(self, dead: str) -> None:
        """End a recovering loop because a rank in it died. Called on the thread that drives the socket.

        Args:
            dead: name of the rank that died.
        """
        if self.recovers:
            self._lost = f"{dead} has died"
            waiter = self._waiter
            if waiter is not None:
                waiter.set()

    def _save_work(self) -> None:
        """Call ``on_preempt``, and print its error where the process ends: it is lost with the code that it ends."""
        try:
            if self.on_preempt is not None:
                self.on_preempt()
        except Exception as error:
            if self._port.is_ending():
                print(f"on_preempt failed, so the work of this rank was not saved: {error!r}", file=sys.stderr)
                traceback.print_exc()
            raise
        self._port.finish()

    def _wanted(self) -> dict[str, str]:
        """Return what this rank wants for each kind of alarm, as `LoopStarted` has it."""
        return {kind: "call" if callable(hook) else hook for kind, hook in self._hooks.items() if hook}

    def _act_on_alarms(self, step: int) -> None:
        """Restore a snapshot, or call the functions of the loop, for the alarms that are due before a step."""
        due, self._lease.alarms = self._lease.alarms, []
        for change in due:
            alarm = Alarm(*json.loads(str(change.value)))
            hook = self._hooks.get(alarm.kind)
            if change.name.startswith(ROLLBACK):
                self._roll_back(alarm, step)
            elif callable(hook):
                hook(alarm)

    def _roll_back(self, alarm: Alarm, step: int) -> None:
        """Restore the state of the last snapshot before an alarm.

        Raises:
            RuntimeError: there is none, or it has been restored before, and led to the same.
        """
        what = f"{alarm.name} was {alarm.value:.4g} in step {alarm.step:,} on rank {alarm.rank}"
        if self._series is None:
            raise RuntimeError(
                f"live.loop(on_{alarm.kind}='rollback'): {what}, but this rank takes no snapshots: call live.snapshot(...) "
                "before the loop on all ranks"
            )
        try:
            to = self._series.roll_back(alarm.step, step)
        except LookupError as error:
            raise RuntimeError(f"live.loop(on_{alarm.kind}='rollback'): {what}; {error.args[0]}") from None
        self._watch = ValueWatch()
        if self._skipper is not None:
            self._skipper.forget()
        self._logged.clear()
        print(f"live loop: {what}: restored the state before step {to:,}, and continues with step {step:,}")

    def preempt(self) -> None:
        """Make all ranks of the loop call ``on_preempt``; only this one if there is no controller. For any thread."""
        if self._is_left():
            self._lease.is_preempted = True
        else:
            self._port.submit(pack(LoopPreempted(*self._key)))

    def granted(self, grant: LoopGrant) -> None:
        """Apply a grant. Called on the thread that drives the socket."""
        self._lease.granted(Grant(grant.horizon, grant.ahead, grant.changes, grant.is_paused))
        waiter = self._waiter
        if waiter is not None:
            waiter.set()

    def come_back(self) -> None:
        """Announce the loop to a new controller. Called on the thread that drives the socket."""
        lease = self._lease
        self._met_at = time.monotonic()
        step, horizon = lease.come_back()
        steps = -1 if self.steps is None else self.steps
        age_s = time.perf_counter() - self._began
        started = LoopStarted(*self._key, steps, step, horizon, lease.is_paused, age_s=age_s, hooks=self._wanted())
        self._port.submit(pack(started))
        self._tells_all = True
        waiter = self._waiter
        if waiter is not None:
            waiter.set()

    def knob(self, knob: Knob) -> Any:
        """The value of a knob in this step. The next report includes a knob that is new or was declared differently before."""
        if self._knobs.get(knob.name) != knob:
            if problem := name_problem(knob.name, self._knobs, MAX_KNOBS):
                raise ValueError(f"live.knob: {problem}")
            self._knobs[knob.name] = knob
            self._new_knobs.append(knob)
        return self._lease.values.get(knob.name, knob.value)

    def log(self, values: dict[str, Any]) -> None:
        """Keep values of this step for the next report.

        Raises:
            RuntimeError: it is a loss that comes too late to skip its update.
            TypeError: a value is not a number.
            ValueError: a name is too long, or there are too many, or a number is too large for a float.
        """
        for name, value in values.items():
            if name not in self._names:
                if problem := name_problem(name, self._names, MAX_LOGGED):
                    raise ValueError(f"live.log: {problem}")
                self._names.add(name)
            if type(value) is not float:
                value = kept_value(name, value)
            if self._skipper is not None:
                self._skipper.log(name, value)
            logged = self._logged.setdefault(name, [])
            logged.append((self.step, value))
            if len(logged) > _MAX_KEPT:
                del logged[: _MAX_KEPT // 2]
        if (rows := rows_read()) is not None:
            self._rows.append((self.step, rows))

    def _wait(self, step: int) -> None:
        """Wait until a step may start.

        Raises:
            RuntimeError: the loop was started in another cell or call.
        """
        if self._key[0] != self._port.request():
            raise RuntimeError(
                "this loop was started in another cell or call, which is over; start another: live.loop(...)"
            )
        waiter = self._waiter = Waiter()
        try:
            while not self._lease.may_begin(step) and not self._lost:
                if self._lease.should_report(step, waits=True) or self._tells_all:
                    self._report(step)
                if self._wait_once(waiter):
                    waiter.ready = False
                elif not self._lease.is_paused and self._is_left():
                    self._lease.go_free()
                    self._due = math.inf  # no controller receives reports
        finally:
            self._waiter = None

    def _wait_once(self, waiter: Waiter) -> bool:
        """Wait for news, and note how long that was if the loop is paused."""
        is_paused, began = self._lease.is_paused, time.perf_counter()
        try:
            return self._port.wait(waiter, _LOOK_EVERY_S)
        finally:
            if is_paused:
                self._paused_s += time.perf_counter() - began

    def _is_left(self) -> bool:
        """Whether there is no controller."""
        return time.monotonic() > self._met_at + _SETTLE_S and self._port.is_detached()

    def _report(self, step: int, *, is_last: bool = False) -> None:
        (before, then), now = self._reported, time.perf_counter()
        self._reported = step, now
        self._due = now + _REPORT_S
        step_s = 0.0
        if step > before:
            step_s = max(0.0, now - then - self._paused_s) / (step - before)
        self._paused_s = 0.0
        logged, self._logged = self._logged, {}
        knobs, self._new_knobs = self._new_knobs, []
        if self._tells_all:
            self._tells_all = False
            values = self._lease.turned()
            knobs = [
                Knob(name, values.get(name, knob.value), knob.low, knob.high) for name, knob in self._knobs.items()
            ]
        alarms: list[LoopAlarm] = []
        reported: dict[str, tuple[Logged, ...]] = {}
        is_recorded = self._recorder is not None and self._recorder.is_on
        for name, kept in logged.items():
            numbers = numbers_of(kept)
            most = _MAX_KEPT if is_recorded else MAX_VALUES
            reported[name] = tuple(summed(numbers, most, is_first=name not in self._reported_names))
            if name not in PER_SECOND:
                alarms += self._watch.take(name, numbers, self._patience(name, numbers))
        if alarms or self._look is not None:
            try:
                alarms = self._explained(alarms, logged, step, is_last)
            except Exception:  # the user's objects may do anything, and the loop goes on
                _log.exception("could not find out what is known of a value that is wrong")
        self._reported_names |= reported.keys()
        self._rows.clear()
        if self._recorder is not None and is_recorded:
            self._recorder.report(self._key, self.step + 1, is_last=is_last and not self._has_failed)
        peak = self._port.peak() if "flops" in reported else 0.0
        total, before_s = waited_s(), self._loader_s
        self._loader_s = total
        loader_s = max(0.0, total - before_s) / (step - before) if step > before else 0.0
        self._port.submit(
            pack(LoopReport(*self._key, step, step_s, reported, tuple(knobs), peak, tuple(alarms), loader_s))
        )
        if not self._has_timer and not is_last:
            self._set_timer(_REPORT_S)

    def _patience(self, name: str, numbers: Sequence[tuple[int, float]]) -> int:
        """How many values in succession must not be finite for an alarm: more for what a GradScaler scales."""
        bad = [value for _, value in numbers if not math.isfinite(value)]
        is_gradient = "grad" in name.lower() or "norm" in name.lower()
        may_be_scaled = bool(bad) and (is_gradient or all(map(math.isinf, bad)))
        return SCALER_PATIENCE if may_be_scaled and has_scaler(variables_of_caller()) else 1

    def _set_timer(self, after_s: float) -> None:
        """Have `_report_hang` called, unless the loop is freed before: a timer must not keep the model of a loop."""
        self._has_timer = True
        report = weakref.WeakMethod(self._report_hang)
        self._port.later(after_s, lambda: (call := report()) and call())

    def _report_hang(self) -> None:
        """Report the current step if it is later than that of the last report. Called on a separate thread."""
        self._has_timer = False  # first: a report from now on sets another timer
        reported, at = self._reported
        left_s = at + _REPORT_S - time.perf_counter()
        if self._is_over:
            return
        if left_s > 0:  # there was a report
            self._set_timer(left_s)
        elif self.step > reported and not self._is_left():
            self._port.submit(pack(LoopStep(*self._key, self.step)))

    def _explained(
        self, alarms: Sequence[LoopAlarm], logged: Mapping[str, list[tuple[int, Any]]], step: int, is_last: bool
    ) -> list[LoopAlarm]:
        """Add to alarms what is known of their steps, and what the last step has shown of the alarm before."""
        found = []
        if self._look is not None:
            (alarm, look), self._look = self._look, None
            if module := look.end():
                text = f"in step {step - 1:,} the first output that is not finite is that of {module}"
                found.append(_with(alarm, alarm.about, text))
        variables = variables_of_caller() if alarms else {}
        for alarm in alarms:
            alarm = _with(alarm, self._about(alarm.step, logged, variables))
            found.append(alarm)
            if alarm.kind == NOT_FINITE and self._look is None and not is_last:
                self._look = alarm, FirstModule(variables)
        return found

    def _about(self, step: int, logged: Mapping[str, list[tuple[int, Any]]], variables: Mapping[str, Any]) -> str:
        """The learning rate and the rows of a step, as far as they are known."""
        rate = next(
            (
                f"{float(each):.4g}"
                for name in logged
                if is_learning_rate(name)
                for at, each in logged[name]
                if at == step
            ),
            "",
        )
        if not rate:
            knobs = (
                self._lease.values.get(each.name, each.value)
                for each in self._knobs.values()
                if is_learning_rate(each.name)
            )
            rate = next((f"{float(each):.4g}" for each in knobs if isinstance(each, (int, float))), "") or rates_text(
                variables
            )
        rows = next((text for at, rows in self._rows if at == step and (text := rows_text(rows))), "")
        return ", ".join(
            filter(None, (rate and f"learning rate {rate}", rows and f"last batch of a DataLoader: {rows}"))
        )


class Loops:
    """All loops of a process.

    Args:
        port: connects the loops to their process.

    Attributes:
        snapshots: the store of the loops' snapshots, where snapshots are available.
        recorder: notes what a run record needs.
        peak: peak floating-point operations per second of the device, if the program has set it.
    """

    def __init__(self, port: LoopPort) -> None:
        self.snapshots: SnapshotHome | None = None
        self.recorder: StepRecorder | None = None
        self.peak = 0.0
        self._port = port._replace(peak=lambda: self.peak or port.peak())
        self._lock = threading.Lock()
        self._by_key: dict[tuple[int, int], RankLoop] = {}
        self._counts: dict[int, int] = {}  # how many loops a request has started; recent requests
        self._ended: dict[int, LoopPlace] = {}  # the last loop of recent requests
        self._deaths: dict[int, str] = {}  # the rank that died while it executed a request; recent requests
        self._here = threading.local()

    def begin(
        self,
        steps: int | None,
        *,
        recovers: bool = False,
        on_preempt: Callable[[], object] | None = None,
        hooks: Hooks | None = None,
    ) -> Iterator[int]:
        """Start a loop in the code that this thread runs.

        Raises:
            RuntimeError: ``recovers`` is set, but the loop is not in a cell, or has no snapshots.
        """
        series = None if self.snapshots is None else self.snapshots.take_series()
        if recovers and not self._port.is_cell():
            raise RuntimeError("live.loop(on_failure='recover') works only in notebook cells, which can run again")
        for kind, hook in (hooks or {}).items():
            if hook == "rollback" and series is None:
                raise RuntimeError(f"live.loop(on_{kind}='rollback') needs live.snapshot(model=model, ...) before it")
        if recovers and series is None:
            raise RuntimeError("live.loop(on_failure='recover') needs live.snapshot(model=model, ...) before it")
        return self._run(steps, series, recovers, on_preempt, hooks or {})

    def _run(
        self,
        steps: int | None,
        series: SnapshotTaker | None,
        recovers: bool,
        on_preempt: Callable[[], object] | None,
        hooks: Hooks,
    ) -> Iterator[int]:
        request = self._port.request()
        with self._lock:
            number = self._counts[request] = self._counts.pop(request, 0) + 1  # moves the request to the end
            while len(self._counts) > _COUNTED:
                del self._counts[min(self._counts.keys() - {0})]
            loop = self._by_key[request, number] = RankLoop(
                request,
                number,
                steps,
                self._port,
                series,
                recovers=recovers,
                on_preempt=on_preempt,
                hooks=hooks,
                recorder=self.recorder,
            )
            died = self._deaths.get(request)
        if died is not None:
            loop.lose(died)
        stack: list[RankLoop] = self._here.__dict__.setdefault("stack", [])
        stack.append(loop)
        try:
            yield from loop.run()
        finally:
            stack.remove(loop)
            with self._lock:
                self._by_key.pop((request, number), None)
                self._ended[request] = LoopPlace(request, loop.step + 1, is_over=True)
                while len(self._ended) > _ENDED:
                    del self._ended[min(self._ended)]
            if on_preempt is not None and not self._port.is_cell():  # nothing else would end the process
                self._port.finish()

    def preempt(self) -> bool:
        """The process must end soon; returns whether a loop has something to do before. Called in a signal handler."""
        loops = [loop for loop in list(self._by_key.values()) if loop.on_preempt is not None]
        for loop in loops:
            later(0, loop.preempt)  # not here: the handler may have interrupted code that submits something
        return bool(loops)

    @property
    def current(self) -> RankLoop | None:
        """The innermost loop of the code that this thread runs."""
        stack: Sequence[RankLoop] = self._here.__dict__.get("stack", ())
        return stack[-1] if stack else None

    def places(self) -> tuple[LoopPlace, ...]:
        """Return how far the loops of this process are, and where the last ones have ended; for any thread."""
        turns = [(request, *loop.turn) for (request, _), loop in list(self._by_key.items())]
        running = [LoopPlace(request, step + 1, began=began) for request, step, began in turns]
        return (*running, *self._ended.copy().values())

    def controller_is_new(self) -> None:
        """Announce all loops to a new controller. Called on the thread that drives the socket."""
        for loop in list(self._by_key.values()):
            loop.come_back()

    def ends_with_a_death(self, request: int) -> bool:
        """Whether a request has a loop that ends, and starts again, when a rank that executes the request dies."""
        return any(loop.recovers for loop in self._of(request))

    def lose(self, request: int, dead: str) -> None:
        """End the recovering loops of a request, also those that start later, because a rank that executes it died.

        Called on the thread that drives the socket.

        Args:
            request: the request.
            dead: name of the rank that died.
        """
        with self._lock:
            self._deaths[request] = dead
            while len(self._deaths) > _COUNTED:
                del self._deaths[min(self._deaths)]
        for loop in self._of(request):
            loop.lose(dead)

    def _of(self, request: int) -> Iterator[RankLoop]:
        return (loop for (of, _), loop in list(self._by_key.items()) if of == request)

    def granted(self, grant: LoopGrant, _: Sequence[Frame] = ()) -> None:
        """Pass a grant of the controller to its loop. Called on the thread that drives the socket."""
        loop = self._by_key.get((grant.request, grant.number))
        if loop is not None:
            loop.granted(grant)


def _with(alarm: LoopAlarm, about: str, module: str = "") -> LoopAlarm:
    """The same alarm with what is known of it."""
    return LoopAlarm(alarm.kind, alarm.name, alarm.step, alarm.value, alarm.usual, about, module, alarm.is_more)


@register
def install(rank: Rank) -> None:
    """Enable live loops in the code of a rank."""
    port = LoopPort(
        rank.driver.submit,
        rank.peers.wait,
        rank.is_detached,
        is_cell=lambda: rank.is_in_cell,
        peak=device_peak,
        is_ending=lambda: rank.termination.is_put_off,
        finish=rank.termination.finish,
        later=later,
    )
    loops = PROCESS.loops = Loops(port)
    rank.at_new_controller.append(lambda open_requests: loops.controller_is_new())
    rank.termination.hooks.append(loops.preempt)
    rank.extend({LoopGrant: loops.granted})
