"""Messages of actors: spawn, call and stop them, channels, and news of processes."""

from __future__ import annotations

from typing import Any

from monarch_kernel.errors import Failure, MeshFailure
from monarch_kernel.net.wire.messages.base import Message, Payload

__all__ = [
    "ActorEnded",
    "Barrier",
    "Call",
    "CleansUp",
    "PortSend",
    "Probe",
    "ProcessStatus",
    "Spawn",
    "StopActor",
    "Unhandled",
    "WatchProcess",
]


# controller -> rank


class Spawn(Message, frozen=True):
    """Make an actor: ``payload`` is ``(class, args, kwargs)``; ``renewed`` is the class, pickled, if it was reloaded since.

    ``sources`` has the text of the code that is in no file, such as a notebook's cell, by its name. ``owner`` is the actor that
    has spawned it, in the process that has made the number ``actor``; 0 for the program itself. ``living`` is for a rank that
    has come in place of another: (rank, proc) of the same actor where it lives on.
    """

    id: int
    actor: int
    name: str
    region: tuple[Any, ...]
    payload: Payload
    sources: tuple[tuple[str, str], ...] = ()
    owner: int = 0
    living: tuple[tuple[int, int], ...] | None = None
    renewed: bytes = b""


class Call(Message, frozen=True):
    """Call an endpoint; ``payload`` is ``(args, kwargs)``, ``region`` the addressed part, None for all; id 0: no answer."""

    id: int
    actor: int
    method: str
    region: tuple[Any, ...] | None
    payload: Payload


class StopActor(Message, frozen=True):
    """Clean an actor up and forget it."""

    id: int
    actor: int
    reason: str


class ProcessStatus(Message, frozen=True):
    """A process that you wanted to meet is up and listens at ``address``, or has ended (``death``).

    Without an address it is on another host, and reached by way of the host agent. One that ``is_replaced`` will have another
    in its place by itself: to owners of what was there that is no failure. Its place is that of ``rank`` in ``mesh``.
    """

    proc: int
    incarnation: int
    address: str
    death: Failure | None = None
    is_replaced: bool = False
    mesh: str = ""
    rank: int = -1


# any -> any


class PortSend(Message, frozen=True):
    """A value, or an error, for a port of the process that has made its number."""

    port: int
    payload: Payload
    failure: Failure | None = None


# rank -> any


class Barrier(Message, frozen=True):
    """Answer at once, whatever runs: all that you have sent me before has then arrived. Has its own lane."""

    id: int


class Probe(Message, frozen=True):
    """The wait ``wait`` lasts, and depends on ``request``, which you owe: pass it on if that waits, too. Has its own lane.

    ``path`` has the endpoints by way of which it has come, each with the one it is queued behind; ``round`` counts the probes
    of the wait. See `runtime.rpc.deadlock`.
    """

    wait: int
    round: int
    request: int
    path: tuple[tuple[str, str], ...]


class ActorEnded(Message, frozen=True):
    """To the process of its owner: an actor is over. Without a failure it was stopped; ``cause`` is what it did not handle."""

    actor: int
    failure: Failure | None
    cause: MeshFailure | None = None


# rank -> controller


class WatchProcess(Message, frozen=True):
    """Tell me when this process is up, and when it ends: I have something to ask it."""

    proc: int


class CleansUp(Message, frozen=True):
    """An actor of mine has a ``__cleanup__``: give me time for it when the session ends."""


class Unhandled(Message, frozen=True):
    """Something has failed that no actor owns, but code which a cell has run on this rank."""

    failure: MeshFailure
