"""The loop of the controller: performs the effects that its state decides on.

Everything enters through `Runtime.enter`, `Runtime.request` or `Runtime.promise`. Only the I/O thread, which is the thread that
leads the `Driver`, uses the state and the transport.

Neither the controller nor the agent uses asyncio: an event loop would own the thread that waits, and would add a hand-over
from any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from monarch_kernel.base.events import MeshView
from monarch_kernel.errors import Failure, MeshDownError, MeshFailure
from monarch_kernel.net.transport.base import (
    HostTransport,
    rank_peer,
)
from monarch_kernel.net.transport.driver import Driver, Waiter
from monarch_kernel.net.wire.codec import Packed, pack
from monarch_kernel.net.wire.messages import (
    Ping,
    RankSpec,
)
from monarch_kernel.runtime.buffers.transfers import data_paths_of
from monarch_kernel.runtime.controller.admission import Admission
from monarch_kernel.runtime.controller.adoption import Resumed
from monarch_kernel.runtime.controller.attachment import Attachment
from monarch_kernel.runtime.controller.effects import (
    Attached,
    Effect,
    Expired,
    GiveUp,
    Halt,
    HostGone,
    Later,
    RestartDue,
    Route,
    Tell,
)
from monarch_kernel.runtime.controller.extensions import ExtensionT
from monarch_kernel.runtime.controller.healing import Healer
from monarch_kernel.runtime.controller.host_pool import HostPool, Item
from monarch_kernel.runtime.controller.intake import Intake
from monarch_kernel.runtime.controller.interrupt_effects import interrupt_work
from monarch_kernel.runtime.controller.listeners import Listener, Listeners
from monarch_kernel.runtime.controller.local_actors import LocalActorServer
from monarch_kernel.runtime.controller.process_queries import ProcessQueries
from monarch_kernel.runtime.controller.replacement import Replacement
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.controller.unhandled import FailureReporter
from monarch_kernel.runtime.controller.view_data import mesh_view
from monarch_kernel.runtime.controller.wait_lines import WaitLines
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client_base import ClientBase, Supervising
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC, numbers, origin_of
from monarch_kernel.runtime.rpc.ownership import PROGRAM, Process
from monarch_kernel.runtime.rpc.requests import Resolve, Send
from monarch_kernel.runtime.rpc.respawn_log import MakeSpawn
from monarch_kernel.runtime.rpc.waits import PendingFuture, Wait
from monarch_kernel.runtime.worker.executor import working

__all__ = ["Listener", "Runtime"]

T = TypeVar("T")

LISTEN_S = 1.0
MAX_LISTEN_S = 0.3
"""The longest time between two ticks that counts as listened: the loop may have been held up for longer."""


class Runtime(ClientBase):
    """Drives a `State` over a transport.

    Args:
        transport: The controller's end.
        token: What ranks and agents must present.
        output_wait_s: How long `close` waits for the output of idle ranks to arrive, in seconds.
        epoch: How many controllers the ranks had before this one; keeps ids of requests apart.

    Attributes:
        session: The session that owns it, if any.
        host_pool: Its hosts.
        queries: What its records say of processes.
        replacement: Replaces ranks that have died.
        attachment: Attaches to ranks of an earlier controller.
        listeners: Listeners of requests and of the session.
        unhandled: Failures that no actor has handled.
        wait_lines: Lines about waits that last, for views.
        on_tick: Called many times a second with the time, on the I/O thread.
    """

    def __init__(self, transport: HostTransport, token: str, output_wait_s: float = 0.0, epoch: int = 0) -> None:
        self._state = State()
        super().__init__(CONTROLLER_PROC, self._state.requests, numbers(epoch), transport.meters)
        self.paths = data_paths_of(self)
        self._transport = transport
        self._output_wait_s = output_wait_s
        self._intake = Intake(self._state, self.perform)
        self._listened_at = time.monotonic()
        self.on_tick: Callable[[float], None] = lambda now: None
        for extension in self._state.extensions.values():
            extension.started(self.meters)
        self._lock = threading.Lock()
        self._next_proc = CONTROLLER_PROC + 1
        self._futures: dict[int, Future[object]] = {}
        self.listeners = Listeners(self._futures.__contains__)
        self.queries = ProcessQueries(self._state.ranks)
        self.wait_lines = WaitLines()
        self._closed = False
        self._ended = threading.Event()
        self._over = False
        self._driver: Driver[Item] = Driver(
            transport,
            self._intake.take,
            lambda item: self.perform(item(time.monotonic())),
            on_tick=self._on_tick,
            is_idle=lambda: not self._futures and self.listeners.is_empty and self._state.is_settled,
            name="monarch-controller",
        )
        self.session: Any = None
        self.actor_server = self._intake.actor_server = LocalActorServer(self, self._driver)
        supervisor = self.actor_server.supervisor
        self._intake.admission = Admission(self._state, transport, token, self._driver.catch_up, supervisor.up)
        self.host_pool = HostPool(self, self._state, transport)
        healer = Healer(self._state, self._request_for, supervisor.respawned)
        self.replacement = Replacement(self, self._state, self.host_pool, healer)
        self.attachment = Attachment(self, self.wait, self._state, transport, self.host_pool, token, epoch)
        self.unhandled = FailureReporter(lambda: supervisor.take(PROGRAM))
        self._driver.start()

    # -- for any thread

    def request(
        self,
        procs: Sequence[int],
        make: Callable[[int], Packed | Sequence[Packed]],
        description: str,
        finish: Callable[[Sequence[Answer]], T],
        rank: int | None = None,
        listen: Listener | None = None,
        quiet: bool = False,
        is_cell: bool = False,
        spawned: tuple[int, MakeSpawn] | None = None,
    ) -> Future[T]:
        """Request one answer from each rank.

        Args:
            procs: The numbers of their processes.
            make: Makes the message for a request id, or one for each rank.
            description: What the ranks do meanwhile, in the user's words.
            finish: Makes the future's result from the answers.
            rank: The rank of a future of one rank.
            listen: Gets the output and displays of the ranks for it, also after its end. It runs on the I/O thread, so it must
                be quick. Without it the output is printed.
            quiet: Whether output that arrives meanwhile belongs to the request before it.
            is_cell: Whether the next controller needs the answers, too, if the ranks outlive this one.
            spawned: The actor that it makes, and a function that makes the message for processes that replace these.

        Raises:
            MeshDownError: The session was shut down.
        """
        if self._closed:
            raise MeshDownError("the session was shut down; start again with this_host() or %mesh up")
        id = self._new_request()
        future = Future(self, id, finish, rank, description, procs)
        packed = make(id)
        if listen is not None:
            self.listeners.add(id, listen)  # before any output can arrive
        self._futures[id] = future  # type: ignore[assignment]
        ask = partial(
            self._state.request, id, procs, packed, description, quiet=quiet, is_cell=is_cell, spawned=spawned
        )
        self._driver.submit(ask)
        if self._over:
            self._abandon_all()  # closed meanwhile, perhaps before the request was handled
        return future

    def ask(
        self, procs: Sequence[int], make: Callable[[int], Packed], finish: Callable[[Sequence[Answer]], T]
    ) -> Future[T]:
        """Request something that ranks answer at once, even if they are busy; arguments as for `request`."""
        return self.promise(lambda id, now: self._state.ask(id, procs, make(id), now), finish)

    def promise(
        self, begin: Callable[[int, float], list[Effect]], finish: Callable[[Sequence[Answer]], T]
    ) -> Future[T]:
        """Make a future; ``begin`` starts its request on the I/O thread, with the request's number and the time.

        Raises:
            MeshDownError: The session was shut down.
        """
        if self._closed:
            raise MeshDownError("the session was shut down; start again with this_host() or %mesh up")
        id = next(self._ids)
        future = Future(self, id, finish)
        self._futures[id] = future  # type: ignore[assignment]
        self._driver.submit(partial(begin, id))
        if self._over:
            self._abandon_all()
        return future

    def send_answer(self, id: int, packed: Packed) -> None:
        """Send the answer of an actor here to the process that made the request."""
        self.enter(lambda now: self._state.answer_to(origin_of(id), packed))

    def host_actors(self) -> None:
        """Let this process receive requests, as ranks do, because actors are spawned here."""
        self.enter(lambda now: self._state.host_actors())

    def tell(self, procs: Sequence[int], packed: Packed) -> None:
        """Send ranks a message that has no answer."""
        self._before_sending()
        self.enter(lambda now: [*self._state.requests.tell(procs, packed)])

    def tell_all(self, packed: Packed) -> None:
        """Send every rank a message that has no answer."""
        ranks = self._state.ranks
        self.enter(
            lambda now: [*self._state.requests.tell([proc for proc in ranks if proc != CONTROLLER_PROC], packed)]
        )

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        """Wait until ``waiter`` is ready, and drive the loop meanwhile."""
        executor = working.get()
        if executor is not None and executor.thread_id == threading.get_ident():
            return executor.wait(waiter, timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._driver.wait(waiter, timeout_s) and self._closed:
            # Another thread closes the session; in a moment it will have ended every future.
            self._ended.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return waiter.ready

    def interrupt(self, id: int, *, abort: bool = False) -> None:
        """Interrupt a request on the ranks that have not answered it; with ``abort``, at the cost of process groups."""
        self.enter(lambda now: [*self._state.requests.interrupt(id, abort=abort)])

    def interrupt_work(self, futures: Sequence[PendingFuture], interrupt: Callable[[], object]) -> str:
        """Interrupt ranks, wait a moment for them to stop, and describe their waits in collectives, and those that go on."""
        waiting_for = lambda future: self.run_on_io_thread(lambda: list(self.waiting_for(future.id)))  # noqa: E731
        known = "" if self._closed else interrupt_work(self, futures, waiting_for, interrupt)
        return known or super().interrupt_work(futures, interrupt)

    def interrupt_ranks(self, procs: Sequence[int], *, abort: bool = False) -> None:
        """Interrupt the code that these ranks run."""
        self.enter(lambda now: self._state.interrupt_ranks(procs, abort=abort))

    def cancel(self, id: int) -> None:
        """End a request for its caller and interrupt it on its ranks."""
        self.enter(partial(self._state.cancel, id))

    def on_slow_wait(self, wait: Wait) -> float | None:
        """Report a wait that lasts, on the thread that waits; return after how many seconds to report it again."""
        return None if self._closed else self.actor_server.on_slow_wait(wait)

    def submit(self, do: Callable[[], object]) -> None:
        """Run a function on the I/O thread, soon; functions of one thread run in order."""

        def item(now: float) -> list[Effect]:
            do()
            return []

        self.enter(item)

    def attend(self, future: Future[object]) -> None:
        """Let features act for a thread that waits for a future that one of them has halted."""
        for extension in self._state.extensions.values():
            extension.awaited(future)

    def answers(self, id: int) -> list[Answer | None]:
        """Return the answers to a request so far, in the order of its ranks; empty if it has resolved."""
        return self._state.requests.answers(id)

    @property
    def _supervising(self) -> Supervising:
        return self.actor_server.supervisor

    @property
    def refused(self) -> int:
        """The number of connections and messages from outside the session."""
        return self._intake.refused + self._transport.refused

    def deaths(self, procs: Sequence[int]) -> dict[int, Failure]:
        """By number, how those of the processes ended that are dead or stopped."""
        return self.queries.deaths(procs)

    def watch(self, watcher: Callable[[object], None]) -> Callable[[], None]:
        """Call a quick function with each event, on the I/O thread; return a function that ends this."""
        return self.listeners.watch(watcher)

    def listen(self, id: int, listen: Listener) -> None:
        """Add the listener of a resumed cell. On return it has the events since this controller attached."""
        done = Waiter()

        def add() -> None:
            self.listeners.resume(id, listen)
            done.set()

        self.submit(add)
        self.wait(done, LISTEN_S)

    def extension(self, kind: type[ExtensionT]) -> ExtensionT:
        """Return the controller's part of a feature.

        Raises:
            LookupError: The session started before the feature was imported.
        """
        return self._state.extension(kind)

    def run_on_io_thread(self, do: Callable[[], T]) -> T:
        """Run a function on the I/O thread, and return its result.

        Raises:
            MeshDownError: The session was shut down.
        """
        given: list[T] = []
        errors: list[Exception] = []
        done = Waiter()

        def item(now: float) -> list[Effect]:
            try:
                given.append(do())
            except Exception as error:  # the caller gets it
                errors.append(error)
            done.set()
            return []

        self.enter(item)
        self.wait(done, None)
        if errors:
            raise errors[0]
        if not given:
            raise MeshDownError("the session was shut down; start again with this_host() or %mesh up")
        return given[0]

    def start_ranks(self, host: int, specs: Sequence[RankSpec], *, view: int = 0) -> None:
        """Start processes on a host, through a view of the hosts; returns at once."""
        self.enter(partial(self._state.processes.start, host, specs, view=view))

    def stop_ranks(
        self, procs: Sequence[int], reason: str, finish: Callable[[Sequence[Answer]], T], grace_s: float = 2.0
    ) -> Future[T]:
        """End processes. For the program they are gone at once; the future resolves when they have ended.

        Args:
            procs: Their numbers.
            reason: The text of the error of later requests to them.
            finish: Makes the future's result from one answer for each process, which is a `Failure` if the process is stuck.
            grace_s: How long they may take to end, in seconds, before they are killed.

        Raises:
            MeshDownError: The session was shut down.
        """

        def begin(id: int, now: float) -> list[Effect]:
            effects = self._state.processes.stop(procs, reason, grace_s, now)
            return effects + self._state.processes.await_ends(id, procs, grace_s, now)

        return self.promise(begin, finish)

    @property
    def closed(self) -> bool:
        """Whether the session is over."""
        return self._closed

    def new_procs(self, count: int) -> range:
        """Make consecutive numbers for the processes of a new mesh: a rank knows those of its peers by its own."""
        with self._lock:
            first = self._next_proc
            self._next_proc += count
        return range(first, first + count)

    def view(self, procs: Sequence[int], name: str, axes: dict[str, int]) -> MeshView:
        """Return the current state of a mesh, for display."""
        engine_of = (lambda host: None) if self.session is None else self.session.engine_of
        ranks = [self._state.ranks.get(proc) for proc in procs]
        now = time.monotonic()
        view = mesh_view(name, axes, ranks, self._state.hosts, engine_of, now, self._transport.refused_connections)
        view = replace(view, waits=self.wait_lines.of(procs))
        for extension in self._state.extensions.values():
            view = extension.shown(view, procs, now)
        return view

    def close(self, timeout_s: float = 5.0, grace_s: float = 0.0) -> None:
        """End all ranks, agents and the loop; pending futures end with an error."""
        if self._closed:
            return
        self._await_output()
        self.enter(partial(self._state.processes.end_all, grace_s=grace_s))
        self._stop()
        self.host_pool.close(timeout_s)

    def leave(self) -> None:
        """End the loop; ranks and agents continue. Pending futures end with an error."""
        if self._closed:
            return
        self._await_output()
        self.enter(self._state.processes.leave_all)
        self._stop()
        self.host_pool.settle()  # hosts that others have replaced

    def _stop(self) -> None:
        self._closed = True
        self.actor_server.close()
        self.paths.close()
        self._driver.close()
        self._over = True
        for extension in self._state.extensions.values():
            extension.closed()
        self._abandon_all()
        self.listeners.flush(everything=True)
        self.unhandled.tell_all()
        self._ended.set()

    def _await_output(self) -> None:
        """Wait for the output of idle ranks, before they are ended; longer while it arrives, which a slow reader delays."""
        ranks = [record for record in list(self._state.ranks.values()) if record.spec.proc != CONTROLLER_PROC]
        idle = [record.spec.proc for record in ranks if record.state in ("idle", "failed")]
        if idle and self._output_wait_s:
            future = self.request(idle, lambda id: pack(Ping(id)), "", lambda answers: None)
            self.listeners.wait_for(future, self._output_wait_s)

    def _abandon_all(self) -> None:
        """End futures whose requests came too late."""
        for id in list(self._futures):
            if (future := self._futures.pop(id, None)) is not None:
                future.abandon(MeshDownError("the session was shut down before an answer came"))

    # -- on the I/O thread

    def enter(self, item: Item) -> None:
        """Run an item on the I/O thread, unless the session is over; the item gets the time. For any thread."""
        if not self._closed:
            self._driver.submit(item)

    def _request_for(self, answered: Callable[[Sequence[Answer]], None]) -> int:
        """Make the number of a request whose answers a function gets."""
        future: Future[Sequence[Answer]] = Future(self, next(self._ids), lambda answers: answers)
        self._futures[future.id] = future  # type: ignore[assignment]
        future.add_done_callback(lambda: None if self._over else answered(future.get(0)))
        return future.id

    def perform(self, effects: list[Effect]) -> None:
        """Perform effects of the state."""
        for effect in effects:
            if type(effect) is Send:
                self._driver.send(effect.peer, effect.packed)
            elif type(effect) is Resolve:
                self.listeners.finish(effect.id)
                if (future := self._futures.pop(effect.id, None)) is not None:
                    future.resolve(effect.answers, effect.in_step)
            elif type(effect) is Tell:
                self.listeners.tell(effect.event)
            elif type(effect) is HostGone:
                self._transport.forget(rank_peer(effect.proc, effect.incarnation))
                supervisor = self.actor_server.supervisor
                known = supervisor.gone(Process(effect.proc, effect.incarnation), effect.death)
                if not known and not effect.is_reported and not self._closed:
                    self.unhandled.add(MeshFailure(effect.mesh, {effect.rank: effect.death}))
            elif type(effect) is Halt:
                if (halted := self._futures.get(effect.id)) is not None:
                    halted.halt()
            elif type(effect) is Later:
                _run_later(effect, self.enter)
            elif type(effect) is Resumed:
                answers: Future[Sequence[Answer]] = Future(self, effect.id, lambda answers: answers)
                self._futures[effect.id] = answers  # type: ignore[assignment]
                self.attachment.resumed.append((effect, answers))
                self.listeners.keep(effect.id)
            elif type(effect) is RestartDue:
                self.replacement.restart(effect)
            elif type(effect) is Attached:
                self.attachment.finish(effect.silent)
            elif type(effect) is Route:
                self._transport.route(effect.peer, effect.host)
            elif type(effect) is GiveUp:
                self._transport.give_up(effect.host)
            elif type(effect) is Expired:
                if effect.procs:
                    log = self.host_pool.log_tail(effect.host)
                    self.perform(self._state.processes.give_up(effect.host, effect.procs, log, time.monotonic()))
                else:
                    self.host_pool.expired(effect.host, effect.reason)

    def _on_tick(self, now: float) -> None:
        self.listeners.flush()
        listened_s = min(now - self._listened_at, MAX_LISTEN_S)
        self._listened_at = now
        self.perform([*self._state.hosts.expire(self._transport.active_hosts(), listened_s)])
        self.perform(self._state.tick(now))
        self.host_pool.look()
        self.on_tick(now)


def _run_later(later: Later, enter: Callable[[Item], None]) -> None:
    """Do work on a separate thread, and perform the effects that it returns."""

    def run() -> None:
        effects = later.work()
        enter(lambda now: effects)

    threading.Thread(target=run, name="monarch-later", daemon=True).start()
