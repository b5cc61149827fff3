"""The controller's knowledge of hosts: which are silent, which connect to each other, and which relay messages. Pure.

Theory of operation
===================

The controller knows that a host *elsewhere*, on another machine, lives only because messages of it arrive. If none arrives for
longer than ``lost_after_s``, the host is lost, whatever its engine reports. Time in which the controller itself did not listen
does not count, because messages wait for it meanwhile.

With more than `FAN_OUT` hosts, the controller does not send everything to each of them: a later host gets a parent
(`UseParent`), an earlier host that relays its messages. The parent has fewer than `FAN_OUT` followers and is as near to the
controller as possible. If a parent is lost, its followers reconnect to the controller by themselves; they get extra time for
that.

If ranks of two hosts send messages to each other, the controller introduces their agents once (`ConnectHost`): one of them
connects to the other. If one host is gone, the other gets a message about it (`ForgetHost`).

No engine decides on its own that a host is lost: Ray reports a dead node after 15 s and Slurm after 29 s, missing beats
after one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from monarch_kernel.net.transport.base import Peer
from monarch_kernel.net.wire.messages import ConnectHost, ForgetHost, UseParent
from monarch_kernel.runtime.controller.effects import Expired
from monarch_kernel.runtime.controller.process_records import HostRecord

__all__ = ["Hosts"]

FAN_OUT = 16
HOST_DEADLINE_S = 30.0
RETURN_S = 3.0
"""How long the followers of a lost host may take to reconnect, in seconds."""


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
            lost_after_s: For a host on another machine, after how many seconds of silence it is lost.
        """
        record = self[host] = HostRecord(host, deadline=now + (HOST_DEADLINE_S if timeout_s is None else timeout_s))
        if lost_after_s is not None:
            record.is_elsewhere, record.lost_after_s = True, lost_after_s

    def latest(self, host: int) -> int:
        """Return the number of the host agent that has replaced this one, or this one."""
        while (record := self.get(host)) is not None and record.successor:
            host = record.successor
        return host

    # -- silence and loss

    def expire(self, active: Container[int], for_s: float) -> list[Expired]:
        """Give up hosts that have been silent for too long.

        Args:
            active: The hosts that sent something.
            for_s: In the last so many seconds, in which the controller listened.
        """
        effects = []
        for record in self.listened(active, for_s):
            name = record.hostname or f"host {record.host}"
            why = f"{name} has sent nothing for {record.silence_s:.1f} s: it has died, or the network to it is cut"
            effects.append(Expired(record.host, reason=why))
        return effects

    def listened(self, active: Container[int], for_s: float) -> list[HostRecord]:
        """Update how long hosts are silent, after listening for ``for_s`` seconds; return those silent for too long."""
        silent = []
        for record in self.values():
            if record.host in active:
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

    def place(self, record: HostRecord) -> UseParent | None:
        """Choose the parent of a host that is up; None if it stays connected directly."""
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
        return UseParent(parent.host, parent.addresses)

    def _depth(self, record: HostRecord) -> int:
        depth = 0
        while record.parent in self and depth < len(self):
            record = self[record.parent]
            depth += 1
        return depth

    # -- connections between hosts

    def introduce(self, asking: int, asked: int, peer: Peer) -> list[tuple[int, ConnectHost]]:
        """Introduce the hosts of a rank and of a process it sends messages to; returns hosts with messages for their agents."""
        one, other = self[asking], self[asked]
        is_new = frozenset((asking, asked)) not in self._introduced
        self._introduced.add(frozenset((asking, asked)))
        if not is_new:
            return [(asking, ConnectHost(asked, (), (peer,)))]
        if other.addresses or not one.addresses:
            return [(asking, ConnectHost(asked, other.addresses, (peer,)))]
        return [(asking, ConnectHost(asked, (), (peer,))), (asked, ConnectHost(asking, one.addresses, ()))]

    def part(self, gone: int) -> list[tuple[int, ForgetHost]]:
        """Forget a host that is gone; returns the hosts that were introduced to it, with messages for their agents."""
        pairs = [pair for pair in self._introduced if gone in pair]
        self._introduced.difference_update(pairs)
        others = {host for pair in pairs for host in pair} | {self[gone].parent}
        living = [other for host in sorted(others - {gone}) if (other := self.get(host)) is not None and not other.gone]
        return [(other.host, ForgetHost(gone)) for other in living if other.up]
