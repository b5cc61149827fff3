"""A rank: the process that runs the user's cells and actors.

Theory of operation
===================

*Executors* do the work. Each is a mailbox and the one thread that empties it: ``main`` (the main thread, for cells, push, pull
and process groups, so that signals and CUDA behave as in a script), and one per actor. An idle executor drives the socket
(`Driver`), and handles the message that ends its wait without a switch of threads. While all executors are busy, the driver's
background thread receives messages and puts them into mailboxes. It handles `Interrupt` and `Release` at once, whatever is
queued before them. So each executor handles its messages in order, and control messages are handled out of band.

An interrupt names a request. It raises KeyboardInterrupt only if, at that moment, an executor runs the user's code of that
request. A request that still waits in a mailbox is answered as interrupted. In all other cases the interrupt is too late, and
has no effect. SIGINT from elsewhere (a terminal, Jupyter's process group) has no effect.

KeyboardInterrupt does not end a collective. If the request still runs `COLLECTIVE_GRACE_S` after an interrupt, and a collective
is pending or a call of torch.distributed waits, the rank aborts the process group: the call raises, the rank keeps its state,
and the group is formed again later. The rank looks again until KeyboardInterrupt was raised, because the code may enter the
collective later. With ``abort`` in the interrupt, the rank aborts the group even if no collective is known.

Code that ignores SIGINT gets another signal, which only this package uses. A SIGINT handler of the user's code is called once.

The thread that drives the socket answers `GetStacks`: where the user's code is, and in which collectives it waits.

SIGTERM ends the process through ``atexit``, and then by that signal, so that its exit status tells what ended it: a scheduler
that preempts a job sends it, and so does the agent. Apart from that, user code ends the process only if it kills it. Processes
that the user's code forks do not have these signal handlers (`monarch_kernel.net.transport.forks`).

A rank whose mesh may outlive the controller keeps a `ReplayLog` of its open requests, and reports it to the next controller
(`Attach`).

The thread that receives `Interrupt` acts at once; what it does depends on where the request is:

- On the main thread: ``pthread_kill`` with SIGINT, repeated until the handler has run, and when Python swallows the exception.
- In a sync actor: an asynchronous KeyboardInterrupt, which the thread sees at its next bytecode, and not in a sleep.
- In an async actor: it cancels the task.
- In a mailbox: it removes the request, and answers it as interrupted.

The kernel does not signal ranks itself, because a signal does not say which request it is for.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol

from monarch_kernel.net.transport.base import CONTROLLER, Peer, PeerTransport
from monarch_kernel.net.transport.driver import Driver, behind_shields
from monarch_kernel.net.transport.forks import Forking, in_forks
from monarch_kernel.net.wire.codec import Frame, Packed, WireError, load, pack, replace, salvage_ids, split
from monarch_kernel.net.wire.messages import (
    Apply,
    Attach,
    Barrier,
    CleansUp,
    Failed,
    Forget,
    GetStacks,
    Hello,
    Message,
    Payload,
    Ping,
    ProcessStatus,
    Pull,
    Push,
    RankSpec,
    Release,
    Result,
    Rewind,
    Rich,
    Run,
    Spawn,
    Unhandled,
)
from monarch_kernel.net.wire.shared_classes import CellClasses
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.loop_positions import LoopEnds
from monarch_kernel.runtime.diagnostics.namespace import NameTracker
from monarch_kernel.runtime.diagnostics.thread_frames import callers_of
from monarch_kernel.runtime.host.preemption import INTERRUPT_SIGNAL
from monarch_kernel.runtime.host.processes import await_end, die_with_parent, end_by_sigterm, has_children
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC, origin_of
from monarch_kernel.runtime.rpc.ownership import PROGRAM, Process
from monarch_kernel.runtime.worker.actor_server import ActorServer
from monarch_kernel.runtime.worker.client import RankItem, WorkerClient
from monarch_kernel.runtime.worker.collective_aborts import CollectiveAborts, Group
from monarch_kernel.runtime.worker.displays import Displays
from monarch_kernel.runtime.worker.executor import Executor, working
from monarch_kernel.runtime.worker.function_calls import Applier, run_bootstrap
from monarch_kernel.runtime.worker.imports import defers_signal, forget_torn_imports
from monarch_kernel.runtime.worker.last_objects import drop_objects
from monarch_kernel.runtime.worker.replay_log import ReplayLog
from monarch_kernel.runtime.worker.stdio import OutputMarks
from monarch_kernel.runtime.worker.swallowed_interrupts import repeat_swallowed
from monarch_kernel.runtime.worker.termination import Termination
from monarch_kernel.runtime.worker.timers import later

__all__ = ["Rank", "RankItem", "Shell"]

_log = logging.getLogger(__name__)

INTERRUPT_EVERY_S = 0.05
SWITCH_INTERVAL_S = 0.001

_FROM_RANKS = (Run, Apply, Push, Pull, Ping, GetStacks, Release)
"""Messages that other ranks may send, besides those about actors and those that features add (`Rank.extend`)."""

Handler = Callable[[Any, Sequence[Frame]], None]
"""Handles a message and its frames."""


class Shell(Protocol):
    """The shell that runs cells."""

    namespace: dict[str, Any]
    hidden: frozenset[str]
    """Names in the namespace that are not the user's."""

    @property
    def last_error(self) -> BaseException | None:
        """The exception that ended the last cell."""
        ...

    def run(self, code: str, number: int) -> Any:
        """Run a cell; the outcome has ``value``, ``bundle`` and ``failure``."""
        ...


