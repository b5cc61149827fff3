"""The controller's records of host agents and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from monarch_kernel.base.events import RankState
from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import Peer, host_peer, rank_peer
from monarch_kernel.net.wire.codec import Packed
from monarch_kernel.net.wire.messages import RankSpec, Reading, Software
from monarch_kernel.runtime.controller.host_compatibility import Clock
from monarch_kernel.runtime.controller.output_order import OutputOrder
from monarch_kernel.runtime.rpc.requests import Recipient, Send

__all__ = ["NO_READING", "HostRecord", "RankRecord"]

NO_READING = Reading(0, 0, 0.0)


@dataclass(slots=True)
class HostRecord:
    """A host agent.

    Attributes:
        host: Its number.
        is_elsewhere: Whether it is on another machine, so that messages for its ranks go through it.
        lost_after_s: After how many seconds of silence it counts as lost.
        silence_s: For how long it has been silent, in seconds.
        addresses: Where other hosts can connect to it.
        parent: The host that relays its messages; 0 for none.
        successor: The host that has replaced it; 0 for none.
        refused_connections: The number of connections that it has refused.
        software: The versions that it runs.
        clock: Its clock compared with the controller's.
        hostname: The name of its machine.
        pid: Its process id.
        cpus: CPU slots.
        gpus: GPUs.
        up: Whether it has said hello.
        is_ending: Whether something has asked it to end, so that it starts no more ranks.
        gone: Whether it has ended, or the controller has given it up.
        end: How it ended.
        deadline: When it must be up.
        held: Messages that wait until it is up, in order.
    """

    host: int
    is_elsewhere: bool = False
    lost_after_s: float = float("inf")
    silence_s: float = 0.0
    addresses: tuple[str, ...] = ()
    parent: int = 0
    successor: int = 0
    refused_connections: int = 0
    software: Software | None = None
    clock: Clock | None = None
    hostname: str = ""
    pid: int = 0
    cpus: int = 0
    gpus: int = 0
    up: bool = False
    is_ending: bool = False
    gone: bool = False
    end: Failure | None = None
    deadline: float = 0.0
    held: list[Packed] = field(default_factory=list)

    def send(self, packed: Packed) -> list[Send]:
        """Send a message to the host agent, now or when it is up."""
        if self.up:
            return [Send(host_peer(self.host), packed)]
        if not self.gone:
            self.held.append(packed)
        return []


@dataclass(slots=True)
class RankRecord(Recipient):
    """A rank's process. A process that replaces it has the same number, but another incarnation and another record.

    Attributes:
        spec: The spec that it was started with.
        host: The number of its host agent.
        pid: Its process id on that host.
        device: Such as ``"cuda:0"``.
        deadline: When it must be up.
        up_at: When it came up, or the first of the processes that it replaces; 0 if none has been up yet.
        is_adopted: Whether an earlier controller started it.
        stopping: Whether the program has stopped it.
        cleans_up: Whether it has actors that clean up when the session ends.
        has_ended: Whether its host agent has reported its end or has ended itself. ``death`` can be set before, by a
            decision of the controller.
        is_replaced: Whether another process replaces it, so that its death needs no attention.
        former: The process that it replaces, until that process has ended. Only then does this one start.
        view: The number of the view of hosts through which the program spawned it; 0 for the hosts themselves.
        out_of_band: Requests that it has not answered yet and that do not count as work.
        names: The names in its namespace, with the kind of each value.
        last_request: The request that it worked on last.
        last_error: The headline of ``failure``; empty if the last request succeeded.
        failure: How the last request failed.
        failed_at: When it failed or died.
        last_line: The last line that it wrote since its last cell was sent.
        order: Output and messages that wait for their turn.
        reading: The last measurements of its host agent.
        address: Where it listens for other ranks.
        watchers: The ranks that get news of it.
        groups: How many process groups of torch.distributed it has made, as far as is known; -1 if it has none.
        group_size: How many ranks are in its default process group; 0 if it has none, -1 if that is not known, -2 if the group
            is unusable.
    """

    spec: RankSpec
    host: int
    pid: int = 0
    device: str = ""
    deadline: float = 0.0
    up_at: float = 0.0
    is_adopted: bool = False
    stopping: bool = False
    cleans_up: bool = False
    has_ended: bool = False
    is_replaced: bool = False
    former: RankRecord | None = None
    view: int = 0
    out_of_band: set[int] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    last_request: int = 0
    last_error: str = ""
    failure: Failure | None = None
    failed_at: float = 0.0
    last_line: str = ""
    order: OutputOrder = field(default_factory=OutputOrder)
    reading: Reading = NO_READING
    address: str = ""
    watchers: dict[Peer, None] = field(default_factory=dict)
    groups: int = -1
    group_size: int = -1

    def __post_init__(self) -> None:
        self.peer = self.peer or rank_peer(self.spec.proc, self.spec.incarnation)

    def forget(self) -> None:
        """Free what is of no use once the process was stopped and has ended: a session may have had very many."""
        self.spec = self.spec.ended()
        self.order = OutputOrder()
        self.names, self.watchers, self.open_requests, self.out_of_band = {}, {}, {}, set()

    @property
    def is_retiring(self) -> bool:
        """Whether the program has stopped it, and it may still run the cleanups of its actors."""
        return self.stopping and self.up and not self.has_ended

    @property
    def state(self) -> RankState:
        """Its state in one word."""
        if self.death is not None:
            return "stopped" if self.stopping else "dead"
        if not self.up:
            return "starting"
        if self.open_requests:
            return "running"
        return "failed" if self.last_error else "idle"
