"""Effects: what the controller must do after an event, as plain data, such as messages to send or requests to resolve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from monarch_kernel.base.events import OutputEvent, StopEvent, ThroughputEvent
from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.base import Peer
from monarch_kernel.net.wire.messages import OutputChunk
from monarch_kernel.runtime.controller.adoption import Resumed
from monarch_kernel.runtime.rpc.requests import Resolve, Send

__all__ = [
    "Attached",
    "BacklogEvent",
    "Effect",
    "Expired",
    "GiveUp",
    "Halt",
    "HostGone",
    "Later",
    "LostEvent",
    "RestartDue",
    "RichEvent",
    "Route",
    "Tell",
]


class RichEvent(NamedTuple):
    """A rank displayed rich output."""

    request: int
    rank: int
    data: dict[str, object]
    metadata: dict[str, object]
    mesh: str = ""


class LostEvent(NamedTuple):
    """A rank died unexpectedly."""

    mesh: str
    rank: int
    failure: Failure


class BacklogEvent(NamedTuple):
    """Output that ranks wrote before this controller attached; ``ranks`` maps each chunk's process to its rank."""

    chunks: tuple[OutputChunk, ...]
    ranks: dict[int, int]


class Tell(NamedTuple):
    """Effect: report an event to the listeners."""

    event: OutputEvent | RichEvent | LostEvent | BacklogEvent | StopEvent | ThroughputEvent


class Expired(NamedTuple):
    """Effect: part of a start took too long; give up, and quote the launcher's log.

    ``procs`` are the ranks that are not up (`RankProcesses.give_up`). If it is empty, the host agent is not up or is silent
    (`RankProcesses.host_gone`), and ``reason`` says which.
    """

    host: int
    procs: tuple[int, ...] = ()
    reason: str = ""


class Route(NamedTuple):
    """Effect: send messages for a process through a host agent."""

    peer: Peer
    host: int


class GiveUp(NamedTuple):
    """Effect: a host is gone; if it sends anything again, it gets a message to end."""

    host: int


class Halt(NamedTuple):
    """Effect: wake the thread that waits for a request, which then calls `Extension.awaited`."""

    id: int


class RestartDue(NamedTuple):
    """Effect: replace these processes now; those that still live end for the reason ``retire``."""

    procs: tuple[int, ...]
    retire: str


class Later(NamedTuple):
    """Effect: run work that may take long, such as reading files, on a separate thread; then perform the effects it returns."""

    work: Callable[[], list[Any]]


class Attached(NamedTuple):
    """Effect: the attempt of `State.attach` is over; ``silent`` are the ranks that have not answered yet."""

    silent: tuple[int, ...]


class HostGone(NamedTuple):
    """Effect: a rank is dead, or was stopped.

    ``is_reported`` says that the death is reported elsewhere in any case: to the caller that asked for it, to a caller that
    waits for an answer, or to another rank that watches this one.
    """

    proc: int
    incarnation: int
    mesh: str
    rank: int
    death: Failure
    is_reported: bool


Effect = GiveUp | HostGone | Halt | Route | Send | Resolve | Tell | Expired | Later | Resumed | Attached | RestartDue
