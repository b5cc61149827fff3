"""What the controller keeps of each host agent, rank and unanswered request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from monarch_kernel.base.events import RankState, StopEvent
from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import Peer, rank_peer
from monarch_kernel.net.wire.codec import Packed
from monarch_kernel.net.wire.messages import RankSpec, Reading, Software
from monarch_kernel.runtime.controller.host_compatibility import Clock
from monarch_kernel.runtime.controller.output_order import OutputOrder
from monarch_kernel.runtime.rpc.answers import Answer

__all__ = ["NO_READING", "HostRecord", "Pending", "RankRecord"]

NO_READING = Reading(0, 0, 0.0)


@dataclass(slots=True)
class HostRecord:
    """A host agent.

    ``is_elsewhere`` says that messages for its ranks go through it, and that it is lost when it is silent for ``lost_after_s``
    seconds. ``addresses`` are where other hosts can dial it. ``parent`` is the host that passes on for it; 0 for none.
    ``successor`` is the host that has come in its place. ``strangers`` counts the connections that it has refused. ``software``
    is what it runs, ``clock`` is how its time compares with ours.
    """

    host: int
    is_elsewhere: bool = False
    lost_after_s: float = float("inf")
    silence_s: float = 0.0
    addresses: tuple[str, ...] = ()
    parent: int = 0
    successor: int = 0
    strangers: int = 0
    software: Software | None = None
    clock: Clock | None = None
    hostname: str = ""
    pid: int = 0
    cpus: int = 0
    gpus: int = 0
    up: bool = False
    gone: bool = False
    end: Failure | None = None
    deadline: float = 0.0
    held: list[Packed] = field(default_factory=list)


@dataclass(slots=True)
class RankRecord:
    """A rank's process; another that takes its place has a record of its own.

    ``has_ended`` says that its host agent has said so, or is gone itself; until then ``death`` is what we have decided.
    ``is_replaced`` says that another takes its place without anybody having to do something about its death.
    ``former`` is who was there before, as long as that one has not ended: this one is not started until then.
    ``address`` is where it listens to other ranks, ``watchers`` are those that have something to ask it.
    ``cleans_up`` says that it has actors that want to clean up when the session ends.
    ``is_adopted`` says that it came up under an earlier controller.
    ``owed`` maps the requests that it has yet to answer to their notes, in order; ``asides`` are those that are no work.
    ``failure`` is what ``last_error`` is the headline of.
    ``names`` is what it has told of its namespace: name -> what kind of thing it is. ``stops`` are the requests that stand
    still in the debugger, and where they do. ``order`` is what it wrote and said, as far as it waits.
    """

    spec: RankSpec
    host: int
    up: bool = False
    pid: int = 0
    device: str = ""
    deadline: float = 0.0
    is_adopted: bool = False
    stopping: bool = False
    cleans_up: bool = False
    death: Failure | None = None
    has_ended: bool = False
    is_replaced: bool = False
    former: RankRecord | None = None
    held: list[Packed] = field(default_factory=list)
    owed: dict[int, str] = field(default_factory=dict)
    asides: set[int] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    stops: dict[int, StopEvent] = field(default_factory=dict)
    busy_since: float = 0.0
    last_request: int = 0
    last_error: str = ""
    failure: Failure | None = None
    last_line: str = ""
    order: OutputOrder = field(default_factory=OutputOrder)
    reading: Reading = NO_READING
    peer: Peer = b""
    address: str = ""
    watchers: dict[Peer, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peer = self.peer or rank_peer(self.spec.proc, self.spec.incarnation)

    @property
    def state(self) -> RankState:
        """In one word."""
        if self.death is not None:
            return "stopped" if self.stopping else "dead"
        if not self.up:
            return "starting"
        if self.owed:
            return "running"
        return "failed" if self.last_error else "idle"


class Pending:
    """A request that has not resolved; ``waiting`` maps the ranks that owe an answer to their places in ``answers``."""

    __slots__ = ("answers", "collectives", "failed_at", "in_step", "keepers", "released_at", "waiting")

    def __init__(self, procs: Sequence[int], keepers: Sequence[int] = ()) -> None:
        self.waiting = {proc: i for i, proc in enumerate(procs)}
        self.answers: list[Answer | None] = [None] * len(procs)
        self.collectives: int | None = None  # as the first rank that answered counts them
        self.in_step = True
        self.failed_at: float | None = None
        self.released_at = 0.0
        self.keepers = keepers  # ranks that keep their answers until they are told that all are in
