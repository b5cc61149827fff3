"""What the controller knows, and what follows from each thing it hears: no I/O, no threads, no clock.

Theory of operation
===================

Every method takes something that happened and returns the effects: messages to send, requests that are now resolved, events
to tell the view. Time and ids are arguments. The runtime carries the effects out.

`runtime.rpc.requests` says how requests resolve. A rank that is lost answers all that it owes with a failure. Answers that no
request waits for are counted and dropped.

A rank may be addressed before its process is up: what is sent to it waits here, in order, until it says hello. Hence spawn
and call need no waiting between them, and order per (controller, rank) is kept. The same holds for host agents.

Output comes from the host agent, results and displays come from the rank; `OutputOrder` has them taken in their order.

In the place of a rank that has died another process can be started (`State.heal`): the same number, which handles hold, a
record and a name on the wire (`Peer`) of its own. So nothing that was meant for the one, or comes from it, is taken for the
other's. A rank that is to be replaced while it lives is first given up, and has ended when its host agent says so; only then
the next one is started, so nobody ever has to tell apart two that run.

The host agent and ranks of a mesh that outlived its controller are taken up with `State.attach` (see `Resumption`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from sys import intern
from typing import Any, NamedTuple

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.base.text import last_line
from monarch_kernel.errors import Failure, format_ranks
from monarch_kernel.net.transport.base import CONTROLLER, Peer, host_peer, is_rank, proc_of, rank_peer
from monarch_kernel.net.wire.codec import Frame, Packed, pack
from monarch_kernel.net.wire.messages import (
    Attach,
    Backlog,
    CleansUp,
    Failed,
    Goodbye,
    Hello,
    HostHello,
    Interrupt,
    KillRanks,
    LogRead,
    Lost,
    Meet,
    Message,
    Names,
    Outlive,
    Outlives,
    Output,
    OutputChunk,
    Payload,
    PeerNews,
    RankSpec,
    Readings,
    Release,
    Result,
    Rich,
    Software,
    StartRanks,
)
from monarch_kernel.runtime.controller.adoption import Resumption
from monarch_kernel.runtime.controller.effects import (
    Attached,
    BacklogEvent,
    Due,
    Effect,
    Expired,
    GiveUp,
    Gone,
    LostEvent,
    RichEvent,
    Route,
    Tell,
)
from monarch_kernel.runtime.controller.endings import ENDING_S, Endings
from monarch_kernel.runtime.controller.exit_reasons import describe_exit, signal_name
from monarch_kernel.runtime.controller.extensions import Extension, make_extensions
from monarch_kernel.runtime.controller.host_compatibility import refusal
from monarch_kernel.runtime.controller.host_tree import Hosts
from monarch_kernel.runtime.controller.output_order import Said, Spoken
from monarch_kernel.runtime.controller.records import HostRecord, RankRecord
from monarch_kernel.runtime.controller.restarts import RestartPolicy, Restarts
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC
from monarch_kernel.runtime.rpc.requests import Pending, Requests, Resolve, Send
from monarch_kernel.runtime.rpc.respawn_log import MakeSpawn, SpawnRecord

__all__ = ["State"]

HOST_DEADLINE_S = 30.0
RANK_DEADLINE_S = 120.0
ATTACH_HOST_S = 10.0
ATTACH_RANKS_S = 5.0
CLEANUP_S = 2.0
MAX_NAMES = 4_000

_OF_RANKS = (Rich, Names, Meet, CleansUp)
"""What a rank may say of itself, besides answers and what is handled by extensions."""

_HELD = (Result, Failed, Rich, Output)
"""What waits until all ranks of an earlier controller have said what they owe, as do messages that extensions handle."""


_Handler = Callable[[Any, Sequence[Frame], Peer, float], list[Effect]]


class _Mesh(NamedTuple):
    """Processes, in the order of their ranks, that are restarted when they die."""

    procs: tuple[int, ...]
    restarts: Restarts


class State:
    """The controller's state.

    Attributes:
        hosts: by number.
        ranks: by number of the place; those who are there now, or were last.
        extensions: the parts of features, by their class.
        strays: how much was dropped that nobody expected.
        software: what the controller runs, with which that of other machines has to agree; None to compare nothing.
    """

    def __init__(self) -> None:
        self.hosts = Hosts()
        self.ranks: dict[int, RankRecord] = {}
        self.requests = Requests(self.ranks)
        self.strays = 0
        self._coming: set[int] = set()  # those that may not be up; `tick` looks at nobody else
        self._unsettled: set[int] = set()  # those of whom something waits in their order; the same
        self._speakers: dict[Peer, RankRecord] = {}
        self._resumption: Resumption | None = None
        self._for_hosts: dict[int, tuple[int, ...]] = {}
        self._of_hosts: dict[int, int] = {}
        self._endings = Endings()
        self.software: Software | None = None
        self._restarts: dict[int, _Mesh] = {}
        self.extensions = make_extensions(self)
        each = self.extensions.values()
        self._extended = {kind: one for one in each for kind in (*one.handlers, *one.in_order)}
        self._in_order: dict[type, Callable[[RankRecord, Any, float], list[Effect]]] = {
            kind: handle for one in each for kind, handle in one.in_order.items()
        }
        self._at_ends = [  # few, as each answer to a request passes them
            one.request_ended
            for kind, one in self.extensions.items()
            if kind.request_ended is not Extension.request_ended
        ]
        self._handlers: dict[type[Message], _Handler] = {
            Backlog: self._heard_backlog,
            CleansUp: self._heard_cleans_up,
            Failed: self._heard_answer,
            Hello: self._heard_hello,
            HostHello: self._heard_host_hello,
            LogRead: self._heard_log,
            Lost: self._heard_lost,
            Meet: self._heard_meet,
            Names: self._heard_names,
            Outlives: self._heard_outlives,
            Output: self._heard_output,
            Readings: self._heard_readings,
            Result: self._heard_answer,
            Rich: self._heard_in_order,
        }

    # -- for extensions

    def owing(self, id: int) -> list[int]:
        """The processes that have yet to answer a request."""
        return [proc for proc, rank in self.ranks.items() if id in rank.owed]

    def to_rank(self, proc: int, packed: Packed) -> list[Effect]:
        """Send a message to a rank, if it lives."""
        record = self.ranks[proc]
        return [] if record.death is not None else [Send(record.peer, packed)]

    def to_host(self, host: int, packed: Packed) -> list[Effect]:
        """Send a message to a host agent, when it is up."""
        return self._to_host(self.hosts[host], packed)

    # -- what the program wants

    def add_host(
        self, host: int, now: float, *, timeout_s: float | None = None, lost_after_s: float | None = None
    ) -> list[Effect]:
        """Expect a host agent to come up; on another machine, if it is said after which silence it is lost, in seconds."""
        record = self.hosts[host] = HostRecord(
            host, deadline=now + (HOST_DEADLINE_S if timeout_s is None else timeout_s)
        )
        if lost_after_s is not None:
            record.is_elsewhere, record.lost_after_s = True, lost_after_s
        return []

    def succeed_host(self, host: int, successor: int) -> list[Effect]:
        """A host agent has come in place of one that is gone."""
        self.hosts[host].successor = successor
        return []

    def host_now(self, host: int) -> int:
        """The number of the host agent that is in this one's place now."""
        while (record := self.hosts.get(host)) is not None and record.successor:
            host = record.successor
        return host

    def release_host(self, host: int, reason: str, grace_s: float, now: float) -> list[Effect]:
        """End a host agent, and its ranks: it is needed no more."""
        record = self.hosts[host]
        ranks = [proc for proc, rank in self.ranks.items() if rank.host == host and rank.death is None]
        effects = self.stop_ranks(ranks, reason, grace_s, now)
        if record.up and not record.gone:
            effects.append(Send(host_peer(host), pack(Goodbye(grace_s=grace_s))))
        record.gone, record.end = True, Failure("stopped", "Released", reason, host=record.hostname)
        record.held.clear()
        effects += self._endings.ended([proc for proc, rank in self.ranks.items() if rank.host == host])
        return [*effects, *self._end_questions(host), *self._tell_of_hosts()]

    def ask_host(self, id: int, host: int, packed: Packed, now: float) -> list[Effect]:
        """Ask a host agent for one answer."""
        record = self.hosts[host]
        if record.gone or not record.up:
            return [Resolve(id, [record.end or Failure("lost", "HostNotUp", "the host is not up")], True)]
        self._of_hosts[id] = host
        return [Send(host_peer(host), packed)]

    def outlive(self, id: int, host: int, keep_s: float, now: float) -> list[Effect]:
        """Have a host agent and its ranks outlive this controller; it answers when it has come up."""
        record = self.hosts[host]
        if record.gone:
            return [Resolve(id, [record.end or Failure("lost", "HostNotUp", "the host is not up")], True)]
        self._of_hosts[id] = host
        return self._to_host(record, pack(Outlive(id, keep_s)))

    def _end_questions(self, host: int) -> list[Effect]:
        """A host has ended, and answers nothing any more."""
        ids = [id for id, asked in self._of_hosts.items() if asked == host]
        for id in ids:
            del self._of_hosts[id]
        end = self.hosts[host].end
        return [Resolve(id, [end], True) for id in ids if end is not None]

    def listened(self, heard: Container[int], for_s: float) -> list[Effect]:
        """These hosts were heard of in the last so many seconds, in which we have listened."""
        effects: list[Effect] = []
        for record in self.hosts.listened(heard, for_s):
            name = record.hostname or f"host {record.host}"
            why = f"nothing was heard of {name} for {record.silence_s:.1f} s: it has died, or the network to it is cut"
            effects.append(Expired(record.host, reason=why))
        return effects

    def await_hosts(self, id: int, hosts: Sequence[int], now: float) -> list[Effect]:
        """Resolve a request when each of these host agents is up or gone."""
        self._for_hosts[id] = tuple(hosts)
        return self._tell_of_hosts()

    def _tell_of_hosts(self) -> list[Effect]:
        effects: list[Effect] = []
        for id, hosts in list(self._for_hosts.items()):
            records = [self.hosts[host] for host in hosts]
            if all(record.up or record.gone for record in records):
                del self._for_hosts[id]
                effects.append(Resolve(id, [record.end or Value(Payload(), (), {}) for record in records], True))
        return effects

    def start_ranks(self, host: int, specs: Sequence[RankSpec], now: float) -> list[Effect]:
        """Start processes on a host."""
        record = self.hosts[host]
        for spec in specs:
            self.ranks[spec.proc] = RankRecord(spec, host, deadline=now + RANK_DEADLINE_S)
        effects = self._routes(record, specs)
        self._coming.update(spec.proc for spec in specs)
        if record.gone:
            for spec in specs:
                effects += self._lose(self.ranks[spec.proc], "the host agent is gone", now)
            return effects
        return effects + self._to_host(record, pack(StartRanks(tuple(specs))))

    @staticmethod
    def _routes(host: HostRecord, specs: Iterable[RankSpec]) -> list[Effect]:
        """Say how processes are reached that are elsewhere."""
        if not host.is_elsewhere:
            return []
        return [Route(rank_peer(spec.proc, spec.incarnation), host.host) for spec in specs]

    def attach(
        self,
        hosts: Mapping[int, Sequence[RankSpec]],
        attach: Attach,
        now: float,
        *,
        lost_after_s: float | None = None,
    ) -> list[Effect]:
        """Take up host agents and their ranks, which another controller has started; ``lost_after_s`` as for `add_host`."""
        effects: list[Effect] = []
        peers: list[Peer] = []
        for host, specs in hosts.items():
            self.add_host(host, now, timeout_s=ATTACH_HOST_S, lost_after_s=lost_after_s)
            for spec in specs:
                never = float("inf")  # it may be in native code for long
                self.ranks[spec.proc] = RankRecord(spec, host, deadline=never, is_adopted=True)
            effects += self._routes(self.hosts[host], specs)
            peers += [host_peer(host), *(self.ranks[spec.proc].peer for spec in specs)]
        self._resumption = Resumption(pack(attach), peers, now + ATTACH_RANKS_S)
        return effects + [Send(peer, self._resumption.packed) for peer in peers]

    def restart_when_lost(self, procs: Sequence[int], policy: RestartPolicy) -> list[Effect]:
        """Have others take the places of these processes, which are a mesh, when they die (`Due`)."""
        mesh = _Mesh(tuple(procs), Restarts(policy, range(len(procs))))
        self._restarts.update(dict.fromkeys(procs, mesh))
        return []

    def spawn_again(self, id: int, record: SpawnRecord, procs: Sequence[int], now: float) -> list[Effect]:
        """Have processes that replace others make an actor that was there."""
        dead = [proc for proc in record.procs if self.ranks[proc].death is not None]
        packed = self.requests.respawn_log.again(record, id, procs, dead)
        return self.request(id, procs, packed, record.note, now)

    def is_lost(self, proc: int) -> bool:
        """Whether a rank has died, and was not stopped: another can take its place."""
        record = self.ranks[proc]
        return record.death is not None and not record.stopping

    def heal(self, procs: Sequence[int], now: float, hosts: Mapping[int, int] | None = None) -> list[Effect]:
        """Start processes in place of those that are lost; what is sent to these numbers from now on waits for them.

        ``hosts`` has for each host agent that is gone the one that those are to be on which were there.
        """
        starts: dict[int, list[RankSpec]] = {}
        effects: list[Effect] = []
        for proc in procs:
            if not self.is_lost(proc):
                continue
            former = self.ranks[proc]
            if (mesh := self._restarts.get(proc)) is not None:
                mesh.restarts.forget(former.spec.rank)
            spec = former.spec.succeeded(former.spec.incarnation + 1)
            at = former.host
            if self.hosts[at].gone:
                at = (hosts or {}).get(at, at)
            record = self.ranks[proc] = RankRecord(spec, at, deadline=now + RANK_DEADLINE_S, watchers=former.watchers)
            self._speakers.pop(former.peer, None)
            self.requests.dead.discard(proc)
            effects += self._routes(self.hosts[at], (spec,))
            self._coming.add(proc)
            if self.hosts[at].gone:
                effects += self._lose(record, "the host agent is gone", now)
            elif former.has_ended or self.hosts[former.host].gone:
                starts.setdefault(at, []).append(spec)
            else:
                record.former = former.former or former
        for at, specs in starts.items():
            effects += self._to_host(self.hosts[at], pack(StartRanks(tuple(specs))))
        return effects

    def retire(self, procs: Iterable[int], why: str, grace_s: float, now: float) -> list[Effect]:
        """End processes that others shall replace (`heal`); they are lost from now on, which is news to nobody."""
        effects: list[Effect] = []
        by_host: dict[int, list[int]] = {}
        for proc in procs:
            record = self.ranks[proc]
            if record.death is None:
                by_host.setdefault(record.host, []).append(proc)
                effects += self._lose(record, why, now, asked=True)
        for host, ended in by_host.items():
            effects += self._to_host(self.hosts[host], pack(KillRanks(tuple(ended), grace_s, True)))
        return effects

    def host_actors(self) -> list[Effect]:
        """Be asked like a rank: the controller's own process has actors."""
        if CONTROLLER_PROC not in self.ranks:
            spec = RankSpec(CONTROLLER_PROC, 0, 1, 0, 1, (), "this process", "cpu", 0, {}, "", ())
            record = RankRecord(spec, host=0, up=True, peer=CONTROLLER)
            self.ranks[CONTROLLER_PROC] = self._speakers[CONTROLLER] = record
        return []

    def answer_to(self, proc: int, packed: Packed) -> list[Effect]:
        """Answer a request that a rank has made of an actor here."""
        record = self.ranks.get(proc)
        return [] if record is None or record.death is not None else [Send(record.peer, packed)]

    def request(
        self,
        id: int,
        procs: Sequence[int],
        packed: Packed | Sequence[Packed],
        note: str,
        now: float,
        *,
        quiet: bool = False,
        is_cell: bool = False,
        spawned: tuple[int, MakeSpawn] | None = None,
    ) -> list[Effect]:
        """Ask ranks for one answer each; arguments as for `Requests.request`."""
        if not self.ranks.keys() >= set(procs):  # of a session that is over
            unknown = Failure("stopped", "NotSent", "there is no such process in this session")
            return [Resolve(id, [unknown] * len(procs), True)]
        keepers = procs if is_cell and procs and self.ranks[procs[0]].spec.record else ()
        return [
            *self.requests.request(
                id, procs, packed, note, now, quiet=quiet, is_cell=is_cell, keepers=keepers, spawned=spawned
            )
        ]

    def ask(self, id: int, procs: Sequence[int], packed: Packed, now: float) -> list[Effect]:
        """Ask ranks something that they answer at once, whatever they are busy with, and that does not count as work.

        Ranks that are not up answer that they are not.
        """
        self.requests.add(id, Pending(procs))
        effects: list[Effect] = []
        absent: list[tuple[int, Failure]] = []
        for proc in procs:
            record = self.ranks[proc]
            if record.death is None and record.up:
                record.asides.add(id)
                effects.append(Send(record.peer, packed))
            else:
                absent.append((proc, record.death or Failure("stopped", "NotSent", "the rank is not up yet")))
        for proc, failure in absent:
            effects += self._answer(id, proc, failure, now, still_owed=True)
        return effects

    def interrupt_ranks(self, procs: Iterable[int], *, abort: bool = False) -> list[Effect]:
        """Interrupt whatever these ranks run or have queued; an idle rank is not touched."""
        effects: list[Effect] = []
        for proc in procs:
            record = self.ranks[proc]
            if record.death is None and record.up:
                effects += [Send(record.peer, pack(Interrupt(id, abort))) for id in record.owed]
            elif record.death is None:
                record.held += [pack(Interrupt(id, abort)) for id in record.owed]
        return effects

    def cancel(self, id: int, now: float) -> list[Effect]:
        """End a request for the caller, and interrupt it on the ranks."""
        effects: list[Effect] = [*self.requests.interrupt(id)]
        cancelled = Failure("interrupted", "CancelledError", "cancelled by the caller")
        for proc in self.requests.waiting_for(id):
            effects += self._answer(id, proc, cancelled, now, still_owed=True)
        return effects

    def stop_ranks(self, procs: Iterable[int], reason: str, grace_s: float, now: float) -> list[Effect]:
        """End processes; what they owe is answered now, and whoever asks them later reads the reason."""
        effects: list[Effect] = []
        by_host: dict[int, list[int]] = {}
        for proc in procs:
            record = self.ranks[proc]
            if record.death is None or not record.stopping:
                by_host.setdefault(record.host, []).append(proc)  # the agent keeps the logs of the dead until then
            record.stopping = True
            self.requests.respawn_log.forget((proc,))
            self._restarts.pop(proc, None)
            if record.death is not None:
                record.death = replace(record.death, kind="stopped")  # nobody will come in its place
            else:
                stopped = Failure("stopped", "Stopped", reason, host=self._hostname(record))
                effects += self._bury(record, stopped, now, True)
        for host, ended in by_host.items():
            effects += self._to_host(self.hosts[host], pack(KillRanks(tuple(ended), grace_s)))
        return effects

    def await_ends(self, id: int, procs: Sequence[int], grace_s: float, now: float) -> list[Effect]:
        """Resolve a request when each of these processes, which `stop_ranks` was told of, has ended."""
        left = [proc for proc in procs if not self._has_ended(proc)]
        return self._endings.add(id, procs, left, now + grace_s + ENDING_S)

    def _has_ended(self, proc: int) -> bool:
        """Whether there is no process; an agent that is not up yet has started none."""
        if proc == CONTROLLER_PROC:
            return True
        record = self.ranks[proc]
        host = self.hosts[record.host]
        return record.has_ended or host.gone or not host.up

    def goodbye(self, now: float, grace_s: float = 0.0) -> list[Effect]:
        """End all ranks and agents; those whose actors clean up are given some time for it."""
        why = "the session was shut down"
        tidy = [proc for proc, rank in self.ranks.items() if rank.cleans_up and rank.death is None]
        theirs = [proc for proc in self.ranks if proc != CONTROLLER_PROC and proc not in tidy]
        effects = self.stop_ranks(theirs, why, grace_s, now)
        if tidy:
            grace_s = max(grace_s, CLEANUP_S)
            effects += self.stop_ranks(tidy, why, grace_s, now)
        for record in self.hosts.values():
            effects += self._to_host(record, pack(Goodbye(grace_s=grace_s)))
        return effects

    def leave(self, now: float) -> list[Effect]:
        """Leave all ranks and agents to the next controller."""
        effects: list[Effect] = []
        for record in self.hosts.values():
            effects += self._to_host(record, pack(Goodbye(keep=True)))
        return effects

    # -- what happens

    def heard(self, message: Message, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        """A message of an authenticated peer arrived; what that peer has no business to say is counted and dropped."""
        if type(message) is Result or type(message) is Failed:  # first, for these are by far the most
            rank = self._speakers.get(peer)
            if rank is not None and self._resumption is None:
                return self._after_output(rank, message, frames, now)
        if not self._may_say(peer, message):
            self.strays += 1
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
                return self._after_output(record, message, frames, now)  # type: ignore[arg-type]
            return extension.handlers[type(message)](record, message, now)
        return self._handlers[type(message)](message, frames, peer, now)

    def host_gone(
        self, host: int, reason: str, log: tuple[str, ...], now: float, etype: str = "HostLost"
    ) -> list[Effect]:
        """A host agent ended, or was never heard of; its ranks went with it."""
        self.hosts[host].gone = True
        self.hosts[host].end = Failure("lost", etype, reason, last_lines=log)
        effects: list[Effect] = [GiveUp(host), *self._end_questions(host), *self._tell_of_hosts()]
        effects += [Send(host_peer(other), pack(part)) for other, part in self.hosts.part(host)]
        lost = [record for record in self.ranks.values() if record.host == host]
        for record in lost:
            record.has_ended = True
            record.former = None
            if record.death is None:
                effects += self._lose(record, reason, now, log)
        gone = {record.peer for record in lost}  # of some the others heard as they went
        effects = [effect for effect in effects if not (isinstance(effect, Send) and effect.peer in gone)]
        effects += self._endings.ended([record.spec.proc for record in lost])
        return effects + self._due(now)

    def give_up_ranks(self, host: int, procs: Sequence[int], log: tuple[str, ...], now: float) -> list[Effect]:
        """Ranks did not come up in time; should they still come, they are ended."""
        effects: list[Effect] = []
        what = f"the host agent is up, but this rank was not forked from the zygote within {RANK_DEADLINE_S:.0f} s"
        for proc in procs:
            if self.ranks[proc].death is None:
                effects += self._lose(self.ranks[proc], what, now, log)
        return effects + self._to_host(self.hosts[host], pack(KillRanks(tuple(procs), 0.0, True))) + self._due(now)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: call this a few times a second."""
        effects: list[Effect] = []
        if self._resumption is not None:
            effects += [Send(peer, self._resumption.packed) for peer in self._resumption.asks(now)]
            effects += self._go_on(now)
            if self._resumption.is_over and not self._resumption.waiting:
                self._resumption = None
        for proc in list(self._unsettled):
            record = self.ranks[proc]
            effects += self._take(record, record.order.due(now), now)
            if record.order.is_empty:
                self._unsettled.discard(proc)
        effects += self.requests.release_waiting(now)
        for host in self.hosts.values():
            if not host.up and not host.gone and now >= host.deadline:
                effects.append(Expired(host.host))
        late: dict[int, list[int]] = {}
        for proc in list(self._coming):
            record = self.ranks[proc]
            if record.up or record.death is not None:
                self._coming.discard(proc)
            elif self.hosts[record.host].up and now >= record.deadline:
                late.setdefault(record.host, []).append(proc)
        effects += [Expired(host, tuple(procs)) for host, procs in late.items()]
        effects += self._endings.due(now) + self._due(now)
        for extension in self.extensions.values():
            effects += extension.tick(now)
        return effects

    # -- inside

    def _may_say(self, peer: Peer, message: Message) -> bool:
        """Whether a rank speaks for itself, or a host agent for itself and the ranks it was given."""
        if peer == CONTROLLER:  # we ourselves, where we have actors
            return isinstance(message, (Result, Failed)) and peer in self._speakers
        if is_rank(peer):
            number = proc_of(peer)
            if number not in self.ranks or self.ranks[number].peer != peer:  # who is in its place now is another
                return False
            if isinstance(message, Hello):
                return message.proc == number
            if isinstance(message, (Result, Failed)):
                return peer in self._speakers
            extension = self._extended.get(type(message))
            return isinstance(message, _OF_RANKS) if extension is None else extension.may_send(number, message)
        number = int(peer[1:])
        if isinstance(message, HostHello):
            procs = [proc for proc, _ in message.incarnations]
            if message.host != number or number not in self.hosts:
                return False
        elif isinstance(message, (Output, Backlog)):
            procs = [chunk.proc for chunk in message.chunks]
            procs += [proc for chunk in message.chunks for proc, _ in chunk.also]
        elif isinstance(message, Readings):
            procs = [reading.proc for reading in message.ranks]
        elif isinstance(message, Lost):
            procs = [message.proc]
        elif isinstance(message, LogRead | Outlives):
            return self._of_hosts.get(message.id, number) == number
        else:
            return False
        return all(proc in self.ranks and self.ranks[proc].host == number for proc in procs)

    def _refusal(self, host: HostRecord) -> str:
        """Why a host that has come can't be used; empty if it can."""
        if not host.is_elsewhere or host.software is None or self.software is None:
            return ""
        return refusal(self.software, host.software)

    def _rename(self, incarnations: Iterable[tuple[int, int]]) -> list[Effect]:
        """Expect those who are there now, and not those who were there when the mesh was described to us."""
        assert self._resumption is not None
        effects: list[Effect] = []
        for proc, incarnation in incarnations:
            record = self.ranks[proc]
            if record.spec.incarnation != incarnation:
                former = record.peer
                record.spec = record.spec.succeeded(incarnation)
                record.peer = rank_peer(proc, incarnation)
                self._resumption.renamed(former, record.peer)
                effects += self._routes(self.hosts[record.host], [record.spec])
        return effects

    def _hostname(self, record: RankRecord) -> str:
        return self.hosts[record.host].hostname

    def _to_host(self, record: HostRecord, packed: Packed) -> list[Effect]:
        if record.up:
            return [Send(host_peer(record.host), packed)]
        if not record.gone:
            record.held.append(packed)
        return []

    def _after_output(self, record: RankRecord, message: Spoken, frames: Sequence[Frame], now: float) -> list[Effect]:
        """Take what a rank says when what it wrote before has come."""
        order = record.order
        if record.death is None and order.is_early(message.written):
            order.hold(message, frames, now)
            self._unsettled.add(record.spec.proc)
            return []
        effects = self._accept(record.spec.proc, message, frames, now)
        return effects if order.is_settled else effects + self._take(record, order.settle(), now)

    def _take(self, record: RankRecord, items: Iterable[Said | OutputChunk], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for item in items:
            if isinstance(item, Said):
                effects += self._accept(record.spec.proc, item.message, item.frames, now)
            else:
                effects += self._tell_output(record, item)
        return effects

    def _accept(self, proc: int, message: Spoken, frames: Sequence[Frame], now: float) -> list[Effect]:
        if isinstance(message, Result | Failed):
            if (pending := self.requests.get(message.id)) is not None:
                pending.compare(proc, message.collectives)
            if isinstance(message, Failed):
                return self._answer(message.id, proc, message.failure, now)
            return self._answer(message.id, proc, Value(message.payload, frames, message.bundle), now)
        record = self.ranks[proc]
        if isinstance(message, Rich):
            request = message.id or record.last_request
            record.order.shown(message)
            return [Tell(RichEvent(request, record.spec.rank, message.data, message.metadata, record.spec.mesh))]
        return self._in_order[type(message)](record, message, now)

    def _answer(self, id: int, proc: int, answer: Answer, now: float, *, still_owed: bool = False) -> list[Effect]:
        record = self.ranks[proc]
        record.asides.discard(id)
        note = None if still_owed else record.owed.pop(id, None)
        if note is not None:
            record.busy_since = now
        if note is not None and isinstance(answer, Failure) and record.death is None:
            self.requests.respawn_log.refused(id, proc)
        if note is not None and not self.requests.is_quiet(id):
            record.last_request = id
            record.last_error, record.failure = "", None
            if isinstance(answer, Failure) and answer.kind in (
                "exception",
                "lost",
            ):  # interrupted and released ranks are well
                record.last_error, record.failure = answer.headline(), answer
        effects: list[Effect] = []
        for request_ended in self._at_ends:
            effects += request_ended(proc, id)
        resolved = self.requests.answer(id, proc, answer, now)
        if resolved is None:
            self.strays += 1
            return effects
        return effects + resolved

    def _go_on(self, now: float) -> list[Effect]:
        """Go on with what was resumed, if all have said what they have or the time is up."""
        resumption = self._resumption
        assert resumption is not None
        if not resumption.is_due(now):
            return []
        cells, early = resumption.finish()
        effects: list[Effect] = []
        for cell in cells:
            pending = self.requests.add(cell.id, Pending(cell.procs, is_cell=True, keepers=cell.procs))
            if self.requests.dead:  # they may wait in a collective for one that died meanwhile
                pending.failed_at = now
            effects.append(cell)
        effects.append(Attached(tuple(proc_of(peer) for peer in resumption.waiting if is_rank(peer))))
        for peer, message, frames in early:
            effects += self.heard(message, frames, peer, now)
        return effects

    def _heard_answer(self, message: Result | Failed, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        return self._after_output(self._speakers[peer], message, frames, now)

    def _heard_in_order(self, message: Spoken, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        return self._after_output(self.ranks[proc_of(peer)], message, frames, now)

    def _heard_hello(self, message: Hello, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        record = self.ranks[message.proc]
        record.up, record.pid, record.device = True, message.pid, message.device
        record.address = message.address
        self._speakers[peer] = record
        record.busy_since = now
        held, record.held = record.held, []
        effects: list[Effect] = [Send(peer, packed) for packed in held]
        effects += self._tell_watchers(record)
        if self._resumption is not None:
            if message.owed:
                record.owed = {**{one.id: one.note for one in message.owed}, **record.owed}
                record.busy_since = now - message.owed[0].age_s
            self._resumption.told(peer, message.owed)
            effects += self._go_on(now)
        return effects

    def _heard_host_hello(self, message: HostHello, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        host = self.hosts[message.host]
        if host.gone:  # it was given back before it came
            return [Send(peer, pack(Goodbye()))]
        host.up, host.hostname, host.pid = True, message.hostname, message.pid
        host.cpus, host.gpus = message.cpus, message.gpus
        host.addresses, host.software = message.addresses, message.software
        if why := self._refusal(host):
            goodbye = Send(host_peer(host.host), pack(Goodbye()))
            return [goodbye, *self.host_gone(host.host, f"can't be used: {why}", (), now)]
        effects = self._rename(message.incarnations) if self._resumption is not None else []
        for rank in self.ranks.values():
            if rank.host == message.host and not rank.up and not rank.is_adopted:
                rank.deadline = now + RANK_DEADLINE_S  # until now there was nobody to start it
        held, host.held = host.held, []
        if (join := self.hosts.place(host)) is not None:
            held.insert(0, pack(join))
        return [*effects, *(Send(peer, packed) for packed in held), *self._tell_of_hosts()]

    def _heard_readings(self, message: Readings, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        for reading in message.ranks:
            self.ranks[reading.proc].reading = reading
        self.hosts[int(peer[1:])].strangers = message.strangers
        return []

    def _heard_cleans_up(self, message: CleansUp, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        self.ranks[proc_of(peer)].cleans_up = True
        return []

    def _heard_log(self, message: LogRead, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        return self._host_answered(message.id, message.data)

    def _heard_outlives(self, message: Outlives, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        return self._host_answered(message.id, b"")

    def _host_answered(self, id: int, data: bytes) -> list[Effect]:
        asked = self._of_hosts.pop(id, None)
        return [] if asked is None else [Resolve(id, [Value(Payload(data), (), {})], True)]

    def _heard_backlog(self, message: Backlog, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        for chunk in message.chunks:
            self.ranks[chunk.proc].order.caught_up(chunk)
        ranks = {chunk.proc: self.ranks[chunk.proc].spec.rank for chunk in message.chunks}
        effects: list[Effect] = [Tell(BacklogEvent(tuple(chunk for chunk in message.chunks if chunk.text), ranks))]
        if self._resumption is not None:
            self._resumption.heard(peer)
            effects += self._go_on(now)
        return effects

    def _heard_output(self, message: Output, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for chunk in (chunk for folded in message.chunks for chunk in folded.of_each()):
            record = self.ranks[chunk.proc]
            if record.former is not None:  # the next one has not been started
                effects += self._tell_output(record.former, chunk)
                continue
            effects += self._take(record, record.order.wrote(chunk, now), now)
            if not record.order.is_empty:
                self._unsettled.add(chunk.proc)
        return effects

    def _heard_names(self, message: Names, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        names = self.ranks[proc_of(peer)].names
        for name in message.removed:
            names.pop(name, None)
        for name, kind in message.changed.items():
            if name in names or len(names) < MAX_NAMES:
                names[intern(name)] = intern(kind)  # most ranks have the same
        return []

    def _heard_meet(self, message: Meet, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        """A rank has something to ask another: tell it now, if that one is up or has ended, and whenever that changes."""
        proc = message.proc
        record = self.ranks.get(proc)
        if record is None:
            nobody = Failure("lost", "NoSuchRank", f"this session has no process {proc}")
            return [Send(peer, pack(PeerNews(proc, 0, "", nobody)))]
        if peer not in self._speakers:  # it has ended meanwhile
            return []
        record.watchers[peer] = None
        return self._news_for(peer, record) if record.up or record.death is not None else []

    def _tell_watchers(self, record: RankRecord) -> list[Effect]:
        gone = [peer for peer in record.watchers if self._speakers.get(peer) is None]
        for peer in gone:
            del record.watchers[peer]
        return [effect for peer in record.watchers for effect in self._news_for(peer, record)]

    def _news_for(self, peer: Peer, record: RankRecord) -> list[Effect]:
        """Tell one process of another: where that is, or how it has ended."""
        spec, asking = record.spec, self._speakers[peer].host
        effects: list[Effect] = []
        address = record.address
        if asking != record.host and record.death is None:
            address = ""
            for host, reach in self.hosts.introduce(asking, record.host, record.peer):
                effects.append(Send(host_peer(host), pack(reach)))
        news = PeerNews(spec.proc, spec.incarnation, address, record.death, record.is_replaced, spec.mesh, spec.rank)
        return [*effects, Send(peer, pack(news))]

    def _tell_output(self, record: RankRecord, chunk: OutputChunk) -> list[Effect]:
        if not chunk.text and not chunk.dropped_lines:  # only a mark
            return []
        request = chunk.request or self._writer(record)
        record.last_line = last_line(chunk.text) or record.last_line
        spec = record.spec
        return [Tell(OutputEvent(request, spec.rank, chunk.stream, chunk.text, chunk.dropped_lines, spec.mesh))]

    def _writer(self, record: RankRecord) -> int:
        """The request that what a rank writes now is taken for: its cell, even if actors work beside it; else the oldest."""
        owed = [id for id in record.owed if not self.requests.is_quiet(id)]
        return next((id for id in owed if self.requests.is_cell(id)), owed[0] if owed else record.last_request)

    def _heard_lost(self, message: Lost, frames: Sequence[Frame], peer: Peer, now: float) -> list[Effect]:
        record = self.ranks[message.proc]
        if record.former is not None:
            record.former = None
            if record.death is None:
                return self._to_host(self.hosts[record.host], pack(StartRanks((record.spec,))))
        record.has_ended = True
        effects = self._endings.ended((message.proc,))
        if record.death is not None:
            return effects
        what = describe_exit(message.exit_code, message.signal, message.rss_nbytes or record.reading.rss_nbytes)
        exit_code = None if message.signal or message.reason else message.exit_code
        effects += self._lose(
            record, message.reason or what, now, message.last_lines, exit_code, signal_name(message.signal)
        )
        return effects + self._due(now)

    def _lose(
        self,
        record: RankRecord,
        what: str,
        now: float,
        last_lines: tuple[str, ...] = (),
        exit_code: int | None = None,
        signal: str = "",
        *,
        asked: bool = False,
    ) -> list[Effect]:
        effects = self._take(record, record.order.end(), now)  # it had said so before it died
        note = next(filter(None, record.owed.values()), "")
        text = f"{what}; it was running {note}" if note and record.up else what
        mesh = self._restarts.get(record.spec.proc)
        record.is_replaced = asked
        if mesh is not None and not asked:
            record.is_replaced, follows = mesh.restarts.died(record.spec.rank, now)
            text = f"{text}; {follows}" if follows else text
        etype = "RankDied" if record.up or record.is_adopted else "RankNotStarted"
        host = self._hostname(record)
        failure = Failure(
            "lost", etype, text, host=host, pid=record.pid, last_lines=last_lines, exit_code=exit_code, signal=signal
        )
        effects += self._bury(record, failure, now, record.is_replaced)
        if not asked:
            effects.append(Tell(LostEvent(record.spec.mesh, record.spec.rank, failure)))
        return effects

    def _due(self, now: float) -> list[Effect]:
        """The restarts whose time has come."""
        effects: list[Effect] = []
        for mesh in {id(mesh): mesh for mesh in self._restarts.values()}.values() if self._restarts else ():
            ranks = mesh.restarts.due(now)
            procs = tuple(mesh.procs[rank] for rank in ranks)
            lost = [rank for rank, proc in zip(ranks, procs) if self.is_lost(proc)]
            if lost:  # else somebody has healed it meanwhile
                effects.append(Due(procs, f"ended, for {format_ranks(lost)} died and the mesh is restarted"))
        return effects

    def _bury(self, record: RankRecord, failure: Failure, now: float, asked: bool) -> list[Effect]:
        spec, is_told = record.spec, asked or bool(record.owed or record.watchers)
        told = replace(failure, kind="stopped") if asked else failure
        record.death = failure
        self.requests.dead.add(record.spec.proc)
        record.held.clear()
        record.names.clear()
        self._speakers.pop(record.peer, None)
        effects: list[Effect] = self._tell_watchers(record)
        effects.append(Gone(spec.proc, spec.incarnation, spec.mesh, spec.rank, told, is_told))
        if self._resumption is not None:
            self._resumption.heard(record.peer)
            effects += self._go_on(now)
        for extension in self.extensions.values():
            effects += extension.process_lost(spec.proc)
        for id in [*record.owed, *record.asides]:
            effects += self._answer(id, record.spec.proc, failure, now)
            if not asked:
                effects += self.requests.tell_waiting(id, pack(Release(id, spec.mesh, spec.rank)))
        record.last_error = "" if record.stopping else failure.headline()
        record.failure = None if record.stopping else failure
        return effects
