"""The state of the controller, which turns events into effects. No I/O, no threads, no clock.

Theory of operation
===================

Every method takes an event and returns its effects: messages to send, requests that resolve, events for the view. Time and ids
are arguments. The runtime performs the effects.

`runtime.rpc.requests` says how requests resolve. If a rank is lost, a failure answers all requests that it has not answered.
Answers that no request waits for are counted and dropped.

The program can use a rank before its process is up: messages to it wait here, in order, until it says hello. So a call need not
wait for its spawn, and the order per (controller, rank) is kept. The same holds for host agents.

Output comes from the host agent; results and displays come from the rank. `OutputOrder` brings them into order.

`State.attach` adopts the host agent and the ranks of a mesh that outlived its controller (see `Resumption`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from sys import intern
from typing import Any

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import CONTROLLER, Peer, host_peer, is_rank, proc_of, rank_peer
from monarch_kernel.net.wire.codec import Frame, Packed, pack
from monarch_kernel.net.wire.messages import (
    Attach,
    Backlog,
    CleansUp,
    Detached,
    Failed,
    Goodbye,
    Hello,
    HostEnding,
    HostHello,
    Interrupt,
    LogRead,
    Lost,
    Message,
    Names,
    Output,
    RankSpec,
    Readings,
    Result,
    Rich,
    Software,
    WatchProcess,
)
from monarch_kernel.runtime.controller.adoption import Resumption
from monarch_kernel.runtime.controller.allowed_senders import Senders
from monarch_kernel.runtime.controller.effects import (
    Attached,
    Effect,
    RichEvent,
    Tell,
)
from monarch_kernel.runtime.controller.extensions import Extension, ExtensionT, make_extensions
from monarch_kernel.runtime.controller.group_counts import GroupCounts
from monarch_kernel.runtime.controller.host_compatibility import refusal
from monarch_kernel.runtime.controller.host_requests import HostRequests
from monarch_kernel.runtime.controller.host_tree import Hosts
from monarch_kernel.runtime.controller.output_order import Spoken
from monarch_kernel.runtime.controller.output_router import OutputRouter
from monarch_kernel.runtime.controller.process_records import HostRecord, RankRecord
from monarch_kernel.runtime.controller.process_status import Introductions
from monarch_kernel.runtime.controller.processes import RankProcesses, find_routes
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC
from monarch_kernel.runtime.rpc.requests import Pending, Requests, Resolve, Send
from monarch_kernel.runtime.rpc.respawn_log import MakeSpawn, SpawnRecord

__all__ = ["State"]

ATTACH_HOST_S = 10.0
ATTACH_RANKS_S = 5.0
MAX_NAMES = 4_000
MAX_NAME = 400

_HELD = (Result, Failed, Rich, Output)
"""Messages that wait until all ranks of an earlier controller have reported their open requests; so do those of extensions."""


_Handler = Callable[[Any, Sequence[Frame], Peer, float], list[Effect]]


class State:
    """The controller's state.

    Attributes:
        hosts: By number.
        ranks: By number; the current process, or the last.
        extensions: The parts of features, by their class.
        dropped_messages: The number of messages that were dropped because nothing expected them.
        software: The versions that the controller runs, which hosts on other machines must match; None to compare nothing.
    """

    def __init__(self) -> None:
        self.hosts = Hosts()
        self.ranks: dict[int, RankRecord] = {}
        self.requests = Requests(self.ranks)
        self.dropped_messages = 0
        self.software: Software | None = None
        self._connected: dict[Peer, RankRecord] = {}
        self._resumption: Resumption | None = None
        self.extensions = make_extensions(self)
        each = self.extensions.values()
        self._extended = {kind: one for one in each for kind in (*one.handlers, *one.in_order)}
        self._in_order: dict[type, Callable[[RankRecord, Any, float], list[Effect]]] = {
            kind: handle for one in each for kind, handle in one.in_order.items()
        }
        self._at_ends = [  # only those that override it, as this runs for each answer
            one.request_ended
            for kind, one in self.extensions.items()
            if kind.request_ended is not Extension.request_ended
        ]
        self.host_requests = HostRequests(self.hosts)
        self._group_counts = GroupCounts(self.ranks)
        self._introductions = Introductions(self.ranks, self.hosts, self._connected)
        self._output = OutputRouter(self.ranks, self.requests, self._accept, self._accept_answers)
        self.processes = RankProcesses(
            self.ranks,
            self.hosts,
            self.requests,
            self._connected,
            self.host_requests,
            self._introductions,
            self._output,
            self._answer,
            self._process_lost,
        )
        self._senders = Senders(self.ranks, self.hosts, self._connected, self.host_requests, self._extended)
        self._handlers: dict[type[Message], _Handler] = {
            Backlog: self._handle_backlog,
            CleansUp: self._handle_cleans_up,
            Failed: self._handle_in_order,
            Hello: self._handle_hello,
            HostEnding: self._handle_host_ending,
            HostHello: self._handle_host_hello,
            LogRead: lambda message, frames, peer, now: self.host_requests.answered(message.id, message.data),
            Lost: lambda message, frames, peer, now: self.processes.ended(message, now),
            WatchProcess: lambda message, frames, peer, now: self._introductions.meet(message.proc, peer),
            Names: self._handle_names,
            Detached: lambda message, frames, peer, now: self.host_requests.answered(message.id, b""),
            Output: lambda message, frames, peer, now: self._output.write(message, now),
            Readings: self._handle_readings,
            Result: self._handle_in_order,
            Rich: self._handle_in_order,
        }

    # -- for extensions

    @property
    def n_sent(self) -> int:
        """The number of requests and messages to ranks that the program has made."""
        return self.requests.n_sent

    @property
    def n_open(self) -> int:
        """The number of requests that ranks have yet to answer."""
        return len(self.requests)

    def owing(self, id: int) -> list[int]:
        """The processes that have not answered a request yet."""
        return [proc for proc, rank in self.ranks.items() if id in rank.open_requests]

    def to_rank(self, proc: int, packed: Packed) -> list[Effect]:
        """Send a message to a rank when it is up, if it lives."""
        return [*self.ranks[proc].send(packed)]

    def to_host(self, host: int, packed: Packed) -> list[Effect]:
        """Send a message to a host agent, when it is up."""
        return [*self.hosts[host].send(packed)]

    # -- what the program wants

    def attach(
        self,
        hosts: Mapping[int, Sequence[RankSpec]],
        attach: Attach,
        now: float,
        *,
        lost_after_s: float | None = None,
    ) -> list[Effect]:
        """Adopt host agents and ranks that another controller has started; ``lost_after_s`` as for `Hosts.add`."""
        effects: list[Effect] = []
        peers: list[Peer] = []
        for host, specs in hosts.items():
            self.hosts.add(host, now, timeout_s=ATTACH_HOST_S, lost_after_s=lost_after_s)
            for spec in specs:
                never = float("inf")  # it may be in native code for long
                self.ranks[spec.proc] = RankRecord(spec, host, deadline=never, is_adopted=True)
            effects += find_routes(self.hosts[host], specs)
            peers += [host_peer(host), *(self.ranks[spec.proc].peer for spec in specs)]
        self._resumption = Resumption(pack(attach), peers, now + ATTACH_RANKS_S)
        return effects + [Send(peer, self._resumption.packed) for peer in peers]

    def spawn_again(self, id: int, record: SpawnRecord, procs: Sequence[int], now: float) -> list[Effect]:
        """Have new processes spawn an actor that the processes before them had."""
        dead = [proc for proc in record.procs if self.ranks[proc].death is not None]
        packed = self.requests.respawn_log.again(record, id, procs, dead)
        return self.request(id, procs, packed, record.description, now)

    def host_actors(self) -> list[Effect]:
        """Let requests reach the actors in the controller's own process, as if it were a rank."""
        if CONTROLLER_PROC not in self.ranks:
            spec = RankSpec(CONTROLLER_PROC, 0, 1, 0, 1, (), "this process", "cpu", 0, {}, "", ())
            record = RankRecord(spec, host=0, up=True, peer=CONTROLLER)
            self.ranks[CONTROLLER_PROC] = self._connected[CONTROLLER] = record
        return []

    def answer_to(self, proc: int, packed: Packed) -> list[Effect]:
        """Answer a request that a rank has sent to an actor here."""
        record = self.ranks.get(proc)
        if record is None or (record.death is not None and not record.is_retiring):
            return []
        return [Send(record.peer, packed)]

    def request(
        self,
        id: int,
        procs: Sequence[int],
        packed: Packed | Sequence[Packed],
        description: str,
        now: float,
        *,
        quiet: bool = False,
        is_cell: bool = False,
        spawned: tuple[int, MakeSpawn] | None = None,
    ) -> list[Effect]:
        """Request one answer from each of these ranks; arguments as for `Requests.request`."""
        if not self.ranks.keys() >= set(procs):  # they belong to a session that is over
            unknown = Failure(
                "stopped", "NotSent", "its session was shut down; start again with this_host() or %mesh up"
            )
            return [Resolve(id, [unknown] * len(procs), True)]
        keepers = procs if is_cell and procs and self.ranks[procs[0]].spec.record else ()
        for proc in procs if is_cell else ():
            self.ranks[proc].last_line = ""  # a view shows the line beside the new cell
        return [
            *self.requests.request(
                id, procs, packed, description, now, quiet=quiet, is_cell=is_cell, keepers=keepers, spawned=spawned
            )
        ]

    def ask(self, id: int, procs: Sequence[int], packed: Packed, now: float) -> list[Effect]:
        """Request something that ranks answer at once, even if they are busy, and that does not count as work.

        For ranks that are not up, a failure answers.
        """
        self.requests.add(id, Pending(procs))
        effects: list[Effect] = []
        absent: list[tuple[int, Failure]] = []
        for proc in procs:
            record = self.ranks[proc]
            if record.death is None and record.up:
                record.out_of_band.add(id)
                effects.append(Send(record.peer, packed))
            else:
                absent.append((proc, record.death or Failure("stopped", "NotSent", "the rank is not up yet")))
        for proc, failure in absent:
            effects += self._answer(id, (proc,), failure, now, is_still_open=True)
        return effects

    def interrupt_ranks(self, procs: Iterable[int], *, abort: bool = False) -> list[Effect]:
        """Interrupt all requests that these ranks run or have queued; idle ranks are left alone."""
        effects: list[Effect] = []
        for proc in procs:
            record = self.ranks[proc]
            if record.death is None and record.up:
                effects += [Send(record.peer, pack(Interrupt(id, abort))) for id in record.open_requests]
            elif record.death is None:
                record.held += [pack(Interrupt(id, abort)) for id in record.open_requests]
        return effects

    def cancel(self, id: int, now: float) -> list[Effect]:
        """End a request for the caller, and interrupt it on the ranks."""
        effects: list[Effect] = [*self.requests.interrupt(id)]
        cancelled = Failure("interrupted", "CancelledError", "cancelled by the caller")
        return effects + self._answer(id, self.requests.waiting_for(id), cancelled, now, is_still_open=True)

    # -- what happens

    def extension(self, kind: type[ExtensionT]) -> ExtensionT:
        """Return the part of a feature; raises LookupError if the session started before the feature was imported."""
        extension = self.extensions.get(kind)
        if not isinstance(extension, kind):
            raise LookupError(
                f"{kind.__module__} was imported after the session began: import it before the first this_host() or %mesh up"
            )
        return extension

    def handle(self, message: Message, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        """Handle a message of an authenticated peer; messages that it may not send are counted and dropped."""
        if type(message) is Result or type(message) is Failed:  # first, for these are by far the most
            rank = self._connected.get(peer)
            if rank is not None and self._resumption is None:
                return self._output.answered((rank,), message, frames, now)
        if not self._senders.may_send(peer, message):
            self.dropped_messages += 1
            return []
        extension = self._extended.get(type(message))
        if (
            self._resumption is not None
            and not self._resumption.is_over
            and (extension is not None or isinstance(message, _HELD))
        ):
            self._resumption.hold(peer, message, frames)
            return []
        if extension is not None:
            record = self.ranks[proc_of(peer)]
            if type(message) in self._in_order:
                return self._output.say(record, message, frames, now)  # type: ignore[arg-type]
            return extension.handlers[type(message)](record, message, now)
        return self._handlers[type(message)](message, frames, peer, now)

    def handle_answers(
        self, message: Result | Failed, frames: Sequence[Frame], peers: Sequence[Peer], now: float
    ) -> list[Effect]:
        """Handle an answer that each of these authenticated peers has given."""
        ranks = [rank for peer in peers if (rank := self._connected.get(peer)) is not None]
        if len(ranks) == len(peers) and self._resumption is None:
            return self._output.answered(ranks, message, frames, now)
        return [effect for peer in peers for effect in self.handle(message, frames, peer, now)]

    def tick(self, now: float) -> list[Effect]:
        """Do what is due; call this a few times a second."""
        effects: list[Effect] = []
        if self._resumption is not None:
            effects += [Send(peer, self._resumption.packed) for peer in self._resumption.asks(now)]
            effects += self._resume(now)
            if self._resumption.is_over and not self._resumption.waiting:
                self._resumption = None
        effects += self._output.tick(now)
        effects += self.requests.release_waiting(now)
        effects += self.processes.tick(now)
        for extension in self.extensions.values():
            effects += extension.tick(now)
        return effects

    @property
    def is_settled(self) -> bool:
        """Whether nothing is due soon, so that `tick` may be called less often."""
        is_here = not any(host.is_elsewhere for host in self.hosts.values())
        return is_here and self._resumption is None and self._output.is_settled and self.processes.is_settled

    # -- inside

    def _refusal(self, host: HostRecord) -> str:
        """Say why a new host can't be used; empty if it can."""
        if not host.is_elsewhere or host.software is None or self.software is None:
            return ""
        return refusal(self.software, host.software)

    def _rename(self, incarnations: Iterable[tuple[int, int]]) -> list[Effect]:
        """Expect the current incarnations, which may be newer than those in the description of the mesh."""
        assert self._resumption is not None
        effects: list[Effect] = []
        for proc, incarnation in incarnations:
            record = self.ranks[proc]
            if record.spec.incarnation != incarnation:
                former = record.peer
                record.spec = record.spec.succeeded(incarnation)
                record.peer = rank_peer(proc, incarnation)
                self._resumption.renamed(former, record.peer)
                effects += find_routes(self.hosts[record.host], [record.spec])
        return effects

    def _accept(self, record: RankRecord, message: Spoken, frames: Sequence[Frame], now: float) -> list[Effect]:
        """Handle a message of a rank after the output before it."""
        if isinstance(message, Result | Failed):
            return self._accept_answers((record,), message, frames, now)
        if isinstance(message, Rich):
            request = message.id or record.last_request
            record.order.shown(message)
            return [Tell(RichEvent(request, record.spec.rank, message.data, message.metadata, record.spec.mesh))]
        return self._in_order[type(message)](record, message, now)

    def _accept_answers(
        self, records: Sequence[RankRecord], message: Result | Failed, frames: Sequence[Frame], now: float
    ) -> list[Effect]:
        """Handle an answer that these ranks have given, after the output before it."""
        procs = [record.spec.proc for record in records]
        if (pending := self.requests.get(message.id)) is not None:
            pending.compare(procs, message.collectives, message.unmatched)
        if message.groups != -1:
            self._group_counts.report(records, message.groups)
        if message.group_size != -1:
            for record in records:
                record.group_size = message.group_size if message.collectives != -2 else -2
        if isinstance(message, Failed):
            return self._answer(message.id, procs, message.failure, now)
        return self._answer(message.id, procs, Value(message.payload, frames, message.bundle), now)

    def _answer(
        self, id: int, procs: Sequence[int], answer: Answer, now: float, *, is_still_open: bool = False
    ) -> list[Effect]:
        failure = answer if isinstance(answer, Failure) else None
        is_quiet = self.requests.is_quiet(id)
        for proc in procs:
            record = self.ranks[proc]
            record.out_of_band.discard(id)
            if is_still_open or record.open_requests.pop(id, None) is None:
                continue
            record.busy_since = now
            if failure is not None and record.death is None:
                self.requests.respawn_log.refused(id, proc)
            if is_quiet:
                continue
            record.last_request = id
            record.last_error, record.failure = "", None
            if failure is not None and failure.kind in ("exception", "lost"):  # interrupted and released ranks are well
                record.last_error, record.failure, record.failed_at = failure.headline(), failure, now
        effects: list[Effect] = []
        for request_ended in self._at_ends:
            effects += request_ended(procs, id)
        resolved, n_late = self.requests.answer_all(id, procs, answer, now)
        self.dropped_messages += n_late
        return [*effects, *resolved, *self._group_counts.align()]

    def _resume(self, now: float) -> list[Effect]:
        """Resume work if all ranks have reported their open requests, or the time is up."""
        resumption = self._resumption
        assert resumption is not None
        if not resumption.is_due(now):
            return []
        cells, early = resumption.finish()
        effects: list[Effect] = []
        for cell in cells:
            pending = self.requests.add(cell.id, Pending(cell.procs, is_cell=True, keepers=cell.procs))
            if self.requests.dead:  # others may wait in a collective for a rank that died meanwhile
                pending.failed_at = now
            effects.append(cell)
        effects.append(Attached(tuple(proc_of(peer) for peer in resumption.waiting if is_rank(peer))))
        for peer, message, frames in early:
            effects += self.handle(message, frames, peer, now)
        return effects

    def _handle_in_order(self, message: Spoken, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        return self._output.say(self.ranks[proc_of(peer)], message, frames, now)

    def _handle_hello(self, message: Hello, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        record = self.ranks[message.proc]
        record.up, record.pid, record.device = True, message.pid, message.device
        record.address = message.address
        record.up_at = record.up_at or now - message.up_s
        self._connected[peer] = record
        record.busy_since = now
        held, record.held = record.held, []
        effects: list[Effect] = [Send(peer, packed) for packed in held]
        effects += self._introductions.announce(record)
        if self._resumption is not None:
            if message.open_requests:
                record.open_requests = {
                    **{one.id: one.description for one in message.open_requests},
                    **record.open_requests,
                }
                record.busy_since = now - message.open_requests[0].age_s
            self._resumption.reported(peer, message.open_requests)
            effects += self._resume(now)
        return effects

    def _handle_host_hello(self, message: HostHello, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        host = self.hosts[message.host]
        if host.gone:  # it was given back before it came up
            return [Send(peer, pack(Goodbye()))]
        host.up, host.hostname, host.pid = True, message.hostname, message.pid
        host.cpus, host.gpus = message.cpus, message.gpus
        host.addresses, host.software = message.addresses, message.software
        if why := self._refusal(host):
            goodbye = Send(host_peer(host.host), pack(Goodbye()))
            return [goodbye, *self.processes.host_gone(host.host, f"can't be used: {why}", (), now)]
        effects = self._rename(message.incarnations) if self._resumption is not None else []
        self.processes.host_is_up(message.host, now)
        held, host.held = host.held, []
        if (join := self.hosts.place(host)) is not None:
            held.insert(0, pack(join))
        return [*effects, *(Send(peer, packed) for packed in held), *self.host_requests.resolve_awaited()]

    def _handle_host_ending(self, message: HostEnding, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        self.hosts[int(peer[1:])].is_ending = True
        return []

    def _handle_readings(self, message: Readings, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        for reading in message.ranks:
            self.ranks[reading.proc].reading = reading
        self.hosts[int(peer[1:])].refused_connections = message.refused_connections
        return []

    def _handle_cleans_up(self, message: CleansUp, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        self.ranks[proc_of(peer)].cleans_up = True
        return []

    def _handle_backlog(self, message: Backlog, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        effects = self._output.catch_up(message)
        if self._resumption is not None:
            self._resumption.settled(peer)
            effects += self._resume(now)
        return effects

    def _handle_names(self, message: Names, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        names = self.ranks[proc_of(peer)].names
        for name in message.removed:
            names.pop(name, None)
        for name, kind in message.changed.items():
            if len(name) + len(kind) <= MAX_NAME and (name in names or len(names) < MAX_NAMES):
                names[intern(name)] = intern(kind)  # most ranks have the same
        return []

    def _process_lost(self, record: RankRecord, now: float) -> list[Effect]:
        """Call the parts that keep something of a process."""
        effects: list[Effect] = []
        if self._resumption is not None:
            self._resumption.settled(record.peer)
            effects += self._resume(now)
        for extension in self.extensions.values():
            effects += extension.process_lost(record.spec.proc)
        return effects
