"""The actor server of a process, a rank or the controller: it has an executor for each actor in the process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from monarch_kernel.base.failure_reports import FailureKind
from monarch_kernel.errors import Failure, PayloadError
from monarch_kernel.net.transport.base import Peer, incarnation_of, proc_of
from monarch_kernel.net.wire.codec import Frame, Packed, dump, pack
from monarch_kernel.net.wire.messages import (
    ActorEnded,
    Barrier,
    Call,
    Failed,
    Interrupt,
    Message,
    OpenBuffer,
    Payload,
    PortSend,
    PostMortem,
    Probe,
    Result,
    Spawn,
    StopActor,
    StoreCall,
)
from monarch_kernel.runtime.buffers.server import OF_BUFFERS, BufferServer
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.stacks import IN_POOL, Activity, describe_thread
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.ids import origin_of
from monarch_kernel.runtime.rpc.ownership import Process
from monarch_kernel.runtime.rpc.waits import Wait
from monarch_kernel.runtime.worker.absent_actors import AbsentActors
from monarch_kernel.runtime.worker.awaited_calls import AwaitedCalls
from monarch_kernel.runtime.worker.collective_aborts import TORCH_ERRORS
from monarch_kernel.runtime.worker.deadlock_detector import DeadlockDetector
from monarch_kernel.runtime.worker.executor import Debugger, Driving, Executor, Kept
from monarch_kernel.runtime.worker.imports import forget_torn_imports
from monarch_kernel.runtime.worker.slow_requests import warn_if_slow
from monarch_kernel.runtime.worker.supervisor import Supervisor
from monarch_kernel.runtime.worker.timers import later

__all__ = ["NOT_STARTED", "ActorServer"]

NOT_STARTED = "interrupted before it began"
_OF_INTERRUPTS = TORCH_ERRORS | {"KeyboardInterrupt"}
_MAX_DEAD = 16

MAKING_S = 5.0
"""How long a request to stop an actor waits for the end of its constructor, in seconds."""


class ActorServer(ABC):
    """Puts messages into the mailboxes of actors; `AbsentActors` answers for actors that are not here.

    Args:
        proc: The number of this process.
        driving: The driver of its transport.
        client: The client that sends the requests of its actors.

    Attributes:
        broken: Why no actor can live here; None if actors can.
        actors: Maps the number of an actor to its executor.
        is_retiring: Whether the process is about to end.
        leave_collectives: Called when a request that was interrupted ends, on the thread of its executor.
        awaited_calls: The calls that code of the process has waited for, for longer than a moment.
        hosted: Maps the number of an actor to its host (`features.editing.worker.Hosted`), as long as the host exists.
    """

    def __init__(self, proc: int, driving: Driving, client: Client) -> None:
        self.proc = proc
        self.driving = driving
        self.client = client
        self.debugger: Debugger | None = None
        self.actors: dict[int, Executor] = {}
        self.hosted: MutableMapping[int, Any] = WeakValueDictionary()
        self.on_spawn: Callable[[Spawn, Executor], None] | None = None
        self.broken: Failure | None = None
        self.leave_collectives: Callable[[Executor], object] = lambda executor: None
        self._absent = AbsentActors(proc, client, self.send_answer_now)
        self._dead: dict[int, Failure] = {}
        self._stopping: list[Executor] = []
        self.is_retiring = False
        self._buffer_server = BufferServer(client.exports, self.send_answer_now, self.send_answer)
        self.deadlock_detector = DeadlockDetector(self)
        self.awaited_calls = AwaitedCalls(client.waiting_for)
        self.supervisor = Supervisor(self)
        self._handlers: dict[type[Message], Callable[[Any, Sequence[Frame], Peer], None]] = {
            ActorEnded: lambda message, frames, peer: self.supervisor.child_ended(message, _process(peer)),
            Call: self._handle_call,
            Barrier: lambda message, frames, peer: self.answer_barrier(message, peer),
            Interrupt: self._handle_interrupt,
            PortSend: lambda message, frames, peer: self.client.ports.handle(message, frames),
            PostMortem: self._handle_post_mortem,
            Probe: lambda message, frames, peer: self.deadlock_detector.handle(message),
            Spawn: self._handle_spawn,
            StopActor: self._handle_stop,
            StoreCall: self._handle_store_call,
            **dict.fromkeys(OF_BUFFERS, self._handle_buffers),
        }

    # -- for subclasses

    @abstractmethod
    def submit(self, function: Callable[[], None]) -> None:
        """Run a function on the I/O thread; calls of one thread run in order."""

    @abstractmethod
    def watch(self, process: Process) -> None:
        """Report the end of a process to the supervisor; for the I/O thread."""

    @abstractmethod
    def attend(self) -> None:
        """Handle the failure of a mesh that the program of this process, and no actor, has spawned."""

    @abstractmethod
    def send_answer(self, id: int, packed: Packed) -> None:
        """Send an answer to the process that made the request; for any thread."""

    @abstractmethod
    def send_answer_now(self, id: int, packed: Packed) -> None:
        """Send an answer to the process that made the request; for the I/O thread."""

    def executors(self) -> list[Executor]:
        """Return all executors, including those that must stop and have not finished."""
        self._stopping = [each for each in self._stopping if each.is_busy or not each.over]
        return [*self.actors.values(), *self._stopping]

    @abstractmethod
    def name(self) -> str:
        """Return the name of the process in error messages."""

    def marks(self, *, ends_request: bool = False) -> tuple[tuple[int, int], int, int, int, int]:
        """Mark the end of the output so far. Returns the marks, and what `Result` says about process groups."""
        return (0, 0), -1, -1, -1, 0

    def begin(self, message: Spawn, executor: Executor) -> None:
        """Start an actor on a separate thread."""
        assert self.on_spawn is not None
        self.on_spawn(message, executor)

    def note_cleanup(self) -> None:  # noqa: B027
        """Note that an actor has a cleanup for the end of the process."""

    def interrupt_executor(self, executor: Executor, id: int, abort: bool) -> None:
        """Raise KeyboardInterrupt in the code that an executor runs for a request."""
        interrupt = executor.interrupters.get(id)
        if interrupt is not None:
            interrupt()
        else:
            executor.interrupt_thread(insist=abort)

    def on_slow_wait(self, wait: Wait) -> float | None:
        """Handle a wait that lasts, on the thread that waits. Returns when to report it again, in seconds."""
        self.awaited_calls.note(wait)
        pauses = [
            pause
            for pause in (self.deadlock_detector.on_slow_wait(wait), warn_if_slow(self.client, wait))
            if pause is not None
        ]
        return min(pauses, default=None)

    def activities(self) -> tuple[Activity, ...]:
        """Return what the executors run at this moment, and what they have left in thread pools."""
        return tuple(itertools.chain.from_iterable(map(_activities_of, self.executors())))

    # -- answers, for executors

    def reply(
        self,
        id: int,
        value: Any = None,
        bundle: dict[str, Any] | None = None,
        *,
        output: bool = False,
        name: str = "result",
    ) -> None:
        """Answer a request with a value, to which an error refers by ``name``.

        Raises:
            PayloadError: the value can't be pickled; the request is still unanswered.
        """
        payload, frames = dump(value, "the result", roots={name: value}) if value is not None else (Payload(), ())
        if not output:
            self.send_answer(id, pack(Result(id, payload), frames))
            return
        self.send_answer(id, pack(Result(id, payload, bundle or {}, *self.marks(ends_request=True)), frames))

    def fail(
        self, executor: Executor, id: int, error: BaseException | Failure, cause: BaseException | None = None
    ) -> None:
        """Answer a request with a failure, whose kind says whether an interrupt or a release has caused it.

        ``cause`` is kept with its frames, for a post-mortem.
        """
        if not id:
            return
        failure = error if isinstance(error, Failure) else describe(error)
        interrupt = cause or error
        if isinstance(interrupt, KeyboardInterrupt):
            forget_torn_imports(interrupt.__traceback__)
        if isinstance(error, PayloadError):  # its text is sufficient; its frames are code of this package
            failure = dataclasses.replace(failure, frames=(), traceback="", chain=())
        kind = self._why(executor, id, failure)
        if kind == "interrupted":
            self.leave_collectives(executor)
        if kind != failure.kind:
            failure = dataclasses.replace(failure, kind=kind)
        if cause is not None and cause.__traceback__ is not None:
            executor.kept = Kept(id, failure, cause)
        self.send_answer(id, pack(Failed(id, failure, *self.marks(ends_request=True))))

    @staticmethod
    def _why(executor: Executor, id: int, failure: Failure) -> FailureKind:
        if executor.interrupted == id and failure.etype in _OF_INTERRUPTS:
            return "interrupted"
        if executor.released == id and failure.etype in TORCH_ERRORS:
            return "released"
        return failure.kind

    # -- on the I/O thread

    def handle(self, message: Message, frames: Sequence[Frame], peer: Peer) -> bool:
        """Handle a message about actors; return False if it is about something else."""
        handle = self._handlers.get(type(message))
        if handle is None:
            return False
        handle(message, frames, peer)
        return True

    def _handle_call(self, message: Call, frames: Sequence[Frame], peer: Peer) -> None:
        executor = self.actors.get(message.actor)
        if executor is not None:
            executor.post(message, frames)
        else:
            self.call_unknown(message, frames)

    def _handle_spawn(self, message: Spawn, frames: Sequence[Frame], peer: Peer) -> None:
        executor = self.actors[message.actor] = Executor(self, f"actor {message.name}")
        self.supervisor.hosts(message.actor, _process(peer))
        self.begin(message, executor)
        executor.post(message, frames)
        for early, parts in self._absent.take(message.actor):
            self.handle(early, parts, peer)

    def _handle_stop(self, message: StopActor, frames: Sequence[Frame], peer: Peer) -> None:
        if message.actor not in self.actors and origin_of(message.id) != origin_of(message.actor):
            self.call_unknown(message, frames)  # the `Spawn` may still be on its way from another process
            return
        stopped = self.actors.pop(message.actor, None)
        self._dead.pop(message.actor, None)
        self._absent.note_stopped(message.actor, message.reason)
        if stopped is not None:
            self._stopping.append(stopped)
            stopped.post(message, frames)
            if message.id and not stopped.is_made:
                later(MAKING_S, self.submit, lambda: self._give_up(stopped, message))
        elif message.id:
            self.send_answer_now(message.id, pack(Result(message.id, Payload())))

    def _give_up(self, executor: Executor, message: StopActor) -> None:
        """Answer the request to stop an actor whose constructor does not end, and what waits for that actor."""
        if executor.is_made or executor.over:
            return
        executor.interrupt_all()
        for waiting in [item for item in list(executor.mailbox) if isinstance(item[0], Call)]:
            with contextlib.suppress(ValueError):  # the executor has just taken it
                executor.mailbox.remove(waiting)
                self._absent.refuse(waiting[0].id, message.reason)
        self.send_answer_now(message.id, pack(Result(message.id, Payload())))

    def _handle_interrupt(self, message: Interrupt, frames: Sequence[Frame], peer: Peer) -> None:
        self.client.stores.forget(message.id)
        self._interrupt(message.id, message.abort)

    def _handle_store_call(self, message: StoreCall, frames: Sequence[Frame], peer: Peer) -> None:
        for id, packed in self.client.stores.handle(message):
            self.send_answer_now(id, packed)

    def _handle_buffers(self, message: Message, frames: Sequence[Frame], peer: Peer) -> None:
        self._buffer_server.handle(message, frames)
        if isinstance(message, OpenBuffer):  # memory that is opened for a process stays open until the process ends
            self.watch(_process(peer))

    def _handle_post_mortem(self, message: PostMortem, frames: Sequence[Frame], peer: Peer) -> None:
        at = [each for each in self.executors() if each.kept and each.kept.request == message.request]
        if executors := at or self.executors():
            executors[0].post(message, frames)
        else:  # no executor here has a failure
            self.send_answer_now(message.id, pack(Result(message.id, Payload())))

    def answer_barrier(self, message: Barrier, peer: Peer) -> None:
        """Answer a barrier at once, because all earlier messages for ``peer`` have been sent."""
        self.send_answer_now(message.id, pack(Result(message.id, Payload())))

    def gone(self, process: Process) -> None:
        """Handle the end of a watched process; for the I/O thread."""
        self._buffer_server.gone(process.proc)

    def end_actor(self, actor: int, reason: str) -> None:
        """End an actor, and interrupt what it runs, because its owner is gone; for the I/O thread."""
        stopped = self.stop_actor(actor, reason)
        if stopped is not None:
            stopped.interrupt_all()

    def stop_actor(self, actor: int, reason: str) -> Executor | None:
        """End an actor after what it runs and what waits for it; for the I/O thread."""
        stopped = self.actors.pop(actor, None)
        self._absent.note_stopped(actor, reason)
        if stopped is not None:
            self._stopping.append(stopped)
            stopped.post(StopActor(0, actor, reason), ())
        return stopped

    def note_death(self, actor: int, failure: Failure) -> None:
        """Note the death of an actor. The last ones keep their threads, for a post-mortem; earlier ones only their failure."""
        self.client.submit(lambda: self._mark_dead(actor, failure))

    def _mark_dead(self, actor: int, failure: Failure) -> None:
        if actor in self.actors:
            self._dead[actor] = failure
        while len(self._dead) > _MAX_DEAD:
            oldest = next(iter(self._dead))
            executor = self.actors.pop(oldest)
            self._absent.note_stopped(oldest, self._dead.pop(oldest))
            self._stopping.append(executor)
            executor.post(StopActor(0, oldest, ""), ())

    def call_unknown(self, message: Call | StopActor, frames: Sequence[Frame]) -> None:
        """Handle a message for an actor that is not here."""
        self._absent.handle(message, frames)

    # -- the end of the process

    def retire(self, submit: Callable[[Callable[[], None]], object], timeout_s: float | None = None) -> None:
        """Run the cleanup of all actors that have one, and wait for them.

        Args:
            submit: Runs a function on the I/O thread.
            timeout_s: The time for each actor, in seconds; None for no limit.
        """
        threads: list[threading.Thread | None] = []
        collected = threading.Event()

        def collect() -> None:
            self.is_retiring = True
            threads.extend(executor.retire() for executor in self.executors() if executor.retire is not None)
            collected.set()

        self._buffer_server.close()
        if self.actors or self._stopping:  # an actor that was stopped may still clean up
            submit(collect)
            collected.wait(timeout_s)
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout_s)

    # -- interrupts

    def _interrupt(self, id: int, abort: bool) -> None:
        for executor in self.executors():
            waits = next((item for item in list(executor.mailbox) if getattr(item[0], "id", 0) == id), None)
            if waits is not None:
                with contextlib.suppress(ValueError):  # the executor has just taken the request
                    executor.mailbox.remove(waits)
                    host = socket.gethostname()
                    dropped = Failure("interrupted", "KeyboardInterrupt", NOT_STARTED, host=host, pid=os.getpid())
                    self.send_answer_now(id, pack(Failed(id, dropped)))
                    executor.on_dropped(waits[0], abort)
                    return
            if executor.current == id or id in executor.interrupters:
                executor.interrupted = id
                executor.delivered = 0
                if self.debugger is None or not self.debugger.interrupt(id):
                    self.interrupt_executor(executor, id, abort)
                    self.after_interrupt(executor, id, abort)
                return

    def after_interrupt(self, executor: Executor, id: int, abort: bool) -> None:  # noqa: B027
        """Act on code that an interrupt alone may not stop."""


def _process(peer: Peer) -> Process:
    return Process(proc_of(peer), incarnation_of(peer))


def _activities_of(executor: Executor) -> list[Activity]:
    found: list[Activity] = []
    if executor.is_busy:
        coroutines = [call.work for call in list(executor.calls)]
        found += describe_thread(executor.thread_id, executor.current, executor.name, coroutines)
    for thread, request in executor.left_work().items():
        found += describe_thread(thread, request, f"{executor.name}{IN_POOL}")
    return found
