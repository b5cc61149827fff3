"""What the program's own process does for others: it starts and ends processes, and has one actor for each name.

It is an actor like others, in the controller's process, but nobody spawns it: it comes up with the first call, and every
process knows its number. What it is asked overlaps: an actor may ask for another while it is itself being made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch_kernel.actor.actor import Actor, EndpointSpec, concurrent_endpoint, endpoint, endpoints_of
from monarch_kernel.actor.actor_mesh import RESERVED, ActorMesh
from monarch_kernel.actor.fault_hook import call_fault_hook
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import MeshFailure
from monarch_kernel.net.wire.codec import dump
from monarch_kernel.net.wire.messages import Spawn
from monarch_kernel.runtime.rpc.client import Asker
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC, first_number

__all__ = ["DIRECTORY", "Processes", "directory_of", "spawn_of"]

DIRECTORY = first_number(0, CONTROLLER_PROC + 1) - 2
"""Its number: the last that the controller could ever make."""

_NAME = "directory"

_ENDING_S = 4.0
"""How long `Processes` waits for them, in seconds: less than their owner waits for it."""


class _Directory(Actor):
    """Serves ranks."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}

    def __supervise__(self, failure: MeshFailure) -> bool:
        """What it has spawned for others is the program's; it goes on, and makes another when it is asked again."""
        call_fault_hook(failure)
        return True

    @concurrent_endpoint
    async def stop_procs(self, mesh: Any, reason: str, grace_s: float) -> None:
        """End the processes of a mesh, as `ProcMesh.stop`."""
        await mesh.stop(reason, grace_s=grace_s)

    @concurrent_endpoint
    async def replace_procs(self, mesh: Any, grace_s: float | None) -> Any:
        """Have others take the places of processes, as `ProcMesh.heal`, or `restart` with a grace."""
        return await (mesh.heal() if grace_s is None else mesh.restart(grace_s=grace_s))

    @concurrent_endpoint
    async def get_or_spawn(self, place: Any, name: str, cls: type[Actor], args: Any, kwargs: Any) -> Any:
        """The actor of this name in the program's process; made with the first call, and again if it has ended."""
        known = self._named.get(name)
        if known is not None and known.initialized.done() and not _lives(known):
            known.stop()
            known = None
        if known is None:
            known = self._named[name] = place.spawn(name, cls, *args, **kwargs)
        await known.initialized
        return known


def _lives(mesh: Any) -> bool:
    """Whether an actor of this process has not ended; it is not asked, for it may be busy."""
    hosted = mesh._asker.workplace.hosted.get(mesh._actor)
    return hosted is not None and not hosted.ended


class Processes(Actor):
    """Keeps the processes that an actor on a rank has asked for, who owns this one: they end with it."""

    def __init__(self) -> None:
        self._mesh: Any = None

    @endpoint
    def start(
        self,
        hosts: Any,
        per_host: Mapping[str, int] | None,
        bootstrap: Callable[[], Any] | None,
        options: dict[str, Any],
    ) -> Any:
        """Start processes on hosts, as `HostMesh.spawn_procs`."""
        self._mesh = hosts.spawn_procs(per_host, bootstrap, **options)
        return self._mesh

    def __cleanup__(self, error: BaseException | None) -> None:
        """End the processes, and wait until they are gone."""
        if self._mesh is not None:
            ending = self._mesh.stop("their owner ended" if error is None else f"their owner failed: {error}")
            ending.wait(_ENDING_S)  # not get(): the session may end meanwhile


class _Place:
    """The program's own process, for a handle."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._base: Sequence[int] = (CONTROLLER_PROC,)


def directory_of(asker: Asker) -> Any:
    """The directory, for whoever has this asker."""
    endpoints: dict[str, EndpointSpec] = endpoints_of(_Directory, RESERVED)
    return ActorMesh(_Place(asker), Region.whole(Extent()), _NAME, DIRECTORY, _Directory, endpoints)


def spawn_of() -> tuple[Spawn, Any]:
    """What makes it, and the frames of that."""
    payload, frames = dump((_Directory, (), {}))
    return Spawn(0, DIRECTORY, _NAME, Region.whole(Extent()).pack(), payload), frames
