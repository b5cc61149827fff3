"""Requests to host agents: those that wait until agents are up, and those that an agent answers. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import host_peer
from monarch_kernel.net.wire.codec import Packed, pack
from monarch_kernel.net.wire.messages import Detach, Payload
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.process_records import HostRecord
from monarch_kernel.runtime.rpc.answers import Value
from monarch_kernel.runtime.rpc.requests import Resolve, Send

__all__ = ["HostRequests"]


class HostRequests:
    """The requests to host agents that have not resolved.

    Args:
        hosts: By number; owned by the caller.
    """

    def __init__(self, hosts: Mapping[int, HostRecord]) -> None:
        self._hosts = hosts
        self._awaited: dict[int, tuple[int, ...]] = {}
        self._asked: dict[int, int] = {}

    # -- what the program wants

    def await_up(self, id: int, hosts: Sequence[int]) -> list[Effect]:
        """Resolve a request when each of these host agents is up or gone; a failure answers for one that is gone."""
        self._awaited[id] = tuple(hosts)
        return self.resolve_awaited()

    def ask(self, id: int, host: int, packed: Packed) -> list[Effect]:
        """Ask a host agent for one answer; fail if it is not up."""
        record = self._hosts[host]
        if record.gone or not record.up:
            return [_not_up(id, record)]
        self._asked[id] = host
        return [Send(host_peer(host), packed)]

    def detach(self, id: int, host: int, keep_s: float) -> list[Effect]:
        """Ask a host agent to outlive this controller, with its ranks, when the agent is up.

        Args:
            id: The request.
            host: The host.
            keep_s: For how long they wait for another controller, in seconds.
        """
        record = self._hosts[host]
        if record.gone:
            return [_not_up(id, record)]
        self._asked[id] = host
        return [*record.send(pack(Detach(id, keep_s)))]

    # -- what happens

    def resolve_awaited(self) -> list[Effect]:
        """Resolve requests whose hosts are all up or gone."""
        effects: list[Effect] = []
        for id, hosts in list(self._awaited.items()):
            records = [self._hosts[host] for host in hosts]
            if all(record.up or record.gone for record in records):
                del self._awaited[id]
                effects.append(Resolve(id, [record.end or Value(Payload(), (), {}) for record in records], True))
        return effects

    def may_answer(self, id: int, host: int) -> bool:
        """Whether a host may answer a request: it was asked, or the request has resolved."""
        return self._asked.get(id, host) == host

    def answered(self, id: int, data: bytes) -> list[Effect]:
        """Resolve a request with the answer of its host."""
        if self._asked.pop(id, None) is None:
            return []
        return [Resolve(id, [Value(Payload(data), (), {})], True)]

    def host_ended(self, host: int) -> list[Effect]:
        """Resolve the requests that wait for a host that has ended."""
        ids = [id for id, asked in self._asked.items() if asked == host]
        for id in ids:
            del self._asked[id]
        end = self._hosts[host].end
        effects: list[Effect] = [Resolve(id, [end], True) for id in ids if end is not None]
        return [*effects, *self.resolve_awaited()]


def _not_up(id: int, record: HostRecord) -> Resolve:
    return Resolve(id, [record.end or Failure("lost", "HostNotUp", "its host agent is not up yet")], True)
