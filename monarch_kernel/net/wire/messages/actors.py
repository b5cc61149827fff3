"""Messages that spawn, call and stop actors; messages of channels; and reports about actors and processes."""

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
    """Make an actor; answered once it is ready for calls.

    Attributes:
        actor: The number of the actor; the process that made the number also has the owner.
        payload: ``(class, args, kwargs)``.
        sources: (name, text) of code that is in no file, such as a cell of a notebook.
        owner: The actor that has spawned this one; 0 for the program itself.
        living: For a rank that replaces another: (rank, proc) of each rank on which the same actor still lives.
        renewed: The pickled class, if it has been reloaded since the spawn.
        lineage: The owner, and all that have led to it: number, name, class, axes of the mesh, and rank of each.
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
    lineage: tuple[tuple[int, str, str | None, tuple[tuple[str, int], ...], int], ...] = ()


class Call(Message, frozen=True):
    """Call an endpoint with ``payload``, ``(args, kwargs)``. A ``region`` of None is the whole mesh; id 0 means no answer."""

    id: int
    actor: int
    method: str
    region: tuple[Any, ...] | None
    payload: Payload


class StopActor(Message, frozen=True):
    """Stop an actor: run its cleanup, and forget it; id 0 means no answer."""

    id: int
    actor: int
    reason: str


class ProcessStatus(Message, frozen=True):
    """Report that a watched process (`WatchProcess`) is up and listens at ``address``, or has ended (``death``).

    An empty address means that the process is on another host, and is reached through the host agent. If ``is_replaced``,
    another process replaces it automatically, and its end is no failure to the owners of actors in it. If ``is_retiring``, the
    program has stopped it, and until another `ProcessStatus` its actors may clean up and call others. The process is rank
    ``rank`` of mesh ``mesh``.
    """

    proc: int
    incarnation: int
    address: str
    death: Failure | None = None
    is_replaced: bool = False
    is_retiring: bool = False
    mesh: str = ""
    rank: int = -1


# any -> any


class PortSend(Message, frozen=True):
    """Send a value, or an error, to a port. The receiver is the process that made the number of the port.

    ``rank`` is that of the actor that answers, or sends.
    """

    port: int
    payload: Payload
    rank: int
    failure: Failure | None = None


# rank -> any


class Barrier(Message, frozen=True):
    """Ask for an answer, which arrives after everything that the receiver has sent to the sender. Handled out of band."""

    id: int


class Probe(Message, frozen=True):
    """Report that the wait ``wait`` lasts, and needs ``request``, which the receiver has not answered. Handled out of band.

    If the endpoint that has to end for that waits, too, the receiver passes the probe on to the processes for which it waits.
    ``path`` has the endpoints that the probe has passed, each with the endpoint that it is queued behind; ``round`` counts the
    probes of the wait. See `runtime.rpc.deadlock`.
    """

    wait: int
    round: int
    request: int
    path: tuple[tuple[str, str], ...]


class ActorEnded(Message, frozen=True):
    """Report the end of an actor to the process of its owner.

    ``failure`` is None if the actor was stopped. ``cause`` is the failure that it did not handle, if that ended it.
    """

    actor: int
    failure: Failure | None
    cause: MeshFailure | None = None


# rank -> controller


class WatchProcess(Message, frozen=True):
    """Ask for a `ProcessStatus` when a process is up and when it ends, because the sender has requests for it."""

    proc: int


class CleansUp(Message, frozen=True):
    """Report that an actor of the sender has a ``__cleanup__``, which needs time when the session ends."""


class Unhandled(Message, frozen=True):
    """Report the failure of a mesh that code of a cell, and no actor, has spawned on this rank."""

    failure: MeshFailure
