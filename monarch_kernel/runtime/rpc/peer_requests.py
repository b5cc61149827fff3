"""What a rank knows of the processes that it asks, and what follows from each thing it hears: no I/O, no threads, no clock.

Theory of operation
===================

It is to a rank what `runtime.controller.state` is to the controller, and as small as it can be. A rank that has something to
ask a process says `Meet` to the controller, once, which answers with `PeerNews` when that process is up, and again when it has
ended or was replaced. What is asked before it is up waits here, in order. So the controller says who lives, but requests and
answers go straight from rank to rank.

A request resolves once, when all have answered; a peer that ends answers all it owes with its death, and a cancel answers for
everybody. What comes for an id that has resolved is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import CONTROLLER, Peer, rank_peer
from monarch_kernel.net.wire.codec import Frame, Packed, pack
from monarch_kernel.net.wire.messages import Failed, Interrupt, Meet, PeerNews, Release, Result
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC
from monarch_kernel.runtime.rpc.respawn_log import KeptSpawns, MakeSpawn

__all__ = ["Connect", "Disconnect", "PeerEffect", "Peers", "Resolved", "Respawned", "ToPeer"]

RELEASE_AFTER_S = 1.0


class ToPeer(NamedTuple):
    """Effect: send a message."""

    peer: Peer
    packed: Packed


class Connect(NamedTuple):
    """Effect: connect to a peer, and say hello to it."""

    peer: Peer
    address: str


class Disconnect(NamedTuple):
    """Effect: give up the connection to a peer, which has ended."""

    peer: Peer


class Respawned(NamedTuple):
    """Effect: an actor that was spawned from here is made again in a process that has come in the place of another."""

    actor: int
    proc: int


class Resolved(NamedTuple):
    """Effect: a request is over."""

    id: int
    answers: list[Answer]


PeerEffect = ToPeer | Connect | Disconnect | Resolved | Respawned


@dataclass(slots=True)
class _Peer:
    """A process that is asked; ``name`` is empty until it is up, and ``owed`` are the requests that it has yet to answer."""

    name: Peer = b""
    incarnation: int = -1
    death: Failure | None = None
    held: list[Packed] = field(default_factory=list)
    owed: dict[int, None] = field(default_factory=dict)


class _Pending:
    """A request that has not resolved; ``waiting`` maps those that owe an answer to their places in ``answers``."""

    __slots__ = ("answers", "failed_at", "released_at", "waiting")

    def __init__(self, procs: Sequence[int]) -> None:
        self.waiting = {proc: i for i, proc in enumerate(procs)}
        self.answers: list[Answer | None] = [None] * len(procs)
        self.failed_at: float | None = None
        self.released_at = 0.0


class Peers:
    """The state of a rank as one that asks.

    Args:
        proc: its own place.
        name: its own name on the wire.
        numbers: gives numbers for requests that nobody has made: of what is spawned again.

    Attributes:
        kept: what was spawned from here, for processes that come in place of others.
    """

    def __init__(self, proc: int, name: Peer, numbers: Iterator[int]) -> None:
        self.kept = KeptSpawns()
        self._proc = proc
        self._numbers = numbers
        self._peers = {CONTROLLER_PROC: _Peer(CONTROLLER), proc: _Peer(name)}
        self._pending: dict[int, _Pending] = {}

    @property
    def pending(self) -> int:
        """Number of requests that have not resolved."""
        return len(self._pending)

    @property
    def has_failed(self) -> bool:
        """Whether there is a request that one process has failed, while others have yet to answer it."""
        return any(pending.failed_at is not None for pending in self._pending.values())

    def waiting_for(self, id: int) -> list[int]:
        """The processes that have yet to answer a request."""
        pending = self._pending.get(id)
        return [] if pending is None else list(pending.waiting)

    def deaths(self, procs: Sequence[int]) -> dict[int, Failure]:
        """Which of these processes are known to have ended, and how."""
        found = {proc: self._peers[proc].death for proc in procs if proc in self._peers}
        return {proc: death for proc, death in found.items() if death is not None}

    def incarnation(self, proc: int) -> int:
        """Which process has a place now, as far as is known; -1 if it has not been met."""
        known = self._peers.get(proc)
        return -1 if known is None else known.incarnation

    def is_ahead(self, proc: int, incarnation: int) -> bool:
        """Whether a process that we hear of is not known to be up yet, and has to be sent something as soon as it is."""
        known = self._peers.get(proc)
        if known is None:
            return False
        return 0 <= known.incarnation < incarnation or (not known.name and bool(known.held))

    # -- what the program wants

    def request(
        self,
        id: int,
        procs: Sequence[int],
        packed: Packed | Sequence[Packed],
        note: str = "",
        spawned: tuple[int, MakeSpawn] | None = None,
    ) -> list[PeerEffect]:
        """Ask processes for one answer each; if one of them is known to be dead nobody is asked."""
        deaths = self.deaths(procs)
        if deaths:
            not_sent = Failure("stopped", "NotSent", "not sent, because another rank is dead")
            return [Resolved(id, [deaths.get(proc, not_sent) for proc in procs])]
        if not procs:
            return [Resolved(id, [])]
        if spawned is not None:
            self.kept.add(spawned[0], procs, note, spawned[1], id)
        self._pending[id] = _Pending(procs)
        effects: list[PeerEffect] = []
        for proc, message in zip(procs, repeat(packed) if isinstance(packed, Packed) else packed):
            effects += self._send(proc, message)
            self._peers[proc].owed[id] = None
        return effects

    def tell(self, procs: Sequence[int], packed: Packed) -> list[PeerEffect]:
        """Send processes something that has no answer."""
        return [effect for proc in procs for effect in self._send(proc, packed)]

    def meet(self, proc: int) -> list[PeerEffect]:
        """Want to know of the life of a process, without having to ask it anything."""
        if proc in self._peers:
            return []
        self._peers[proc] = _Peer()
        return [ToPeer(CONTROLLER, pack(Meet(proc)))]

    def interrupt(self, id: int, *, abort: bool = False) -> list[PeerEffect]:
        """Interrupt a request where it has not been answered."""
        return self._poke(id, pack(Interrupt(id, abort)))

    def cancel(self, id: int, now: float) -> list[PeerEffect]:
        """End a request for the caller, and interrupt it where it has not been answered."""
        effects = self.interrupt(id)
        cancelled = Failure("interrupted", "CancelledError", "cancelled by the caller")
        for proc in self.waiting_for(id):
            effects += self._answer(id, proc, cancelled, now)
        return effects

    # -- what happens

    def answered(self, proc: int, message: Result | Failed, frames: Sequence[Frame], now: float) -> list[PeerEffect]:
        """A process has answered."""
        answer: Answer = message.failure if isinstance(message, Failed) else Value(message.payload, frames, {})
        known = self._peers.get(proc)
        if known is not None:
            known.owed.pop(message.id, None)
        if isinstance(message, Failed):
            self.kept.refused(message.id, proc)
        return self._answer(message.id, proc, answer, now)

    def news(self, news: PeerNews, now: float) -> list[PeerEffect]:
        """A process is up, or has ended."""
        known = self._peers.setdefault(news.proc, _Peer())
        if news.incarnation < known.incarnation:
            return []
        if news.incarnation == known.incarnation and (known.death is not None or (known.name and news.death is None)):
            return []  # another controller says what is known
        effects: list[PeerEffect] = []
        is_another = 0 <= known.incarnation < news.incarnation
        if news.death is not None or news.incarnation > known.incarnation:
            effects += self._lose(news, known, now)
        if news.death is not None and news.death.kind == "stopped":
            self.kept.forget((news.proc,))
        known.incarnation = news.incarnation
        if news.death is None:
            known.death = None
            known.name = rank_peer(news.proc, news.incarnation)
            effects.append(Connect(known.name, news.address))
            if is_another:
                effects += self._spawn_again(news.proc, known)
            effects += [ToPeer(known.name, packed) for packed in known.held]
            known.held.clear()
        return effects

    def controller_is_new(self, now: float) -> list[PeerEffect]:
        """Another controller has taken the last one's place: it owes us nothing, and must be told whom we have met."""
        effects: list[PeerEffect] = []
        for proc, known in self._peers.items():
            if proc == CONTROLLER_PROC:
                gone = Failure("lost", "ProgramEnded", "the program that was asked has ended; another has its mesh")
                owed, known.owed = known.owed, {}
                for id in owed:
                    effects += self._answer(id, proc, gone, now)
            elif proc != self._proc:
                effects.append(ToPeer(CONTROLLER, pack(Meet(proc))))
        return effects

    def tick(self, now: float) -> list[PeerEffect]:
        """Time has passed: free the others where one has failed, as the controller does (see `runtime.controller.state`)."""
        effects: list[PeerEffect] = []
        for id, pending in self._pending.items():
            if pending.failed_at is not None and now >= max(pending.failed_at, pending.released_at) + RELEASE_AFTER_S:
                pending.released_at = now
                effects += self._poke(id, pack(Release(id)))
        return effects

    # -- inside

    def _send(self, proc: int, packed: Packed) -> list[PeerEffect]:
        effects = self.meet(proc)
        known = self._peers[proc]
        if known.death is not None:
            return []
        if known.name:
            return [ToPeer(known.name, packed)]
        known.held.append(packed)
        return effects

    def _poke(self, id: int, packed: Packed) -> list[PeerEffect]:
        return self.tell(self.waiting_for(id), packed)

    def _spawn_again(self, proc: int, known: _Peer) -> list[PeerEffect]:
        """Have who has come in place of another make what was spawned there from here, before it is asked anything else."""
        effects: list[PeerEffect] = []
        for kept, _ in self.kept.of((proc,)):
            id = next(self._numbers)
            self._pending[id] = _Pending((proc,))
            known.owed[id] = None
            packed = self.kept.again(kept, id, (proc,), self.deaths(tuple(kept.procs)))
            effects += [Respawned(kept.actor, proc), ToPeer(known.name, packed)]
        return effects

    def _lose(self, news: PeerNews, known: _Peer, now: float) -> list[PeerEffect]:
        """A process has ended; if that is not what is told, another has its place already.

        Others who work on what it owed are told at once, as the controller does: no collective with it ever ends.
        """
        death = news.death
        effects: list[PeerEffect] = [Disconnect(known.name)] if known.name else []
        known.name = b""
        known.death = death
        if death is not None:
            known.held.clear()
        elif not effects:
            return []  # it was not up yet, and what waits is for whoever comes up
        owed, known.owed = known.owed, {}
        lost = death or Failure("lost", "RankDied", "it ended, and was replaced")
        for id in owed:
            effects += self._answer(id, news.proc, lost, now)
            if lost.kind != "stopped":
                effects += self._poke(id, pack(Release(id, news.mesh, news.rank)))
        return effects

    def _answer(self, id: int, proc: int, answer: Answer, now: float) -> list[PeerEffect]:
        pending = self._pending.get(id)
        index = None if pending is None else pending.waiting.pop(proc, None)
        if pending is None or index is None:
            return []
        pending.answers[index] = answer
        if pending.waiting:
            if isinstance(answer, Failure) and pending.failed_at is None:
                pending.failed_at = now
            return []
        del self._pending[id]
        self.kept.over(id)
        return [Resolved(id, pending.answers)]  # type: ignore[arg-type]
