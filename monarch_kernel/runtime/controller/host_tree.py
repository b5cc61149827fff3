"""What the controller knows of hosts, and what follows: who is silent, who dials whom, and who passes on for whom. Pure.

Theory of operation
===================

A host that is *elsewhere* is known to live only by what is heard of it: when that is nothing for longer than it may, it is
lost, whatever its engine believes. Time in which we ourselves did not listen does not count: what it has said meanwhile waits
for us.

Beyond `FAN_OUT` hosts the controller need not send everything to each: a host that comes later is told to take its way by one
of those before it (`Join`), which has room, and is as near to us as possible. When that one is lost its followers come back to
us by themselves; they are given some time for it.

Agents of two hosts whose ranks have to do with each other are introduced (`Reach`), once: one of them dials the other. When one
is gone the other is told (`Part`).

No engine decides on its own that a host is lost: Ray reports a dead node after 15 s and Slurm after 29 s, missing beats
after one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from monarch_kernel.net.transport.base import Peer
from monarch_kernel.net.wire.messages import Join, Part, Reach
from monarch_kernel.runtime.controller.effects import Expired
from monarch_kernel.runtime.controller.records import HostRecord

__all__ = ["Hosts"]

FAN_OUT = 16
HOST_DEADLINE_S = 30.0
RETURN_S = 3.0
"""How long the followers of a host that was lost have to come back."""


class Hosts(dict[int, HostRecord]):
    """The hosts of a session, by number."""

    def __init__(self) -> None:
        super().__init__()
        self._introduced: set[frozenset[int]] = set()

    def add(self, host: int, now: float, *, timeout_s: float | None = None, lost_after_s: float | None = None) -> None:
        """Expect a host agent to come up.

        Args:
            host: Its number.
            now: The time.
            timeout_s: How long it may take, in seconds; None for `HOST_DEADLINE_S`.
            lost_after_s: On another machine, after how many seconds of silence it is lost.
        """
        record = self[host] = HostRecord(host, deadline=now + (HOST_DEADLINE_S if timeout_s is None else timeout_s))
        if lost_after_s is not None:
            record.is_elsewhere, record.lost_after_s = True, lost_after_s

    def latest(self, host: int) -> int:
        """Return the number of the host agent that has replaced this one, or this one."""
        while (record := self.get(host)) is not None and record.successor:
            host = record.successor
        return host

    # -- life

    def expire(self, heard: Container[int], for_s: float) -> list[Expired]:
        """Give up hosts that have been silent for too long.

        Args:
            heard: The hosts that were heard of.
            for_s: In the last so many seconds, in which we have listened.
        """
        effects = []
        for record in self.listened(heard, for_s):
            name = record.hostname or f"host {record.host}"
            why = f"nothing was heard of {name} for {record.silence_s:.1f} s: it has died, or the network to it is cut"
            effects.append(Expired(record.host, reason=why))
        return effects

    def listened(self, heard: Container[int], for_s: float) -> list[HostRecord]:
        """These hosts were heard of, and we have listened for so many seconds; gives those that are silent for too long."""
        silent = []
        for record in self.values():
            if record.host in heard:
                record.silence_s = 0.0
            elif record.is_elsewhere and record.up and not record.gone:
                record.silence_s += for_s
                if record.silence_s >= self._may_be_silent_s(record):
                    silent.append(record)
        return silent

    def _may_be_silent_s(self, record: HostRecord) -> float:
        parent = self.get(record.parent)
        is_cut_off = parent is not None and (parent.gone or parent.silence_s > record.lost_after_s / 2)
        return record.lost_after_s + (RETURN_S if is_cut_off else 0.0)

    # -- the tree

    def place(self, record: HostRecord) -> Join | None:
        """Find the way of a host that has come up; None if it is the direct one."""
        if not record.is_elsewhere:
            return None
        room = [
            other
            for other in self.values()
            if other is not record and other.is_elsewhere and other.up and not other.gone and other.addresses
        ]
        direct = [other for other in room if not other.parent]
        if len(direct) < FAN_OUT:
            return None
        followers = Counter(other.parent for other in self.values() if not other.gone)
        room = [other for other in room if followers[other.host] < FAN_OUT]
        if not room:
            return None
        parent = min(room, key=lambda other: (self._depth(other), followers[other.host], other.host))
        record.parent = parent.host
        return Join(parent.host, parent.addresses)

    def _depth(self, record: HostRecord) -> int:
        depth = 0
        while record.parent in self and depth < len(self):
            record = self[record.parent]
            depth += 1
        return depth

    # -- who dials whom

    def introduce(self, asking: int, asked: int, peer: Peer) -> list[tuple[int, Reach]]:
        """A rank of one host has to do with a process of another: (host, what its agent is told)."""
        one, other = self[asking], self[asked]
        is_new = frozenset((asking, asked)) not in self._introduced
        self._introduced.add(frozenset((asking, asked)))
        if not is_new:
            return [(asking, Reach(asked, (), (peer,)))]
        if other.addresses or not one.addresses:
            return [(asking, Reach(asked, other.addresses, (peer,)))]
        return [(asking, Reach(asked, (), (peer,))), (asked, Reach(asking, one.addresses, ()))]

    def part(self, gone: int) -> list[tuple[int, Part]]:
        """A host is gone: (host that has had to do with it, what its agent is told)."""
        pairs = [pair for pair in self._introduced if gone in pair]
        self._introduced.difference_update(pairs)
        others = {host for pair in pairs for host in pair} | {self[gone].parent}
        living = [other for host in sorted(others - {gone}) if (other := self.get(host)) is not None and not other.gone]
        return [(other.host, Part(gone)) for other in living if other.up]
