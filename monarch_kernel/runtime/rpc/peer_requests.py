"""Requests of a rank to other processes, and what it knows of these: no I/O, no threads, no clock.

Theory of operation
===================

`Peers` is to a rank what `runtime.controller.state` is to the controller. Before a rank first sends something to a process, it
sends `WatchProcess` to the controller, once. The controller answers with `ProcessStatus` when that process is up, and again
when it has ended or was replaced. Requests made before that wait here, in order. So the controller reports which processes
live, and requests and answers go straight from rank to rank.

`runtime.rpc.requests` says how requests resolve. If a process ends, its death answers all requests that it has not answered.
A process that the program stops counts as dead from then on, but its actors may still clean up, and call actors here. So the
connection stays open until the controller reports the real end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import CONTROLLER, Peer, rank_peer
from monarch_kernel.net.wire.codec import Frame, Packed, pack
from monarch_kernel.net.wire.messages import Failed, ProcessStatus, Release, Result, WatchProcess
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC
from monarch_kernel.runtime.rpc.requests import Pending, Recipient, Requests, Resolve, Send
from monarch_kernel.runtime.rpc.respawn_log import MakeSpawn

__all__ = ["Connect", "Disconnect", "PeerEffect", "Peers", "Respawned"]


class Connect(NamedTuple):
    """Effect: connect to a peer, and say hello to it."""

    peer: Peer
    address: str


class Disconnect(NamedTuple):
    """Effect: close the connection to a peer, which has ended."""

    peer: Peer


class Respawned(NamedTuple):
    """Effect: a process that replaces another makes an actor that was spawned from here."""

    actor: int
    proc: int


PeerEffect = Send | Connect | Disconnect | Resolve | Respawned


@dataclass(slots=True)
class _Peer(Recipient):
    """A process that this rank has met.

    ``peer`` is empty until it is up, and ``retiring`` unless it was stopped and may still run.
    """

    incarnation: int = -1
    retiring: Peer = b""


class Peers:
    """The requests of a rank, and the processes that it has met.

    Args:
        proc: The number of the rank's process.
        name: The rank's name on the wire.
        numbers: Makes ids of requests that repeat a spawn.

    Attributes:
        requests: Those that have not resolved.
    """

    def __init__(self, proc: int, name: Peer, numbers: Iterator[int]) -> None:
        self._proc = proc
        self._numbers = numbers
        self._peers = {CONTROLLER_PROC: _Peer(peer=CONTROLLER, up=True), proc: _Peer(peer=name, up=True)}
        self.requests = Requests(self._peers)

    def deaths(self, procs: Sequence[int]) -> dict[int, Failure]:
        """Return those of these processes that have ended, and how."""
        found = {proc: self._peers[proc].death for proc in procs if proc in self._peers}
        return {proc: death for proc, death in found.items() if death is not None}

    def incarnation(self, proc: int) -> int:
        """Return the latest known incarnation of a process; -1 if it has not been met."""
        known = self._peers.get(proc)
        return -1 if known is None else known.incarnation

    def is_ahead(self, proc: int, incarnation: int) -> bool:
        """Whether a process that sends us something is not known to be up yet, and messages for it wait."""
        known = self._peers.get(proc)
        if known is None:
            return False
        return 0 <= known.incarnation < incarnation or (not known.up and bool(known.held))

    # -- what the program wants

    def request(
        self,
        id: int,
        procs: Sequence[int],
        packed: Packed | Sequence[Packed],
        now: float,
        description: str = "",
        spawned: tuple[int, MakeSpawn] | None = None,
    ) -> list[PeerEffect]:
        """Ask processes for one answer each; arguments as for `Requests.request`."""
        effects: list[PeerEffect] = [effect for proc in procs for effect in self.meet(proc)]
        return [*effects, *self.requests.request(id, procs, packed, description, now, spawned=spawned)]

    def tell(self, procs: Sequence[int], packed: Packed) -> list[PeerEffect]:
        """Send processes a message that has no answer."""
        effects: list[PeerEffect] = [effect for proc in procs for effect in self.meet(proc)]
        return [*effects, *self.requests.tell(procs, packed)]

    def meet(self, proc: int) -> list[PeerEffect]:
        """Ask the controller, once, to report whether a process lives."""
        if proc in self._peers:
            return []
        self._peers[proc] = _Peer()
        return [Send(CONTROLLER, pack(WatchProcess(proc)))]

    def cancel(self, id: int, now: float) -> list[PeerEffect]:
        """End a request for the caller, and interrupt it where it has not been answered."""
        effects: list[PeerEffect] = [*self.requests.interrupt(id)]
        cancelled = Failure("interrupted", "CancelledError", "cancelled by the caller")
        for proc in self.requests.waiting_for(id):
            effects += self._answer(id, proc, cancelled, now)
        return effects

    # -- what happens

    def answered(self, proc: int, message: Result | Failed, frames: Sequence[Frame], now: float) -> list[PeerEffect]:
        """Handle the answer of a process."""
        answer: Answer = message.failure if isinstance(message, Failed) else Value(message.payload, frames, {})
        known = self._peers.get(proc)
        if known is not None:
            known.open_requests.pop(message.id, None)
        if isinstance(message, Failed):
            self.requests.respawn_log.refused(message.id, proc)
        return self._answer(message.id, proc, answer, now)

    def news(self, news: ProcessStatus, now: float) -> list[PeerEffect]:
        """Handle the news that a process is up, or has ended."""
        known = self._peers.setdefault(news.proc, _Peer())
        if news.incarnation < known.incarnation:
            return []
        if news.incarnation == known.incarnation:
            if known.death is not None and news.death is not None and not news.is_retiring:
                return _end_retirement(known)
            if known.death is not None or (known.up and news.death is None):
                return []  # a new controller repeats what is known
        effects: list[PeerEffect] = []
        is_another = 0 <= known.incarnation < news.incarnation
        if news.death is not None or news.incarnation > known.incarnation:
            effects += self._on_peer_lost(news, known, now)
        if news.death is not None and news.death.kind == "stopped":
            self.requests.respawn_log.forget((news.proc,))
        known.incarnation = news.incarnation
        if news.death is None:
            known.peer, known.up = rank_peer(news.proc, news.incarnation), True
            effects.append(Connect(known.peer, news.address))
            if is_another:
                effects += self._spawn_again(news.proc, known)
            effects += [Send(known.peer, packed) for packed in known.held]
            known.held.clear()
        return effects

    def controller_is_new(self, now: float) -> list[PeerEffect]:
        """Handle a new controller. It will not answer earlier requests, and it needs to know which processes we have met."""
        effects: list[PeerEffect] = []
        for proc, known in self._peers.items():
            if proc == CONTROLLER_PROC:
                gone = Failure("lost", "ProgramEnded", "the program that was asked has ended; another has its mesh")
                open_requests, known.open_requests = known.open_requests, {}
                for id in open_requests:
                    effects += self._answer(id, proc, gone, now)
            elif proc != self._proc:
                effects.append(Send(CONTROLLER, pack(WatchProcess(proc))))
        return effects

    # -- inside

    def _spawn_again(self, proc: int, known: _Peer) -> list[PeerEffect]:
        """Have a process that replaces another make the actors that were spawned there from here, before anything else."""
        effects: list[PeerEffect] = []
        log = self.requests.respawn_log
        for record, _ in log.of((proc,)):
            id = next(self._numbers)
            self.requests.add(id, Pending((proc,)))
            known.open_requests[id] = ""
            packed = log.again(record, id, (proc,), self.deaths(tuple(record.procs)))
            effects += [Respawned(record.actor, proc), Send(known.peer, packed)]
        return effects

    def _on_peer_lost(self, news: ProcessStatus, known: _Peer, now: float) -> list[PeerEffect]:
        """Handle the end of a process. If the news is that a process is up, that process replaces it.

        Other processes that work on a request it has not answered leave their collectives now: no collective with it ever ends.
        """
        death, was_up = news.death, known.up
        effects = _end_retirement(known)
        if news.is_retiring:
            known.retiring = rank_peer(news.proc, news.incarnation)
        elif was_up:
            effects.append(Disconnect(known.peer))
        known.peer, known.up, known.death = b"", False, death
        if death is not None:
            self.requests.dead.add(news.proc)
            known.held.clear()
        else:
            self.requests.dead.discard(news.proc)
            if not was_up:
                return effects  # messages that wait are for the process that comes up
        open_requests, known.open_requests = known.open_requests, {}
        lost = death or Failure("lost", "RankDied", "it ended, and was replaced")
        for id in open_requests:
            effects += self._answer(id, news.proc, lost, now)
            if lost.kind != "stopped":
                effects += self.requests.tell_waiting(id, pack(Release(id, news.mesh, news.rank)))
        return effects

    def _answer(self, id: int, proc: int, answer: Answer, now: float) -> list[PeerEffect]:
        return [*(self.requests.answer(id, proc, answer, now) or ())]


def _end_retirement(known: _Peer) -> list[PeerEffect]:
    """Close the connection to a process that was stopped, because it has ended now."""
    retired, known.retiring = known.retiring, b""
    return [Disconnect(retired)] if retired else []
