"""Adopts ranks that another controller has started: which have not reported yet, and which cells are resumed. Pure.

A new controller sends `Attach` to the host agent and every rank, again and again, because it does not know when they have
connected to it. Each answers once, with hello. Only when all have answered, or the time is up, is it clear which ranks have not
answered a cell yet; answers that arrive before wait here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from monarch_kernel.net.transport.base import Peer, proc_of
from monarch_kernel.net.wire.codec import Frame, Packed
from monarch_kernel.net.wire.messages import Message, OpenRequest

__all__ = ["Early", "Resumed", "Resumption"]


ASK_LATE_EVERY_S = 5.0


class Resumed(NamedTuple):
    """A cell of an earlier controller that still runs; its answers will arrive, in the order of ``procs``."""

    id: int
    description: str
    number: int
    age_s: float
    procs: tuple[int, ...]


class Early(NamedTuple):
    """An answer that arrived before it was clear which other ranks will answer the same request."""

    peer: Peer
    message: Message
    frames: Sequence[Frame]


class Resumption:
    """The adoption of one mesh.

    Args:
        packed: The `Attach`.
        peers: The peers to ask.
        deadline: When to go on without the peers that have not answered; they are still asked afterwards.
    """

    def __init__(self, packed: Packed, peers: Iterable[Peer], deadline: float) -> None:
        self.packed = packed
        self.waiting = list(peers)
        self.is_over = False
        self._ask_at = 0.0
        self._deadline = deadline
        self._cells: dict[int, list[tuple[int, OpenRequest]]] = {}
        self._early: list[Early] = []

    def asks(self, now: float) -> Sequence[Peer]:
        """The peers to ask now; rarely after `finish`, because connected peers have the message in their queues already."""
        if now < self._ask_at:
            return ()
        self._ask_at = now + (ASK_LATE_EVERY_S if self.is_over else 0.0)
        return tuple(self.waiting)

    def reported(self, peer: Peer, open_requests: Iterable[OpenRequest]) -> None:
        """Note which requests a rank has not answered."""
        for one in open_requests:
            if one.cell is not None:
                self._cells.setdefault(one.id, []).append((proc_of(peer), one))
        self.settled(peer)

    def renamed(self, peer: Peer, new: Peer) -> None:
        """Ask the new incarnation of a rank in place of the former one."""
        if peer in self.waiting:
            self.waiting[self.waiting.index(peer)] = new
            self._ask_at = 0.0

    def settled(self, peer: Peer) -> None:
        """Note that a peer has answered, or never will."""
        if peer in self.waiting:
            self.waiting.remove(peer)

    def hold(self, peer: Peer, message: Message, frames: Sequence[Frame]) -> None:
        """Keep an answer until `finish`."""
        self._early.append(Early(peer, message, frames))

    def is_due(self, now: float) -> bool:
        """Whether it is time to `finish`."""
        return not self.is_over and (not self.waiting or now >= self._deadline)

    def finish(self) -> tuple[list[Resumed], list[Early]]:
        """Return the cells that are resumed, oldest first, and the answers that have arrived."""
        self.is_over = True
        early, self._early = self._early, []
        cells = []
        for id, reports in sorted(self._cells.items()):
            open_requests = reports[0][1]
            procs = tuple(sorted(proc for proc, _ in reports))
            cells.append(
                Resumed(
                    id, open_requests.description, open_requests.cell or 0, max(one.age_s for _, one in reports), procs
                )
            )
        return cells, early
