"""Finds cycles of waiting actors, as far as they go through this process: performs the effects of `runtime.rpc.deadlock`.

The thread that waits reports a wait that lasts (`FutureOwner.on_slow_wait`). If it is an actor's thread, in one of its
endpoints, the detector sends probes after the request, again every `PROBE_EVERY_S`. The rest happens on the I/O thread. So no
answer can arrive, and no endpoint can start to wait, while it handles a probe.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from monarch_kernel.errors import DeadlockError
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Call, Message, Probe, Run, Spawn
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.deadlock import Cycle, Deadlocks, PassOn, Standing, describe_circle
from monarch_kernel.runtime.rpc.waits import Wait, futures_needed_by
from monarch_kernel.runtime.worker.executor import Executor

__all__ = ["DeadlockDetector"]

PROBE_EVERY_S = 2.0
_MAX_CALLS = 256


class DetectorOwner(Protocol):
    """The part of the process that the detector uses."""

    client: Client

    def executors(self) -> list[Executor]:
        """All executors of the process."""
        ...

    def name(self) -> str:
        """The name of the process in error messages."""
        ...


class _Waiting:
    """A wait of an actor; ``task`` is that of the endpoint, if it is async."""

    __slots__ = ("executor", "message", "task", "wait")

    def __init__(self, wait: Wait, executor: Executor, message: Message, task: asyncio.Task[Any] | None) -> None:
        self.wait = wait
        self.executor = executor
        self.message = message
        self.task = task

    def holds(self) -> bool:
        """Whether the endpoint can't go on before the answer arrives."""
        wait = self.wait
        if wait.over or wait.error is not None or wait.future.done():
            return False
        return self.task is None or wait.future in futures_needed_by(self.task)


class DeadlockDetector:
    """The waits of a process that last, and the probes for them."""

    def __init__(self, place: DetectorOwner) -> None:
        self._place = place
        self._deadlocks = Deadlocks(place.client.waiting_for)
        self._waiting: dict[int, _Waiting] = {}

    def on_slow_wait(self, wait: Wait) -> float | None:
        """Handle a wait that lasts, on the thread that waits. Returns when to report it again, in seconds."""
        if wait.ends_by_itself or not wait.future.id:  # no actor works for a transfer
            return None
        me = threading.get_ident()
        executor = next((each for each in self._place.executors() if each.thread_id == me), None)
        if executor is None:
            return None  # the thread of the program, or one of the user's: no actor can wait for it
        self._place.client.submit(lambda: self._probe(wait, executor))
        return PROBE_EVERY_S

    # -- on the I/O thread

    def handle(self, probe: Probe) -> None:
        """Handle a probe."""
        self._forget()
        self._perform(self._deadlocks.handle(probe, self._standing(probe.request)))

    def _probe(self, wait: Wait, executor: Executor) -> None:
        self._forget()
        if wait.over or wait.future.done():
            return
        if not wait.number:
            found = _find_wait(wait, executor)
            if found is None:
                return
            wait.number = self._place.client.new_number()
            self._waiting[wait.number] = found
        if wait.had_error:
            wait.had_error = False
            self._deadlocks.waits(wait.number, wait.future.id)
            return
        waiting = self._waiting.get(wait.number)
        if waiting is not None and waiting.holds():
            where = self._describe(executor, waiting.message)
            self._perform(self._deadlocks.probe(wait.number, wait.future.id, where))

    def _perform(self, effects: Sequence[PassOn | Cycle]) -> None:
        for effect in effects:
            if isinstance(effect, PassOn):
                self._place.client.tell(effect.procs, pack(effect.probe))
            else:
                self._waiting[effect.wait].wait.fail(DeadlockError(describe_circle(effect.path)))

    def _forget(self) -> None:
        """Forget waits that are over."""
        for number in [number for number, each in self._waiting.items() if each.wait.over or each.wait.future.done()]:
            del self._waiting[number]
            self._deadlocks.ended(number)

    def _standing(self, request: int) -> Standing | None:
        for executor in self._place.executors():
            for message, task in _running(executor):
                if message.id == request:
                    if isinstance(message, Call) and executor.takes_port(message.method):
                        return None  # the holder of the port may answer before the endpoint goes on
                    return Standing(self._describe(executor, message), "", self._waits(executor, task))
            for message, _ in list(executor.mailbox):
                if getattr(message, "id", 0) == request:
                    first = _find_running(executor) or self._find_blocker(executor)
                    if first is None:
                        return None  # it is about to start
                    behind = _endpoint_name(executor, first[0])
                    return Standing(self._describe(executor, message), behind, self._waits(executor, first[1]))
        return None

    def _find_blocker(self, executor: Executor) -> tuple[Any, None] | None:
        """Return the message that blocks the thread of an executor."""
        each = (each for each in self._waiting.values() if each.executor is executor and each.task is None)
        return next(((one.message, None) for one in each if one.holds()), None)

    def _waits(self, executor: Executor, task: asyncio.Task[Any] | None) -> list[int]:
        """List the waits of an endpoint that runs now: its own, or those that block its whole thread."""
        return [
            number
            for number, each in self._waiting.items()
            if each.executor is executor and each.task in (None, task) and each.holds()
        ]

    def _describe(self, executor: Executor, message: Message) -> str:
        return f"{_endpoint_name(executor, message)} on {self._place.name()}"


def _running(executor: Executor) -> list[tuple[Any, asyncio.Task[Any] | None]]:
    """List the messages that an executor runs, with their tasks if they have one."""
    found: list[tuple[Any, asyncio.Task[Any] | None]] = [(call.message, call.task) for call in list(executor.calls)]
    message = executor.taken[0]
    if message is not None and all(message is not each for each, _ in found):
        found.append((message, None))
    return found


def _find_running(executor: Executor) -> tuple[Any, asyncio.Task[Any] | None] | None:
    """Return the message that an executor finishes before it takes the next; None if it is about to take that."""
    message = executor.taken[0]
    if message is None:
        return None
    calls = [call for call in list(executor.calls) if call.message is message]
    return (message, calls[0].task if calls else None) if not any(call.overlaps for call in calls) else None


def _find_wait(wait: Wait, executor: Executor) -> _Waiting | None:
    """Return the endpoint of an executor that a wait belongs to; None if there is none, or it may go on without the answer."""
    calls = list(executor.calls)[:_MAX_CALLS]
    if wait.is_awaited:
        needing = (call for call in calls if wait.future in futures_needed_by(call.task))
        call = next(needing, None)
        return None if call is None else _Waiting(wait, executor, call.message, call.task)
    message = next((call.message for call in calls if call.message.id == executor.current), executor.taken[0])
    return None if message is None else _Waiting(wait, executor, message, None)


def _endpoint_name(executor: Executor, message: Message) -> str:
    """An endpoint as ``actor.endpoint``."""
    name = executor.name.removeprefix("actor ")
    if isinstance(message, Call):
        return f"{name}.{message.method}"
    if isinstance(message, Spawn):
        return f"{name}.__init__"
    return "a cell" if isinstance(message, Run) else f"{type(message).__name__.lower()} of {name}"
