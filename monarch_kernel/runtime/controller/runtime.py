"""The controller's one loop: carries out what its state decides.

All that enters goes through `submit`; the state and the transport are touched only by the thread that leads (`Driver`).

Neither the controller nor the agent uses asyncio: an event loop would own the thread that waits, and would add a hand-over
from any other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from monarch_kernel.base.events import MeshView, OutputEvent
from monarch_kernel.errors import Failure, LaunchError, MeshDownError, MeshFailure
from monarch_kernel.launch.base import HostHandle
from monarch_kernel.net.memory.exports import ExportTable
from monarch_kernel.net.transport.base import (
    CONTROLLER,
    HostTransport,
    Peer,
    host_peer,
    incarnation_of,
    is_rank,
    rank_peer,
)
from monarch_kernel.net.transport.driver import Driver, Waiter
from monarch_kernel.net.wire.codec import Frame, Packed, WireError, pack, split
from monarch_kernel.net.wire.messages import (
    Attach,
    ClockRead,
    Hello,
    HostHello,
    Message,
    Ping,
    RankSpec,
    ReadClock,
)
from monarch_kernel.runtime.buffers.transfers import data_paths_of
from monarch_kernel.runtime.controller.adoption import Resumed
from monarch_kernel.runtime.controller.effects import (
    Attached,
    BacklogEvent,
    Effect,
    Expired,
    GiveUp,
    Gone,
    Halt,
    Later,
    RestartDue,
    RichEvent,
    Route,
    Tell,
)
from monarch_kernel.runtime.controller.extensions import ExtensionT
from monarch_kernel.runtime.controller.fleet import Fleet, Item
from monarch_kernel.runtime.controller.healing import Healer, Healing
from monarch_kernel.runtime.controller.host_compatibility import Clock
from monarch_kernel.runtime.controller.local_actors import FOR_ACTORS, LocalActorServer
from monarch_kernel.runtime.controller.printer import OutputPrinter
from monarch_kernel.runtime.controller.restarts import RestartPolicy
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.runtime.controller.unhandled import Faults
from monarch_kernel.runtime.controller.views import mesh_view
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC, made_by, numbers
from monarch_kernel.runtime.rpc.ownership import PROGRAM, Process
from monarch_kernel.runtime.rpc.ports import PortTable
from monarch_kernel.runtime.rpc.requests import Resolve, Send
from monarch_kernel.runtime.rpc.respawn_log import MakeSpawn
from monarch_kernel.runtime.rpc.stores import StoreTable
from monarch_kernel.runtime.rpc.waits import Wait
from monarch_kernel.runtime.worker.executor import working

__all__ = ["Listener", "Runtime"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

Listener = Callable[["OutputEvent | RichEvent"], None]
NewHosts = Callable[["Collection[int]"], "Mapping[int, int]"]
"""Gives for each host agent that is gone another in its place; may take long."""

MAX_LISTENERS = 64
LISTEN_S = 1.0
RESTART_GRACE_S = 2.0
MAX_LISTEN_S = 0.3
"""Between two ticks the loop has listened for no longer than this: it may have been kept from it for a while."""


class Runtime:
    """Drives a `State` over a transport.

    Args:
        transport: the controller's end.
        token: what ranks and agents must present.
        output_wait_s: how long `close` waits, in seconds, for what idle ranks have written to arrive.
        epoch: how many controllers the ranks have had before this one; keeps numbers of requests apart.

    Attributes:
        resumed: cells of an earlier controller, each with the future of its answers.
        backlog: what ranks wrote before this controller attached.
        session: what owns it, if anything does.
        fleet: its hosts.
        silent: ranks that have not answered when `attach` returned.
        shared: what handles of one actor share, by its number.
        on_tick: called many times a second, with the time; by whoever leads.
    """

    def __init__(self, transport: HostTransport, token: str, output_wait_s: float = 0.0, epoch: int = 0) -> None:
        self._output_wait_s = output_wait_s
        self._refused = 0
        self._transport = transport
        self._listened_at = time.monotonic()
        self.on_tick: Callable[[float], None] = lambda now: None
        self.ports = PortTable()
        self.stores = StoreTable()
        self.exports = ExportTable(CONTROLLER_PROC)
        self.meters = transport.meters
        self.paths = data_paths_of(self)
        self.shared: MutableMapping[int, Any] = WeakValueDictionary()
        self.printer = OutputPrinter()
        self._state = State()
        for extension in self._state.extensions.values():
            extension.started(self.meters)
        self._token = token
        self._known: set[Peer] = {CONTROLLER}
        self._read_last: list[Frame] = []  # what `_split` has read last, if it was small
        self._read: Sequence[tuple[Message, Sequence[Frame]]] = ()
        self._new_hosts: dict[int, NewHosts] = {}
        self._epoch = epoch
        self._ids = numbers(epoch)
        self.resumed: list[tuple[Resumed, Future[Sequence[Answer]]]] = []
        self.backlog: list[BacklogEvent] = []
        self._missed: list[OutputEvent | RichEvent] = []
        self.silent: tuple[int, ...] = ()
        self._attached = Waiter()
        self._lock = threading.Lock()
        self._next_proc = CONTROLLER_PROC + 1
        self._futures: dict[int, Future[object]] = {}
        self._listeners: dict[int, Listener] = {}
        self._watchers: list[Callable[[object], None]] = []
        self._closed = False
        self._ended = threading.Event()
        self._over = False
        self._driver: Driver[Item] = Driver(
            transport, self._on_message, self._on_item, on_tick=self._on_tick, name="monarch-controller"
        )
        self.session: Any = None
        self.actor_server = LocalActorServer(self, self._driver)
        self.fleet = Fleet(self, self._state, transport)
        self._healer = Healer(self._state, self._request_for, self.actor_server.supervisor.respawned)
        self.faults = Faults(lambda: self.actor_server.supervisor.take(PROGRAM))
        self._driver.start()

    # -- for any thread

    def request(
        self,
        procs: Sequence[int],
        make: Callable[[int], Packed | Sequence[Packed]],
        note: str,
        finish: Callable[[Sequence[Answer]], T],
        rank: int | None = None,
        listen: Listener | None = None,
        quiet: bool = False,
        is_cell: bool = False,
        spawned: tuple[int, MakeSpawn] | None = None,
    ) -> Future[T]:
        """Ask ranks for one answer each.

        Args:
            procs: whom to ask.
            make: gives the message for a request id, or one for each rank.
            note: what the ranks do meanwhile, in the user's words.
            finish: makes the future's result of the answers.
            rank: for a future of one rank.
            listen: gets what the ranks write and display for it, also when it is over; must be quick, for it is called on
                the leading thread. Without it that is printed.
            quiet: whether nothing is written for it: what comes meanwhile belongs to the request before it.
            is_cell: whether the next controller wants the answers, too, where the ranks outlive this one.
            spawned: the actor that it makes, and what gives the message for processes that come in place of others.

        Raises:
            MeshDownError: the session was shut down.
        """
        if self._closed:
            raise MeshDownError("the session was shut down; start again with this_host() or %mesh up")
        id = next(self._ids)
        future = Future(self, id, finish, rank, note, procs)
        packed = make(id)
        if listen is not None:
            self._listen(id, listen)  # before anything can be written
        self._futures[id] = future  # type: ignore[assignment]
        ask = partial(self._state.request, id, procs, packed, note, quiet=quiet, is_cell=is_cell, spawned=spawned)
        self._driver.submit(ask)
        if self._over:
            self._abandon_all()  # closed meanwhile, perhaps before the request was handled
        return future

    def ask(
        self, procs: Sequence[int], make: Callable[[int], Packed], finish: Callable[[Sequence[Answer]], T]
    ) -> Future[T]:
        """Ask ranks something that they answer at once, whatever they are busy with; arguments as for `request`."""
        return self.promise(lambda id, now: self._state.ask(id, procs, make(id), now), finish)

    def promise(
        self, begin: Callable[[int, float], list[Effect]], finish: Callable[[Sequence[Answer]], T]
    ) -> Future[T]:
        """A future that something begins with the baton held, which is given its number and the time.

        Raises:
            MeshDownError: the session was shut down.
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
        """Answer a request that a rank, or this process itself, has made of an actor here."""
        self.enter(lambda now: self._state.answer_to(made_by(id), packed))

    def host_actors(self) -> None:
        """Have this process asked like a rank, from now on: actors are spawned here."""
        self.enter(lambda now: self._state.host_actors())

    def do(self, function: Callable[[], None]) -> None:
        """Have something done with the baton held, in order per thread."""

        def item(now: float) -> list[Effect]:
            function()
            return []

        self.enter(item)

    def spawned(self, actor: int, name: str, owner: int, procs: Sequence[int], mesh: object) -> None:
        """Say that a mesh of actors is about to be spawned in these processes."""
        self.actor_server.supervisor.spawned(actor, name, owner, procs, mesh)

    def stopped(self, actor: int, procs: Sequence[int]) -> None:
        """Say that actors are about to be stopped in these processes."""
        self.actor_server.supervisor.stopped(actor, procs)

    def tell(self, procs: Sequence[int], packed: Packed) -> None:
        """Send ranks a message that has no answer."""
        self.enter(lambda now: [*self._state.requests.tell(procs, packed)])

    def tell_all(self, packed: Packed) -> None:
        """Send every rank a message that has no answer."""
        ranks = self._state.ranks
        self.enter(
            lambda now: [*self._state.requests.tell([proc for proc in ranks if proc != CONTROLLER_PROC], packed)]
        )

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        """Wait until ``waiter`` is ready, driving the loop meanwhile."""
        executor = working.get()
        if executor is not None and executor.thread_id == threading.get_ident():
            return executor.wait(waiter, timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._driver.wait(waiter, timeout_s) and self._closed:
            # Another thread closes the session; in a moment it will have ended every future.
            self._ended.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return waiter.ready

    @property
    def asker(self) -> Runtime:
        """Itself: handles in the answers ask through it."""
        return self

    def interrupt(self, id: int, *, abort: bool = False) -> None:
        """Interrupt a request on the ranks that have not answered it; with ``abort``, at the cost of process groups."""
        self.enter(lambda now: [*self._state.requests.interrupt(id, abort=abort)])

    def interrupt_ranks(self, procs: Sequence[int], *, abort: bool = False) -> None:
        """Interrupt whatever these ranks run."""
        self.enter(lambda now: self._state.interrupt_ranks(procs, abort=abort))

    def cancel(self, id: int) -> None:
        """End a request for its caller and interrupt it on its ranks."""
        self.enter(partial(self._state.cancel, id))

    def linger(self, wait: Wait) -> float | None:
        """A wait lasts; for the thread that waits. Gives when to say so again, in seconds."""
        return None if self._closed else self.actor_server.linger(wait)

    def waiting_for(self, id: int) -> Sequence[int]:
        """The processes that have yet to answer a request; with the baton held."""
        return self._state.requests.waiting_for(id)

    def submit(self, do: Callable[[], object]) -> None:
        """Have something done with the baton held, soon."""

        def item(now: float) -> list[Effect]:
            do()
            return []

        self.enter(item)

    def attend(self, future: Future[object]) -> None:
        """Let features act for a thread that waits for a future that one of them has halted."""
        for extension in self._state.extensions.values():
            extension.awaited(future)

    def answers(self, id: int) -> list[Answer | None]:
        """What has been answered to a request so far, in the order of its ranks; empty if it is over."""
        return self._state.requests.answers(id)

    def owed(self, procs: Sequence[int]) -> list[list[int]]:
        """The requests that each of these processes has yet to answer."""
        records = [self._state.ranks.get(proc) for proc in procs]
        return [[] if record is None else list(record.owed) for record in records]

    @property
    def refused(self) -> int:
        """Connections and messages of those that do not belong to the session."""
        return self._refused + self._transport.refused

    def extension(self, kind: type[ExtensionT]) -> ExtensionT:
        """What a feature has added to the state.

        Raises:
            LookupError: the session began before the feature was imported.
        """
        extension = self._state.extensions.get(kind)
        if not isinstance(extension, kind):
            raise LookupError(f"{kind.__module__} was imported after the session began")
        return extension

    def run_on_io_thread(self, do: Callable[[], T]) -> T:
        """Have something done with the baton held, and wait for what it gives.

        Raises:
            MeshDownError: the session was shut down.
        """
        given: list[T] = []
        errors: list[Exception] = []
        done = Waiter()

        def item(now: float) -> list[Effect]:
            try:
                given.append(do())
            except Exception as error:  # it is the caller's
                errors.append(error)
            done.set()
            return []

        self.enter(item)
        self.wait(done, None)
        if errors:
            raise errors[0]
        if not given:
            raise MeshDownError("the session was shut down")
        return given[0]

    def attach(
        self,
        hosts: Mapping[int, Sequence[RankSpec]],
        handles: Mapping[int, HostHandle],
        timeout_s: float,
        *,
        lost_after_s: float | None = None,
        known: int = 0,
    ) -> bool:
        """Take up host agents and their ranks, which another controller has started; False if nobody answers.

        Args:
            hosts: the ranks of each.
            handles: of those that are on this machine.
            timeout_s: how long they may take, in seconds.
            lost_after_s: of those on other machines, after how many seconds of silence one is lost.
            known: hosts with smaller numbers belong to the session; should others than these be heard of they are told to end.
        """
        self.fleet.take_up(handles, max(known, *hosts) + 1)
        for extension in self._state.extensions.values():
            extension.adopting()
        attach = Attach(self._token, os.getpid(), self._epoch)

        def expect() -> None:
            for host in hosts:
                self._transport.route(host_peer(host), host)
            for host in set(range(1, known)) - set(hosts):
                self._transport.give_up(host)

        self.run_on_io_thread(expect)
        self.enter(partial(self._state.attach, hosts, attach, lost_after_s=lost_after_s))
        self.wait(self._attached, timeout_s)
        records = [self._state.hosts.get(host) for host in hosts]
        return any(record is not None and record.up for record in records)

    def listen(self, id: int, listen: Listener) -> None:
        """Hand on what the ranks write for a resumed cell; what came since this controller attached is there on return."""
        done = Waiter()

        def item(now: float) -> list[Effect]:
            self._listeners[id] = listen
            missed, self._missed = self._missed, []
            for event in missed:
                self._listeners.get(event.request, self.printer.take)(event)
            done.set()
            return []

        self.enter(item)
        self.wait(done, LISTEN_S)

    def specs(self, procs: Sequence[int]) -> tuple[RankSpec, ...]:
        """What these processes were started with."""
        return tuple(self._state.ranks[proc].spec for proc in procs)

    def incarnations(self, procs: Sequence[int]) -> tuple[int, ...]:
        """How many processes each of these places has had before the one of now."""
        records = [self._state.ranks.get(proc) for proc in procs]
        return tuple(0 if record is None else record.spec.incarnation for record in records)

    def start_ranks(self, host: int, specs: Sequence[RankSpec]) -> None:
        """Start processes on a host; returns at once."""
        self.enter(partial(self._state.processes.start, host, specs))

    def stop_ranks(
        self, procs: Sequence[int], reason: str, finish: Callable[[Sequence[Answer]], T], grace_s: float = 2.0
    ) -> Future[T]:
        """End processes. They are gone for the program at once; the future resolves when they have ended.

        Args:
            procs: which.
            reason: what those read who ask them later.
            finish: makes the future's result of an answer for each process, a `Failure` of one that is stuck.
            grace_s: how long they may take, in seconds, before they are killed.

        Raises:
            MeshDownError: the session was shut down.
        """

        def begin(id: int, now: float) -> list[Effect]:
            effects = self._state.processes.stop(procs, reason, grace_s, now)
            return effects + self._state.processes.await_ends(id, procs, grace_s, now)

        return self.promise(begin, finish)

    def heal(
        self,
        procs: Sequence[int],
        finish: Callable[[Healing], T],
        *,
        hosts: Mapping[int, int] | None = None,
        retire: str = "",
        grace_s: float = 0.0,
    ) -> Future[T]:
        """Start processes in place of those that are lost, and have them make the actors that were there.

        Args:
            procs: whose places; nothing is done about those that live, but those that are not up yet are waited for.
            finish: makes the future's result of what has become of it.
            hosts: for each host agent that has ended the one that has come in its place.
            retire: why those that live are ended, so that all are replaced; empty if they go on.
            grace_s: how long these have for that, in seconds, before they are killed.

        Raises:
            MeshDownError: the session was shut down.
        """
        if self._closed:
            raise MeshDownError("the session was shut down; start again with this_host() or %mesh up")
        id = next(self._ids)

        def over() -> None:
            # Of several that were killed together some are known to be dead later than others.
            left = [proc for proc in procs if proc not in healing.replaced and self._state.processes.is_lost(proc)]
            if left and not self.fleet.gone(left):
                self.perform(self._healer.heal(left, healing, {}, time.monotonic()))
            else:
                self._resolve(id)

        healing = Healing(over)
        future = Future(self, id, lambda _: finish(healing))
        self._futures[id] = future  # type: ignore[assignment]

        def item(now: float) -> list[Effect]:
            effects = self._state.processes.retire(procs, retire, grace_s, now) if retire else []
            return effects + self._healer.heal(procs, healing, hosts or {}, now)

        self._driver.submit(item)
        if self._over:
            self._abandon_all()
        return future

    def restart_when_lost(self, procs: Sequence[int], policy: RestartPolicy, new_hosts: NewHosts) -> None:
        """Have others take the places of these processes, which are a mesh, when they die.

        Args:
            procs: by rank.
            policy: when, and how often.
            new_hosts: gives others in place of host agents that have ended.
        """
        self._new_hosts.update(dict.fromkeys(procs, new_hosts))
        self.enter(lambda now: self._state.processes.restart_when_lost(procs, policy))

    def actor_ended(self, actor: int, proc: int) -> None:
        """An actor that was spawned here has died, in a process that lives; with the baton held."""
        self._state.requests.respawn_log.ended(actor, proc)

    def forget_spawn(self, actor: int, procs: Sequence[int]) -> None:
        """Those that come in place of these processes are not to have an actor."""
        self.submit(lambda: self._state.requests.respawn_log.forget(procs, actor))

    @property
    def closed(self) -> bool:
        """Whether the session is over."""
        return self._closed

    def new_procs(self, count: int) -> range:
        """Numbers for the places of a new mesh, one after the other: a rank knows those of its peers by its own."""
        with self._lock:
            first = self._next_proc
            self._next_proc += count
        return range(first, first + count)

    def new_number(self) -> int:
        """A number for a new actor or port, which says that this process has made it."""
        return next(self._ids)

    def watch(self, watcher: Callable[[object], None]) -> Callable[[], None]:
        """Have events handed to something quick, on the leading thread; returns a function that ends it."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher) if watcher in self._watchers else None

    def deaths(self, procs: Sequence[int]) -> dict[int, Failure]:
        """Which of these processes are dead or stopped, and how."""
        records = [self._state.ranks.get(proc) for proc in procs]
        return {record.spec.proc: record.death for record in records if record is not None and record.death is not None}

    def failures(self, procs: Sequence[int]) -> list[Failure | None]:
        """The last failure of each of these processes, if nothing that it did has succeeded since."""
        records = [self._state.ranks.get(proc) for proc in procs]
        return [None if record is None else record.failure for record in records]

    def names(self, procs: Sequence[int]) -> list[dict[str, str]]:
        """What each of these processes has told of its namespace: name -> what kind of thing it is."""
        records = [self._state.ranks.get(proc) for proc in procs]
        return [{} if record is None else record.names.copy() for record in records]

    def view(self, procs: Sequence[int], name: str, axes: dict[str, int], age_s: float) -> MeshView:
        """A mesh as it is now."""

        def engine_of(host: int) -> str | None:
            launcher = None if self.session is None else self.session.launcher_of(host)
            return None if launcher is None else launcher.name

        ranks = [self._state.ranks.get(proc) for proc in procs]
        strangers = self._transport.strangers
        now = time.monotonic()
        view = mesh_view(name, axes, ranks, self._state.hosts, engine_of, now, age_s, strangers)
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
        self.fleet.close(timeout_s)

    def leave(self) -> None:
        """End the loop; ranks and agents go on. Pending futures end with an error."""
        if self._closed:
            return
        self._await_output()
        self.enter(self._state.processes.leave_all)
        self._stop()
        self.fleet.settle()  # those in whose places others are

    def _stop(self) -> None:
        self._closed = True
        self.actor_server.close()
        self.paths.close()
        self._driver.close()
        self._over = True
        for extension in self._state.extensions.values():
            extension.closed()
        self._abandon_all()
        self._print()
        self.faults.tell_all()
        self._ended.set()

    def _await_output(self) -> None:
        """Let what idle ranks have written arrive before they are ended."""
        ranks = [record for record in list(self._state.ranks.values()) if record.spec.proc != CONTROLLER_PROC]
        idle = [record.spec.proc for record in ranks if record.state in ("idle", "failed")]
        if idle and self._output_wait_s:
            self.request(idle, lambda id: pack(Ping(id)), "", lambda answers: None).wait(self._output_wait_s)

    def _abandon_all(self) -> None:
        """End what was requested too late to be handled."""
        for id in list(self._futures):
            future = self._futures.pop(id, None)
            if future is not None:
                future.abandon(MeshDownError("the session was shut down before an answer came"))

    # -- with the baton held

    def enter(self, item: Item) -> None:
        """Have something done with the baton held, unless the session is over; the item gets the time."""
        if not self._closed:
            self._driver.submit(item)

    def _restart(self, due: RestartDue) -> None:
        """Carry out a restart that nobody waits for."""

        def restart(hosts: Mapping[int, int], now: float) -> list[Effect]:
            effects = self._state.processes.retire(due.procs, due.retire, RESTART_GRACE_S, now)
            return effects + self._healer.heal(due.procs, Healing(), hosts, now)

        def launch() -> None:
            hosts: Mapping[int, int] = {}
            try:
                hosts = new_hosts(gone)
            except MeshDownError:
                return
            except LaunchError:  # then they are lost once more, and so it is told
                _log.exception("no host in place of one that is gone")
            self.enter(lambda now: restart(hosts, now))

        gone = self.fleet.gone(due.procs)
        if not gone:
            self.perform(restart({}, time.monotonic()))  # at once: nobody else may find a dead rank there
            return
        # An agent is a new process, which the thread that drives the loop must not wait for.
        new_hosts = self._new_hosts[due.procs[0]]
        threading.Thread(target=launch, name="monarch-restart", daemon=True).start()

    def _request_for(self, answered: Callable[[Sequence[Answer]], None]) -> int:
        """The number of a request that is made with the baton held, and who is given its answers."""
        future: Future[Sequence[Answer]] = Future(self, next(self._ids), lambda answers: answers)
        self._futures[future.id] = future  # type: ignore[assignment]
        future.add_done_callback(lambda: None if self._over else answered(future.get(0)))
        return future.id

    def _resolve(self, id: int) -> None:
        """End a future that is not answered by ranks alone."""
        if (future := self._futures.pop(id, None)) is not None:
            future.resolve((), True)

    def _on_item(self, item: Item) -> None:
        self.perform(item(time.monotonic()))

    def _on_message(self, peer: Peer, parts: list[Frame]) -> None:
        now = time.monotonic()
        try:
            for message, frames in self._split(parts):
                if peer not in self._known and not self._admit(peer, message):
                    self._refused += 1
                    return
                if type(message) in FOR_ACTORS:
                    if self._has_actors(peer, message):
                        self.actor_server.hear(message, frames, peer)
                    else:
                        self._refused += 1
                elif type(message) is ClockRead:
                    self._heard_clock(peer, message)
                else:
                    self.perform(self._state.heard(message, frames, peer, now))
                    if type(message) is HostHello:
                        self._ask_for_clock(message.host)
        except WireError:
            self._refused += 1

    def _has_actors(self, peer: Peer, message: Any) -> bool:
        """Whether it comes from a process with actors, which agents have not, and is about one that somebody here has made."""
        maker = made_by(getattr(message, "actor", CONTROLLER_PROC))
        return (peer == CONTROLLER or is_rank(peer)) and (maker == CONTROLLER_PROC or maker in self._state.ranks)

    def _split(self, parts: list[Frame]) -> Iterable[tuple[Message, Sequence[Frame]]]:
        """Take a message apart; one that several ranks have sent (`Relay`) comes once for each of them, and is read once."""
        if len(parts) != 1:
            return split(parts)
        if parts is not self._read_last:
            self._read = tuple(split(parts))
            self._read_last = parts
        return self._read

    def _ask_for_clock(self, host: int) -> None:
        record = self._state.hosts.get(host)
        if record is not None and record.is_elsewhere and not record.gone:
            self._driver.send(host_peer(host), pack(ReadClock(time.time())))

    def _heard_clock(self, peer: Peer, message: ClockRead) -> None:
        for record in self._state.hosts.values():
            if host_peer(record.host) == peer:
                record.clock = Clock.read(message.sent, message.at, time.time())

    def _admit(self, peer: Peer, message: object) -> bool:
        """Whether a stranger presents the token, under its own name."""
        self._driver.catch_up()  # it may be somebody whom we expect since a moment ago
        if isinstance(message, Hello):
            good = message.proc in self._state.ranks and peer == self._state.ranks[message.proc].peer
        elif isinstance(message, HostHello):
            good = message.host in self._state.hosts and peer == host_peer(message.host)
        else:
            return False
        if good and message.token == self._token:
            self._known.add(peer)
            if isinstance(message, Hello):
                if message.shares:
                    self._transport.share(peer)
                incarnation = incarnation_of(peer)
                self._known.difference_update(rank_peer(message.proc, former) for former in range(incarnation))
                self.actor_server.supervisor.up(Process(message.proc, incarnation))
            return True
        return False

    def perform(self, effects: list[Effect]) -> None:
        """Carry out what the state has decided; with the baton held."""
        for effect in effects:
            if type(effect) is Send:
                self._driver.send(effect.peer, effect.packed)
            elif type(effect) is Resolve:
                if self.printer.holds(effect.id):
                    self._print()  # what was printed before a request ended is shown before it ends
                future = self._futures.pop(effect.id, None)
                if future is not None:
                    future.resolve(effect.answers, effect.in_step)
            elif type(effect) is Tell:
                if isinstance(effect.event, OutputEvent | RichEvent):
                    self._listeners.get(effect.event.request, self.printer.take)(effect.event)
                elif isinstance(effect.event, BacklogEvent):
                    self.backlog.append(effect.event)
                for watcher in list(self._watchers):
                    try:
                        watcher(effect.event)
                    except Exception:  # a view must not stop the loop
                        _log.exception("a watcher failed")
            elif type(effect) is Gone:
                self._transport.forget(rank_peer(effect.proc, effect.incarnation))
                supervisor = self.actor_server.supervisor
                known = supervisor.gone(Process(effect.proc, effect.incarnation), effect.death)
                if not known and not effect.is_reported and not self._closed:
                    self.faults.add(MeshFailure(effect.mesh, {effect.rank: effect.death}))
            elif type(effect) is Halt:
                if (halted := self._futures.get(effect.id)) is not None:
                    halted.halt()
            elif type(effect) is Later:
                threading.Thread(target=self._do_later, args=[effect], name="monarch-later", daemon=True).start()
            elif type(effect) is Resumed:
                answers: Future[Sequence[Answer]] = Future(self, effect.id, lambda answers: answers)
                self._futures[effect.id] = answers  # type: ignore[assignment]
                self.resumed.append((effect, answers))
                self._listeners[effect.id] = self._miss  # until somebody listens
            elif type(effect) is RestartDue:
                self._restart(effect)
            elif type(effect) is Attached:
                self.silent = effect.silent
                self._attached.set()
            elif type(effect) is Route:
                self._transport.route(effect.peer, effect.host)
            elif type(effect) is GiveUp:
                self._transport.give_up(effect.host)
            elif type(effect) is Expired:
                if effect.procs:
                    log = self.fleet.log_tail(effect.host)
                    self.perform(self._state.processes.give_up(effect.host, effect.procs, log, time.monotonic()))
                else:
                    self.fleet.expired(effect.host, effect.reason)

    def _do_later(self, later: Later) -> None:
        effects = later.work()
        self.enter(lambda now: effects)

    def _miss(self, event: OutputEvent | RichEvent) -> None:
        self._missed.append(event)

    def _listen(self, id: int, listen: Listener) -> None:
        """Remember who listens to a request; of those that are over, the latest."""
        for old in list(self._listeners)[: max(0, len(self._listeners) + 1 - MAX_LISTENERS)]:
            if old not in self._futures:
                self._listeners.pop(old, None)
        self._listeners[id] = listen

    def _print(self) -> None:
        try:
            self.printer.flush()
        except (OSError, ValueError):  # nobody can read it any more: stdout is closed
            _log.debug("output of ranks could not be printed", exc_info=True)

    def _on_tick(self, now: float) -> None:
        self._print()
        listened_s = min(now - self._listened_at, MAX_LISTEN_S)
        self._listened_at = now
        self.perform([*self._state.hosts.expire(self._transport.heard(), listened_s)])
        self.perform(self._state.tick(now))
        self.fleet.look()
        self.on_tick(now)
