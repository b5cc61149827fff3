"""Who is asking, and whom: the context of the endpoint that runs."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from monarch_kernel.mesh import Extent, Point

__all__ = ["ActorInstance", "Context", "context", "current_actor_name", "current_rank", "current_size", "running"]


@dataclass(frozen=True, slots=True)
class ActorInstance:
    """One actor on one rank.

    Attributes:
        name: as given to ``spawn``.
        actor_id: number of the spawn in its session.
        rank: place in the mesh as spawned.
        proc_mesh: the processes that it was spawned on; None for the program itself.
    """

    name: str
    actor_id: int
    rank: Point
    proc_mesh: Any = None
    _flat: int = 0

    @property
    def proc(self) -> Any:
        """Its own process, as a mesh without axes; None for the program itself."""
        return None if self.proc_mesh is None else self.proc_mesh.process(self._flat)


@dataclass(frozen=True, slots=True)
class Context:
    """What an endpoint may ask about itself.

    Attributes:
        actor_instance: the actor that runs.
        message_rank: its place within the mesh that was addressed.
    """

    actor_instance: ActorInstance
    message_rank: Point


_NOWHERE = Point(0, Extent())
_ROOT = Context(ActorInstance("client", 0, _NOWHERE), _NOWHERE)

running: ContextVar[Context] = ContextVar("monarch_kernel_context", default=_ROOT)
"""Set by the rank around each endpoint; the default is the controller's own."""


def context() -> Context:
    """The context of the endpoint that runs; outside of one, the controller's."""
    return running.get()


def current_rank() -> Point:
    """Place of this actor within the mesh that was addressed."""
    return running.get().message_rank


def current_size() -> Extent:
    """Axes and sizes of the mesh that was addressed."""
    return running.get().message_rank.extent


def current_actor_name() -> str:
    """Name of the actor that runs; ``client`` on the controller."""
    return running.get().actor_instance.name
