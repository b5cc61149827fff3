"""What follows from what the controller hears: messages to send, requests that are over, events to tell. Plain data."""

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
    "Due",
    "Effect",
    "Expired",
    "GiveUp",
    "Gone",
    "Halt",
    "Later",
    "LostEvent",
    "RichEvent",
    "Route",
    "Tell",
]


class RichEvent(NamedTuple):
    """A rank displayed something rich."""

    request: int
    rank: int
    data: dict[str, object]
    metadata: dict[str, object]
    mesh: str = ""


class LostEvent(NamedTuple):
    """A rank died that nobody had asked to end."""

    mesh: str
    rank: int
    failure: Failure


class BacklogEvent(NamedTuple):
    """What ranks wrote before this controller attached; ``rank`` of each chunk in ``ranks``."""

    chunks: tuple[OutputChunk, ...]
    ranks: dict[int, int]


class Tell(NamedTuple):
    """Effect: an event for whoever watches."""

    event: OutputEvent | RichEvent | LostEvent | BacklogEvent | StopEvent | ThroughputEvent


class Expired(NamedTuple):
    """Effect: a stage of a start took too long; give up, with what the launcher's log can say.

    ``procs`` are the ranks that have not come up (`Processes.give_up`); empty if it is the host agent that has not, or is
    silent (`Processes.host_gone`), as ``reason`` says.
    """

    host: int
    procs: tuple[int, ...] = ()
    reason: str = ""


class Route(NamedTuple):
    """Effect: a process is reached by way of a host agent."""

    peer: Peer
    host: int


class GiveUp(NamedTuple):
    """Effect: a host is gone; should it be heard of again it is told to end."""

    host: int


class Halt(NamedTuple):
    """Effect: wake the thread that waits for a request, which then calls `Extension.awaited`."""

    id: int


class Due(NamedTuple):
    """Effect: others are to take the places of these processes, those that live, too, for which ``retire`` says why."""

    procs: tuple[int, ...]
    retire: str


class Later(NamedTuple):
    """Effect: work that may wait, such as reading files, on a thread of its own; the effects that it returns follow."""

    work: Callable[[], list[Any]]


class Attached(NamedTuple):
    """Effect: what `State.attach` asked for has come; ``silent`` are the ranks that have not answered yet."""

    silent: tuple[int, ...]


class Gone(NamedTuple):
    """Effect: a rank is dead, or was stopped.

    ``is_told`` says that somebody is told of it in any case: whoever has asked for it, who waits for an answer, or another rank
    that has to do with it.
    """

    proc: int
    incarnation: int
    mesh: str
    rank: int
    death: Failure
    is_told: bool


Effect = GiveUp | Gone | Halt | Route | Send | Resolve | Tell | Expired | Later | Resumed | Attached | Due
