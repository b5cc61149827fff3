"""News of processes for the ranks that send them requests: where each listens, and how it ended. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import Peer, host_peer, is_rank, proc_of
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import ProcessStatus
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.host_tree import Hosts
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.rpc.requests import Send

__all__ = ["Introductions"]


class Introductions:
    """Tells ranks of the processes that they ask for (`WatchProcess`).

    Args:
        ranks: By number of the process; owned by the caller.
        hosts: The hosts.
        connected: The ranks that have said hello and have not ended; owned by the caller.
    """

    def __init__(self, ranks: Mapping[int, RankRecord], hosts: Hosts, connected: Mapping[Peer, RankRecord]) -> None:
        self._ranks = ranks
        self._hosts = hosts
        self._connected = connected

    def meet(self, proc: int, peer: Peer) -> list[Effect]:
        """Send a rank news of a process now, if that is up or has ended, and whenever this changes."""
        record = self._ranks.get(proc)
        if record is None:
            unknown = Failure("lost", "NoSuchRank", f"this session has no process {proc}")
            return [Send(peer, pack(ProcessStatus(proc, 0, "", unknown)))]
        asking = self._asking(peer)
        if asking is None:  # it has ended meanwhile
            return []
        record.watchers[peer] = None
        return self._news(peer, asking, record) if record.up or record.death is not None else []

    def announce(self, record: RankRecord) -> list[Effect]:
        """Send news of a process to the ranks that want it."""
        effects: list[Effect] = []
        for peer in list(record.watchers):
            asking = self._asking(peer)
            if asking is None:
                del record.watchers[peer]
            else:
                effects += self._news(peer, asking, record)
        return effects

    def _asking(self, peer: Peer) -> RankRecord | None:
        """Return the rank that asks; None if it has ended. The cleanups of a rank that was stopped may call other ranks."""
        connected = self._connected.get(peer)
        if connected is not None or not is_rank(peer):
            return connected
        record = self._ranks.get(proc_of(peer))
        return record if record is not None and record.peer == peer and record.is_retiring else None

    def _news(self, peer: Peer, asking: RankRecord, record: RankRecord) -> list[Effect]:
        spec = record.spec
        effects: list[Effect] = []
        address = record.address
        if asking.host != record.host and record.death is None:
            address = ""
            for host, reach in self._hosts.introduce(asking.host, record.host, record.peer):
                effects.append(Send(host_peer(host), pack(reach)))
        news = ProcessStatus(
            spec.proc,
            spec.incarnation,
            address,
            record.death,
            record.is_replaced,
            record.is_retiring,
            spec.mesh,
            spec.rank,
        )
        return [*effects, Send(peer, pack(news))]
