"""News of processes for the ranks that send them requests: where each listens, and how it ended. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import Peer, host_peer
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
        if peer not in self._connected:  # the rank has ended meanwhile
            return []
        record.watchers[peer] = None
        return self._news(peer, record) if record.up or record.death is not None else []

    def announce(self, record: RankRecord) -> list[Effect]:
        """Send news of a process to the ranks that want it."""
        for peer in [peer for peer in record.watchers if peer not in self._connected]:
            del record.watchers[peer]
        return [effect for peer in record.watchers for effect in self._news(peer, record)]

    def _news(self, peer: Peer, record: RankRecord) -> list[Effect]:
        spec, asking = record.spec, self._connected[peer].host
        effects: list[Effect] = []
        address = record.address
        if asking != record.host and record.death is None:
            address = ""
            for host, reach in self._hosts.introduce(asking, record.host, record.peer):
                effects.append(Send(host_peer(host), pack(reach)))
        news = ProcessStatus(
            spec.proc, spec.incarnation, address, record.death, record.is_replaced, spec.mesh, spec.rank
        )
        return [*effects, Send(peer, pack(news))]
