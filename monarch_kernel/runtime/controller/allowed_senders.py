"""Which peer may send which message: a rank speaks for itself, a host agent for itself and for the ranks on its host."""

from __future__ import annotations

from collections.abc import Mapping

from monarch_kernel.net.transport.base import CONTROLLER, Peer, is_rank, proc_of
from monarch_kernel.net.wire.messages import (
    Backlog,
    CleansUp,
    Detached,
    Failed,
    Hello,
    HostEnding,
    HostHello,
    LogRead,
    Lost,
    Message,
    Names,
    Output,
    Readings,
    Result,
    Rich,
    WatchProcess,
)
from monarch_kernel.runtime.controller.extensions import Extension
from monarch_kernel.runtime.controller.host_requests import HostRequests
from monarch_kernel.runtime.controller.process_records import HostRecord, RankRecord

__all__ = ["Senders"]

_OF_RANKS = (Rich, Names, WatchProcess, CleansUp)
"""What a rank may send about itself, besides answers and the messages of extensions."""


class Senders:
    """Checks messages of authenticated peers; all mappings are owned by the caller.

    Args:
        ranks: By number of the process.
        hosts: By number.
        connected: The ranks that have said hello and have not ended.
        host_requests: Requests to host agents.
        extensions: By kind of message, the extension that handles it.
    """

    def __init__(
        self,
        ranks: Mapping[int, RankRecord],
        hosts: Mapping[int, HostRecord],
        connected: Mapping[Peer, RankRecord],
        host_requests: HostRequests,
        extensions: Mapping[type[Message], Extension],
    ) -> None:
        self._ranks = ranks
        self._hosts = hosts
        self._connected = connected
        self._host_requests = host_requests
        self._extensions = extensions

    def may_send(self, peer: Peer, message: Message) -> bool:
        """Whether a peer may send a message."""
        if peer == CONTROLLER:  # this process, where it has actors
            return isinstance(message, (Result, Failed)) and peer in self._connected
        return self._may_rank(peer, message) if is_rank(peer) else self._may_host(int(peer[1:]), message)

    def _may_rank(self, peer: Peer, message: Message) -> bool:
        proc = proc_of(peer)
        record = self._ranks.get(proc)
        if record is None or record.peer != peer:  # another incarnation has replaced it
            return False
        if isinstance(message, Hello):
            return message.proc == proc
        if isinstance(message, (Result, Failed)):
            return peer in self._connected
        extension = self._extensions.get(type(message))
        return isinstance(message, _OF_RANKS) if extension is None else extension.may_send(proc, message)

    def _may_host(self, host: int, message: Message) -> bool:
        if isinstance(message, HostHello):
            procs = [proc for proc, _ in message.incarnations]
            if message.host != host or host not in self._hosts:
                return False
        elif isinstance(message, (Output, Backlog)):
            procs = [chunk.proc for chunk in message.chunks]
            procs += [proc for chunk in message.chunks for proc, _ in chunk.also]
        elif isinstance(message, Readings):
            procs = [reading.proc for reading in message.ranks]
        elif isinstance(message, Lost):
            procs = [message.proc]
        elif isinstance(message, HostEnding):
            return host in self._hosts
        elif isinstance(message, LogRead | Detached):
            return self._host_requests.may_answer(message.id, host)
        else:
            return False
        return all(proc in self._ranks and self._ranks[proc].host == host for proc in procs)