class Rank(ActorServer):
    """A rank process: runs cells on the main thread, and actors on their own threads.

    Args:
        spec: The spec of the rank.
        transport: The transport, which is connected to the controller.
        token: Proves that the rank belongs to the session.
        marks: Writes the marks in stdout and stderr.
        address: Where the rank listens for other ranks.

    Attributes:
        displays: Sends displays and messages of widgets.
        at_new_controller: Functions that a new controller makes the rank call, with the ids of the open requests.
        rewind: The snapshot to which a loop in the current cell returns.
        termination: Handles SIGTERM.
    """

    def __init__(
        self, spec: RankSpec, transport: PeerTransport, token: str, marks: OutputMarks, address: str = ""
    ) -> None:
        self.spec = spec
        self.driver: Driver[RankItem] = Driver(transport, self._on_message, self._on_item, name="monarch-rank-io")
        self.hello = Hello(token, spec.proc, os.getpid(), spec.device, address=address, shares=transport.shares)
        self.displays = Displays(self.driver, lambda: transport.unsent_nbytes)
        self.peers = WorkerClient(spec, self.driver, transport, self.hello)
        super().__init__(spec.proc, self.driver, self.peers)
        self.peers.slow_wait_hook = self.on_slow_wait
        self.peers.supervisor = self.supervisor
        self.group: Group | None = None
        self.loop_ends = LoopEnds("", {})
        self._aborts = CollectiveAborts(self, later)
        self.leave_collectives = self._aborts.leave
        self.main = Executor(self, "main")
        self.main.handlers |= {
            Run: self._run_cell,
            Apply: self._apply,
            Push: self._push,
            Pull: self._pull,
            Ping: self._ping,
        }
        self._out_of_band: dict[type[Message], Handler] = {
            Attach: self._attach,
            Failed: lambda message, frames: self.peers.answered(CONTROLLER, message, frames),
            Forget: self._forget,
            GetStacks: self._aborts.get_stacks,
            ProcessStatus: lambda message, frames: self.peers.handle_status(message),
            Release: self._aborts.release,
            Result: lambda message, frames: self.peers.answered(CONTROLLER, message, frames),
        }
        self._from_ranks: set[type[Message]] = set(_FROM_RANKS)
        self.at_new_controller: list[Callable[[Collection[int]], None]] = []
        self._shell: Shell | None = None
        self._applier: Applier | None = None
        self._names: NameTracker | None = None
        self._make_shell: Callable[[Callable[[dict[str, Any], dict[str, Any]], None]], Shell] | None = None
        self._output_marks = marks
        self._last_cell = 0
        self._cell = 0
        self.rewind: Rewind | None = None  # of the cell
        self._token = token
        self._replay_log = ReplayLog(spec.record) if spec.record else None
        self._epoch = 0
        self._insisted = 0  # the request that an interrupt also ends in an import
        self.termination = Termination()
        self._cleans_up = False
        self._waiting_spawns: list[tuple[Spawn, Executor]] | None = [] if spec.bootstrap else None

    def use_shell(self, make_shell: Callable[[Callable[[dict[str, Any], dict[str, Any]], None]], Shell]) -> None:
        """Set the function that makes the shell, which is called for the first cell."""
        self._make_shell = make_shell

    @property
    def shell(self) -> Shell:
        """The IPython shell."""
        if self._shell is None:
            assert self._make_shell is not None
            self._shell = self._make_shell(self._publish)
        return self._shell

    @property
    def namespace(self) -> tuple[dict[str, Any], frozenset[str]]:
        """The namespace of cells, and the names in it that are not the user's; empty before the first cell."""
        return ({}, frozenset()) if self._shell is None else (self._shell.namespace, self._shell.hidden)

    def extend(
        self, handlers: Mapping[type[Message], Handler], *, on_main: bool = False, from_ranks: bool = False
    ) -> None:
        """Register handlers for the messages of a feature.

        Args:
            handlers: The handler of each kind of message.
            on_main: Whether the main thread handles them, in order with cells; otherwise the thread that receives them handles
                them at once, on the I/O thread.
            from_ranks: Whether other ranks may send them, too, and not only the controller.
        """
        (self.main.handlers if on_main else self._out_of_band).update(handlers)
        if from_ranks:
            self._from_ranks.update(handlers)

    def serve(self, helper: int) -> NoReturn:
        """Run on the main thread until the process must exit.

        Args:
            helper: The pid of the process that forked this rank, which ends as soon as it has forked the other ranks.
        """
        await_end(helper)  # before any actor may run: code of actors, and of this package, asks for the parent
        die_with_parent(signal.SIGKILL)
        self._forking = Forking()
        signal.signal(signal.SIGINT, self._on_sigint)
        signal.signal(INTERRUPT_SIGNAL, self._on_sigint)
        repeat_swallowed(self.main, self._interrupt_main, INTERRUPT_EVERY_S)
        self.termination.install()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.driver.start()
        self.driver.submit(pack(self.hello))
        self._up_at = time.monotonic()
        try:
            if self.spec.bootstrap:
                self._boot()
            self.main.run()
        except SystemExit:
            pass
        self._exit()

    # -- the bootstrap, before any actor

    def _boot(self) -> None:
        """Run the bootstrap function of the mesh. If it raises, each spawn on this rank fails with that error."""
        try:
            with self.main.user_code():
                run_bootstrap(self.spec.bootstrap)
        except BaseException as error:  # any error of the bootstrap goes to the process that waits for the mesh
            if self.termination.has_started:
                raise
            failure = describe(error)
            text = f"{failure.message} (raised by the bootstrap of this process)"
            self.broken = dataclasses.replace(failure, message=text)
        self.driver.submit(self._start_waiting_actors)

    def begin(self, message: Spawn, executor: Executor) -> None:
        """Start an actor once the bootstrap has returned; actors that the bootstrap has spawned start at once."""
        if self._waiting_spawns is None or origin_of(message.actor) == self.spec.proc:
            super().begin(message, executor)
        else:
            self._waiting_spawns.append((message, executor))

    def _start_waiting_actors(self) -> None:
        waiting, self._waiting_spawns = self._waiting_spawns or [], None
        for message, executor in waiting:
            self.begin(message, executor)

    # -- answers

    def send_answer(self, id: int, packed: Packed) -> None:
        """Send an answer to the process that made the request; for any thread."""
        if origin_of(id) != CONTROLLER_PROC:
            self.driver.submit(lambda: self.peers.send_answer(id, packed))
            return
        if self._replay_log is not None:
            self._replay_log.answered(id, packed)
        self.driver.submit(packed)

    def note_cleanup(self) -> None:
        """Make the controller wait for this process when the session ends."""
        if not self._cleans_up:
            self._cleans_up = True
            self.driver.submit(pack(CleansUp()))

    def send_answer_now(self, id: int, packed: Packed) -> None:
        """Send an answer to the process that made the request; for the I/O thread."""
        if origin_of(id) != CONTROLLER_PROC:
            self.peers.send_answer(id, packed)
            return
        if self._replay_log is not None:
            self._replay_log.answered(id, packed)
        self.driver.send(CONTROLLER, packed)

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function on the I/O thread; calls of one thread run in order."""
        self.driver.submit(function)

    def watch(self, process: Process) -> None:
        """Report the end of a process to the supervisor; for the I/O thread."""
        self.peers.watch(process)

    def attend(self) -> None:
        """Send failures of meshes that cells here have spawned to the controller, which reports them to the program."""
        while (failure := self.supervisor.take(PROGRAM)) is not None:
            self.driver.submit(pack(Unhandled(failure.without_mesh())))

    def is_detached(self) -> bool:
        """Whether there is no controller now, but there may be another one later."""
        return self._replay_log is not None and self._replay_log.is_detached

    @property
    def is_in_cell(self) -> bool:
        """Whether the calling thread runs a cell of a notebook."""
        return working.get() is self.main and self._cell > 0

    def executors(self) -> list[Executor]:
        """Return all executors: that of the main thread, and those of the actors."""
        return [self.main, *super().executors()]

    def name(self) -> str:
        """Return the name of the process in error messages."""
        return f"{self.spec.mesh}[{self.spec.rank}]"

    def marks(self, *, ends_request: bool = False) -> tuple[tuple[int, int], int, int, int, int]:
        """Mark the end of the output so far. Returns the marks, and what `Result` says about process groups."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        ends_cell = ends_request and threading.current_thread() is threading.main_thread()
        is_last = lambda: ends_request and self._runs_one_request()  # noqa: E731
        group, marks = self.group, self._output_marks.set(ends_cell=ends_cell, is_last=is_last)
        if group is None:
            return marks, -1, -1, 0, 0
        unmatched = group.messages.take() if ends_request else 0
        return marks, group.collectives(), group.groups(), group.size(), unmatched

    def _runs_one_request(self) -> bool:
        """Whether only one request runs, such as the call of an actor that asks this."""
        busy = [each for each in self.executors() if each.is_busy]
        return len(busy) <= 1 and all(len(each.calls) <= 1 for each in busy)

    def _publish(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        packed = pack(Rich(self.main.current, data, metadata, self._output_marks.set(display=True)))
        if self._replay_log is None or not self._replay_log.displayed(packed):
            self.displays.send(packed)
            self.displays.wait()

    # -- handlers of the main executor

    def _run_cell(self, message: Run, _: Sequence[Frame]) -> None:
        shell = self.shell
        self.main.kept = None
        signal.signal(signal.SIGINT, self._on_sigint)  # an earlier cell may have set another handler
        self._output_marks.begin(self._last_cell if has_children() else 0)
        self._last_cell = message.id
        self._cell = message.cell
        self.rewind = message.rewind
        self.loop_ends = LoopEnds(message.code, shell.namespace)
        with self.main.user_code():
            with CellClasses(message.cell, message.code, shell.namespace):
                outcome = shell.run(message.code, message.cell)
            self.main.came_back(shell.last_error)
        self.termination.end_if_put_off()  # or SIGTERM came, and the shell has taken it for the cell's own exit
        self._report_names()
        if outcome.failure is not None:
            if isinstance(shell.last_error, KeyboardInterrupt):
                forget_torn_imports(shell.last_error.__traceback__)
            self.fail(self.main, message.id, outcome.failure, shell.last_error)
        else:
            value = outcome.value if message.want_value else None
            self.reply(message.id, value, outcome.bundle, output=True)

    def _apply(self, message: Apply, frames: Sequence[Frame]) -> None:
        if self._applier is None:
            self._applier = Applier(self.shell.namespace)
        self.main.kept = None
        signal.signal(signal.SIGINT, self._on_sigint)
        failure: BaseException | None = None
        try:
            with self.main.user_code():
                value = self._applier.call(message.payload, frames)
        except BaseException as error:  # any error of the function is its outcome
            failure = error
        self.termination.end_if_put_off()
        self._report_names()
        if failure is not None:
            self.fail(self.main, message.id, failure, failure)
            failure = None  # its traceback refers to this frame
        else:
            self.reply(message.id, value, output=True)

    def _push(self, message: Push, frames: Sequence[Frame]) -> None:
        namespace = self.shell.namespace
        with self.main.user_code():
            namespace[message.name] = load(message.payload, frames)
        self._report_names()
        self.reply(message.id)

    def _report_names(self) -> None:
        """Report changes in the namespace, before the answer, so that completions after the answer include them."""
        if self._names is None:
            self._names = NameTracker(self.shell.hidden)
        try:
            news = self._names.news(self.shell.namespace)
        except Exception:  # no object of the user may make a cell fail
            _log.exception("could not determine the changes in the namespace")
            return
        if news is not None:
            self.driver.submit(pack(news))

    def _pull(self, message: Pull, _: Sequence[Frame]) -> None:
        namespace = self.shell.namespace
        if message.name not in namespace:
            # The error is not raised, because its traceback would show only code of this package.
            self.fail(self.main, message.id, NameError(f"name {message.name!r} is not defined on this rank"))
            return
        with self.main.user_code():
            self.reply(message.id, namespace[message.name], name=message.name)

    def _ping(self, message: Ping, _: Sequence[Frame]) -> None:
        if self.broken is not None:
            self.fail(self.main, message.id, self.broken)
            return
        self.reply(message.id, output=True)

    # -- on the I/O thread

    def _on_item(self, item: RankItem) -> None:
        if isinstance(item, Packed):
            self.driver.send(CONTROLLER, item)
        else:
            item()

    def _on_message(self, peer: Peer, parts: list[Frame]) -> None:
        try:
            for message, frames in split(parts):
                if peer != CONTROLLER:
                    self._handle_from_rank(message, frames, peer)
                    continue
                if self._replay_log is not None:
                    self._replay_log.take(message)
                if not self.handle(message, frames, peer):
                    self._route(message, frames)
        except WireError as error:
            bad = describe(error)
            if peer == CONTROLLER:
                for id in salvage_ids(parts):  # a process that waits for an answer must not wait forever
                    self.send_answer_now(id, pack(Failed(id, bad)))

    def _handle_from_rank(self, message: Message, frames: Sequence[Frame], peer: Peer) -> None:
        """Handle a message of another rank; messages that ranks may not send are dropped."""
        if isinstance(message, Hello):
            self.peers.admit(peer, message)
        elif not self.peers.is_admitted(peer):
            self.peers.refused += 1
        elif isinstance(message, (Result, Failed)):
            self.peers.answered(peer, message, frames)
        elif not self.handle(message, frames, peer) and type(message) in self._from_ranks:
            self._route(message, frames)

    def answer_barrier(self, message: Barrier, peer: Peer) -> None:
        """Answer when all messages for ``peer`` are sent, including those that a replacement of another process gets."""
        self.peers.when_met(peer, lambda: self.send_answer_now(message.id, pack(Result(message.id, Payload()))))

    def _route(self, message: Message, frames: Sequence[Frame]) -> None:
        if type(message) in self.main.handlers:
            self.main.post(message, frames)
        elif (handle := self._out_of_band.get(type(message))) is not None:
            handle(message, frames)

    def _forget(self, message: Forget, _: Sequence[Frame]) -> None:
        if self._replay_log is not None:
            self._replay_log.forget(message.id)

    def _attach(self, message: Attach, _: Sequence[Frame]) -> None:
        """Send a new controller the hello of this rank, and everything that the last one did not receive."""
        if self._replay_log is None or message.token != self._token or message.epoch <= self._epoch:
            return
        self._epoch = message.epoch
        open_requests, missed = self._replay_log.attach()
        self.driver.send(
            CONTROLLER, pack(replace(self.hello, open_requests=open_requests, up_s=time.monotonic() - self._up_at))
        )
        for packed in missed:
            self.driver.send(CONTROLLER, packed)
        if self._names is not None:
            self.driver.send(CONTROLLER, pack(self._names.everything()))
        if self._cleans_up:
            self.driver.send(CONTROLLER, pack(CleansUp()))
        self.peers.controller_is_new()
        for notify in self.at_new_controller:
            notify({one.id for one in open_requests})
        self.gone(Process(CONTROLLER_PROC, 0))  # the previous controller

    # -- interrupts

    def interrupt_executor(self, executor: Executor, id: int, abort: bool) -> None:
        """Raise KeyboardInterrupt in the code that an executor runs for a request."""
        if executor is self.main:
            self._interrupt_main(id, abort)
        else:
            super().interrupt_executor(executor, id, abort)

    def after_interrupt(self, executor: Executor, id: int, abort: bool) -> None:
        """Abort the process group after a grace period, if the request still waits in a collective."""
        self._aborts.after_interrupt(executor, id, abort)

    def _interrupt_main(self, id: int, insist: bool) -> None:
        """Signal the main thread until its handler has run: a signal just before a system call does not interrupt the call."""
        handler = behind_shields(signal.getsignal(signal.SIGINT))
        if self.main.current != id or self.main.delivered == id:
            return
        if insist:
            self._insisted = id
        if handler != self._on_sigint and callable(handler) and not insist:  # of the cell: it is called once
            self.main.delivered = id
            signal.pthread_kill(self.main.thread_id, signal.SIGINT)
            return
        # If the cell has set SIG_IGN or SIG_DFL, or goes on after its own handler, another signal reaches our handler.
        number = signal.SIGINT if handler == self._on_sigint else INTERRUPT_SIGNAL
        signal.pthread_kill(self.main.thread_id, number)
        later(INTERRUPT_EVERY_S, self._interrupt_main, id, insist)

    @in_forks(lambda rank: signal.default_int_handler)
    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        main = self.main
        self.termination.insist()
        if self._forking.is_now:  # Python swallows exceptions now; `_interrupt_main` sends the signal again
            return
        at = frame or sys._getframe(1)  # an interrupt that a wait has deferred has no frame
        if defers_signal(callers_of(at), insists=self._insisted == main.current):  # the signal comes again, too
            return
        if main.in_user_code and main.current and main.interrupted == main.current != main.delivered:
            main.delivered = main.current
            raise KeyboardInterrupt

    def _exit(self) -> NoReturn:
        self.termination.has_started = self.termination.is_ending = True
        with contextlib.suppress(BaseException):
            self.retire(self.driver.submit)
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            drop_objects(self)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self.termination.by_signal:
            end_by_sigterm()
        os._exit(0)
