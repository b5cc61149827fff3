"""The life of ranks and host agents, as the controller directs it: start, stop, loss and replacement. No I/O, no clock.

Theory of operation
===================

Another process can replace a rank that has died (`RankProcesses.heal`). It has the same number, which handles hold, but its own
record and name on the wire (`Peer`). So a message for the one, or from it, is never taken for a message of the other. To
replace a live rank, the controller first gives it up (`RankProcesses.retire`). A rank has ended when its host agent says so,
and only then does its successor start. So two processes of one number never run at the same time.

If a rank is lost, its death answers all requests that it has not answered. Other ranks that work on the same request leave
their collectives at once: no collective with a dead rank ever ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from monarch_kernel.errors import Failure, format_ranks
from monarch_kernel.net.transport.base import Peer, host_peer, rank_peer
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import Goodbye, KillRanks, Lost, RankSpec, Release, StartRanks
from monarch_kernel.runtime.controller.effects import (
    Effect,
    Expired,
    GiveUp,
    HostGone,
    LostEvent,
    RestartDue,
    Route,
    Tell,
)
from monarch_kernel.runtime.controller.exit_reasons import describe_exit, signal_name
from monarch_kernel.runtime.controller.exit_waits import EXIT_WAIT_S, ExitWaits
from monarch_kernel.runtime.controller.host_requests import HostRequests
from monarch_kernel.runtime.controller.host_tree import Hosts
from monarch_kernel.runtime.controller.output_router import OutputRouter
from monarch_kernel.runtime.controller.process_records import HostRecord, RankRecord
from monarch_kernel.runtime.controller.process_status import Introductions
from monarch_kernel.runtime.controller.restart_policy import RestartPolicy, Restarts
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC
from monarch_kernel.runtime.rpc.requests import Requests, Send

__all__ = ["RANK_DEADLINE_S", "RankProcesses", "find_routes"]

RANK_DEADLINE_S = 120.0
CLEANUP_S = 2.0
_NOT_STARTED = "its host agent has ended, so it was not started"


class _Mesh(NamedTuple):
    """RankProcesses, in the order of their ranks, that are restarted when they die."""

    procs: tuple[int, ...]
    restarts: Restarts


class RankProcesses:
    """Starts, ends and replaces the processes of a session; mappings are owned by the caller.

    Args:
        ranks: By number of the process.
        hosts: The hosts.
        requests: The requests of the controller.
        connected: The ranks that have said hello and have not ended.
        host_requests: Requests to host agents.
        introductions: News for ranks.
        output: Messages and output of ranks.
        answer: Takes the answer of a process to a request.
        lost: Called with each process that is lost, before its requests are answered.
    """

    def __init__(
        self,
        ranks: dict[int, RankRecord],
        hosts: Hosts,
        requests: Requests,
        connected: dict[Peer, RankRecord],
        host_requests: HostRequests,
        introductions: Introductions,
        output: OutputRouter,
        answer: Callable[[int, Sequence[int], Failure, float], list[Effect]],
        lost: Callable[[RankRecord, float], list[Effect]],
    ) -> None:
        self._ranks = ranks
        self._hosts = hosts
        self._requests = requests
        self._connected = connected
        self._host_requests = host_requests
        self._introductions = introductions
        self._output = output
        self._answer = answer
        self._lost = lost
        self._coming: set[int] = set()  # processes that may not be up; `tick` looks only at these
        self._endings = ExitWaits()
        self._restarts: dict[int, _Mesh] = {}

    # -- ranks

    def start(self, host: int, specs: Sequence[RankSpec], now: float, *, view: int = 0) -> list[Effect]:
        """Start processes on a host, through a view of the hosts."""
        record = self._hosts[host]
        for spec in specs:
            self._ranks[spec.proc] = RankRecord(spec, host, deadline=now + RANK_DEADLINE_S, view=view)
        effects = find_routes(record, specs)
        self._coming.update(spec.proc for spec in specs)
        if record.gone:
            for spec in specs:
                effects += self._on_rank_lost(self._ranks[spec.proc], _NOT_STARTED, now)
            return effects
        return [*effects, *record.send(pack(StartRanks(tuple(specs))))]

    def is_lost(self, proc: int) -> bool:
        """Whether a rank has died, and was not stopped: another process can replace it."""
        record = self._ranks[proc]
        return record.death is not None and not record.stopping

    def heal(self, procs: Sequence[int], now: float, hosts: Mapping[int, int] | None = None) -> list[Effect]:
        """Start processes that replace those that are lost; messages for these numbers wait for them from now on.

        Args:
            procs: The numbers; those that are not lost are ignored.
            now: The time.
            hosts: For each host agent that is gone, the one that starts its processes now.
        """
        starts: dict[int, list[RankSpec]] = {}
        effects: list[Effect] = []
        for proc in procs:
            if not self.is_lost(proc):
                continue
            former = self._ranks[proc]
            if (mesh := self._restarts.get(proc)) is not None:
                mesh.restarts.forget(former.spec.rank)
            spec = former.spec.succeeded(former.spec.incarnation + 1)
            at = former.host
            if self._hosts[at].gone:
                at = (hosts or {}).get(at, at)
            record = self._ranks[proc] = RankRecord(spec, at, deadline=now + RANK_DEADLINE_S, watchers=former.watchers)
            record.up_at, record.view = former.up_at, former.view
            self._connected.pop(former.peer, None)
            self._requests.dead.discard(proc)
            effects += find_routes(self._hosts[at], (spec,))
            self._coming.add(proc)
            if self._hosts[at].gone:
                effects += self._on_rank_lost(record, _NOT_STARTED, now)
            elif former.has_ended or self._hosts[former.host].gone:
                starts.setdefault(at, []).append(spec)
            else:
                record.former = former.former or former
        for at, specs in starts.items():
            effects += self._start_again(at, specs)
        return effects

    def _start_again(self, at: int, specs: Sequence[RankSpec]) -> list[Effect]:
        host = self._hosts[at]
        if not host.is_ending:
            return [*host.send(pack(StartRanks(tuple(specs))))]
        for spec in specs:  # the agent would refuse; when it has ended, they are lost, and another agent starts them
            self._ranks[spec.proc].deadline = math.inf
        return []

    def retire(self, procs: Iterable[int], why: str, grace_s: float, now: float) -> list[Effect]:
        """End processes that others replace (`heal`). They are lost from now on, and no event reports it."""
        effects: list[Effect] = []
        by_host: dict[int, list[int]] = {}
        for proc in procs:
            record = self._ranks[proc]
            if record.death is None:
                by_host.setdefault(record.host, []).append(proc)
                effects += self._on_rank_lost(record, why, now, asked=True)
        for host, ended in by_host.items():
            effects += self._hosts[host].send(pack(KillRanks(tuple(ended), grace_s, True)))
        return effects

    def stop(self, procs: Iterable[int], reason: str, grace_s: float, now: float) -> list[Effect]:
        """End processes. What they owe is answered now; later requests to them fail with the reason."""
        effects: list[Effect] = []
        by_host: dict[int, list[int]] = {}
        for proc in procs:
            record = self._ranks[proc]
            if record.death is None or not record.stopping:
                by_host.setdefault(record.host, []).append(proc)  # the agent keeps the logs of the dead until then
            record.stopping = True
            self._requests.respawn_log.forget((proc,))
            self._restarts.pop(proc, None)
            if record.death is not None:
                record.death = replace(record.death, kind="stopped")  # no process will replace it
                if record.has_ended:
                    record.forget()
            else:
                stopped = Failure("stopped", "Stopped", reason, host=self._hosts[record.host].hostname)
                effects += self._mark_dead(record, stopped, now, True)
        for host, ended in by_host.items():
            effects += self._hosts[host].send(pack(KillRanks(tuple(ended), grace_s)))
        return effects

    def await_ends(self, id: int, procs: Sequence[int], grace_s: float, now: float) -> list[Effect]:
        """Resolve a request when each of these processes, which `stop` ends, has ended."""
        left = [proc for proc in procs if not self._has_ended(proc)]
        return self._endings.add(id, procs, left, now + grace_s + EXIT_WAIT_S)

    def restart_when_lost(self, procs: Sequence[int], policy: RestartPolicy) -> list[Effect]:
        """Replace the processes of a mesh when they die (`RestartDue`)."""
        mesh = _Mesh(tuple(procs), Restarts(policy, range(len(procs))))
        self._restarts.update(dict.fromkeys(procs, mesh))
        return []

    def ended(self, message: Lost, now: float) -> list[Effect]:
        """Handle the report of a host agent that a process has ended."""
        record = self._ranks[message.proc]
        if record.former is not None:
            record.former = None
            if record.death is None:
                return self._start_again(record.host, (record.spec,))
        effects = [*self._endings.ended((message.proc,)), *self._note_end(record)]
        if record.death is not None:
            if record.stopping:
                record.forget()
            return effects
        rss_nbytes = message.rss_nbytes or record.reading.rss_nbytes
        what = describe_exit(
            message.exit_code, message.signal, rss_nbytes, message.oom_kills, message.low_memory, message.last_lines
        )
        exit_code = None if message.signal or message.reason else message.exit_code
        effects += self._on_rank_lost(
            record, message.reason or what, now, message.last_lines, exit_code, signal_name(message.signal)
        )
        return effects + self._due(now)

    def give_up(self, host: int, procs: Sequence[int], log: tuple[str, ...], now: float) -> list[Effect]:
        """Give up ranks that did not come up in time; those that come up later are ended."""
        effects: list[Effect] = []
        what = f"the host agent is up, but this rank was not forked from the zygote within {RANK_DEADLINE_S:.0f} s"
        for proc in procs:
            if self._ranks[proc].death is None:
                effects += self._on_rank_lost(self._ranks[proc], what, now, log)
        return [*effects, *self._hosts[host].send(pack(KillRanks(tuple(procs), 0.0, True))), *self._due(now)]

    # -- hosts

    def host_is_up(self, host: int, now: float) -> None:
        """A host agent has come up: the time for its ranks to start begins now."""
        for rank in self._ranks.values():
            if rank.host == host and not rank.up and not rank.is_adopted:
                rank.deadline = now + RANK_DEADLINE_S

    def release_host(self, host: int, reason: str, grace_s: float, now: float) -> list[Effect]:
        """End a host agent, which is no longer needed, and its ranks."""
        record = self._hosts[host]
        ranks = [proc for proc, rank in self._ranks.items() if rank.host == host and rank.death is None]
        effects = self.stop(ranks, reason, grace_s, now)
        if record.up and not record.gone:
            effects.append(Send(host_peer(host), pack(Goodbye(grace_s=grace_s))))
        record.gone, record.end = True, Failure("stopped", "Released", reason, host=record.hostname)
        record.held.clear()
        effects += self._endings.ended([proc for proc, rank in self._ranks.items() if rank.host == host])
        return [*effects, *self._host_requests.host_ended(host)]

    def given_back(self, host: int, now: float) -> list[Effect]:
        """Handle that a host has been given back (`release_host`), and that nothing runs there any more."""
        effects: list[Effect] = []
        for record in self._ranks.values():
            if record.host == host and record.stopping and not record.has_ended:
                effects += self._note_end(record)
                record.forget()
        return effects

    def host_gone(
        self, host: int, reason: str, log: tuple[str, ...], now: float, etype: str = "HostLost"
    ) -> list[Effect]:
        """Handle the end of a host agent, or that it never came up; its ranks are lost with it."""
        self._hosts[host].gone = True
        self._hosts[host].end = Failure("lost", etype, reason, last_lines=log)
        effects: list[Effect] = [GiveUp(host), *self._host_requests.host_ended(host)]
        effects += [Send(host_peer(other), pack(part)) for other, part in self._hosts.part(host)]
        lost = [record for record in self._ranks.values() if record.host == host]
        for record in lost:
            effects += self._note_end(record)
            record.former = None
            if record.death is None:
                effects += self._on_rank_lost(record, reason, now, log)
        gone = {record.peer for record in lost}  # some were sent news of the others before their own turn
        effects = [effect for effect in effects if not (isinstance(effect, Send) and effect.peer in gone)]
        effects += self._endings.ended([record.spec.proc for record in lost])
        return effects + self._due(now)

    # -- the session

    def end_all(self, now: float, grace_s: float = 0.0) -> list[Effect]:
        """End all ranks and agents; ranks whose actors clean up get some time for it."""
        why = "the session was shut down"
        tidy = [proc for proc, rank in self._ranks.items() if rank.cleans_up and rank.death is None]
        others = [proc for proc in self._ranks if proc != CONTROLLER_PROC and proc not in tidy]
        effects = self.stop(others, why, grace_s, now)
        if tidy:
            grace_s = max(grace_s, CLEANUP_S)
            effects += self.stop(tidy, why, grace_s, now)
        goodbye = pack(Goodbye(grace_s=grace_s))
        return [*effects, *(effect for record in self._hosts.values() for effect in record.send(goodbye))]

    def leave_all(self, now: float) -> list[Effect]:
        """Leave all ranks and agents to the next controller."""
        goodbye = pack(Goodbye(keep=True))
        return [effect for record in self._hosts.values() for effect in record.send(goodbye)]

    @property
    def is_settled(self) -> bool:
        """Whether no process or host starts, and none is replaced automatically."""
        return not self._coming and not self._restarts and all(host.up or host.gone for host in self._hosts.values())

    def tick(self, now: float) -> list[Effect]:
        """Report starts that take too long, and do what is due; call this a few times a second."""
        effects: list[Effect] = []
        for host in self._hosts.values():
            if not host.up and not host.gone and now >= host.deadline:
                effects.append(Expired(host.host))
        late: dict[int, list[int]] = {}
        for proc in list(self._coming):
            record = self._ranks[proc]
            if record.up or record.death is not None:
                self._coming.discard(proc)
            elif self._hosts[record.host].up and now >= record.deadline:
                late.setdefault(record.host, []).append(proc)
        effects += [Expired(host, tuple(procs)) for host, procs in late.items()]
        return effects + self._endings.due(now) + self._due(now)

    # -- inside

    def _has_ended(self, proc: int) -> bool:
        """Whether the process does not run; an agent that is not up yet has started none."""
        if proc == CONTROLLER_PROC:
            return True
        record = self._ranks[proc]
        host = self._hosts[record.host]
        return record.has_ended or host.gone or not host.up

    def _note_end(self, record: RankRecord) -> list[Effect]:
        """Note that a process has ended. Ranks keep their connections to a process that was stopped until they know this."""
        was_retiring, record.has_ended = record.is_retiring, True
        return self._introductions.announce(record) if was_retiring else []

    def _due(self, now: float) -> list[Effect]:
        """Return the restarts whose time has come."""
        effects: list[Effect] = []
        for mesh in {id(mesh): mesh for mesh in self._restarts.values()}.values() if self._restarts else ():
            ranks = mesh.restarts.due(now)
            procs = tuple(mesh.procs[rank] for rank in ranks)
            lost = [rank for rank, proc in zip(ranks, procs) if self.is_lost(proc)]
            if lost:  # else the program has healed it meanwhile
                effects.append(RestartDue(procs, f"ended, because {format_ranks(lost)} died and the mesh is restarted"))
        return effects

    def _on_rank_lost(
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
        effects = self._output.end(record, now)  # messages from before its death come first
        description = next(filter(None, record.open_requests.values()), "")
        text = f"{what}; it was running {description}" if description and record.up else what
        mesh = self._restarts.get(record.spec.proc)
        record.is_replaced = asked
        if mesh is not None and not asked:
            record.is_replaced, follows = mesh.restarts.died(record.spec.rank, now)
            text = f"{text}; {follows}" if follows else text
        etype = "RankDied" if record.up or record.is_adopted else "RankNotStarted"
        host = self._hosts[record.host].hostname
        failure = Failure(
            "lost", etype, text, host=host, pid=record.pid, last_lines=last_lines, exit_code=exit_code, signal=signal
        )
        effects += self._mark_dead(record, failure, now, record.is_replaced)
        if not asked:
            effects.append(Tell(LostEvent(record.spec.mesh, record.spec.rank, failure)))
        return effects

    def _mark_dead(self, record: RankRecord, failure: Failure, now: float, asked: bool) -> list[Effect]:
        spec, is_reported = record.spec, asked or bool(record.open_requests or record.watchers)
        reported = replace(failure, kind="stopped") if asked else failure
        record.death = failure
        self._requests.dead.add(spec.proc)
        record.held.clear()
        record.names.clear()
        self._connected.pop(record.peer, None)
        effects: list[Effect] = self._introductions.announce(record)
        effects.append(HostGone(spec.proc, spec.incarnation, spec.mesh, spec.rank, reported, is_reported))
        effects += self._lost(record, now)
        for id in [*record.open_requests, *record.out_of_band]:
            effects += self._answer(id, (spec.proc,), failure, now)
            if not asked:
                effects += self._requests.tell_waiting(id, pack(Release(id, spec.mesh, spec.rank)))
        record.last_error = "" if record.stopping else failure.headline()
        record.failure = None if record.stopping else failure
        record.failed_at = now
        return effects


def find_routes(host: HostRecord, specs: Iterable[RankSpec]) -> list[Effect]:
    """Return how processes on another machine are reached: through their host agent."""
    if not host.is_elsewhere:
        return []
    return [Route(rank_peer(spec.proc, spec.incarnation), host.host) for spec in specs]
