"""Taking up ranks that another controller has started: who has yet to say what it has, and what comes of it. Pure.

A new controller asks the host agent and every rank (`Attach`), again and again, for it does not know when they have
connected to it. Each says hello once. Only when all have, or the time is up, is it known which ranks owe an answer to a cell;
answers that come before wait here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from monarch_kernel.net.transport.base import Peer, proc_of
from monarch_kernel.net.wire.codec import Frame, Packed
from monarch_kernel.net.wire.messages import Message, Owed

__all__ = ["Early", "Resumed", "Resumption"]


ASK_LATE_EVERY_S = 5.0


class Resumed(NamedTuple):
    """A cell of an earlier controller, of which the answers will come, in the order of ``procs``."""

    id: int
    note: str
    number: int
    age_s: float
    procs: tuple[int, ...]


class Early(NamedTuple):
    """An answer that came before it was known who else owes one."""

    peer: Peer
    message: Message
    frames: Sequence[Frame]


class Resumption:
    """One taking up.

    Args:
        packed: the `Attach`.
        peers: whom to ask.
        deadline: when to go on without those that have not answered; they are asked nevertheless.
    """

    def __init__(self, packed: Packed, peers: Iterable[Peer], deadline: float) -> None:
        self.packed = packed
        self.waiting = list(peers)
        self.is_over = False
        self._ask_at = 0.0
        self._deadline = deadline
        self._cells: dict[int, list[tuple[int, Owed]]] = {}
        self._early: list[Early] = []

    def asks(self, now: float) -> Sequence[Peer]:
        """Whom to ask now; seldom after `finish`, for those that are connected have it in their queues."""
        if now < self._ask_at:
            return ()
        self._ask_at = now + (ASK_LATE_EVERY_S if self.is_over else 0.0)
        return tuple(self.waiting)

    def told(self, peer: Peer, owed: Iterable[Owed]) -> None:
        """A rank has said what it owes."""
        for one in owed:
            if one.cell is not None:
                self._cells.setdefault(one.id, []).append((proc_of(peer), one))
        self.heard(peer)

    def renamed(self, peer: Peer, new: Peer) -> None:
        """In the place of a rank there is another by now, which is to be asked."""
        if peer in self.waiting:
            self.waiting[self.waiting.index(peer)] = new
            self._ask_at = 0.0

    def heard(self, peer: Peer) -> None:
        """A peer has answered, or never will."""
        if peer in self.waiting:
            self.waiting.remove(peer)

    def hold(self, peer: Peer, message: Message, frames: Sequence[Frame]) -> None:
        """Keep an answer until `finish`."""
        self._early.append(Early(peer, message, frames))

    def is_due(self, now: float) -> bool:
        """Whether it is time to `finish`."""
        return not self.is_over and (not self.waiting or now >= self._deadline)

    def finish(self) -> tuple[list[Resumed], list[Early]]:
        """Give the cells that are resumed, oldest first, and the answers that have come."""
        self.is_over = True
        early, self._early = self._early, []
        cells = []
        for id, told in sorted(self._cells.items()):
            owed = told[0][1]
            procs = tuple(sorted(proc for proc, _ in told))
            cells.append(Resumed(id, owed.note, owed.cell or 0, max(one.age_s for _, one in told), procs))
        return cells, early
