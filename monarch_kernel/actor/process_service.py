"""The directory: an actor in the program's own process that starts and ends processes for ranks, and finds actors by name.

No code spawns this actor: it starts with the first call, and every process knows its number. Its endpoints are concurrent,
because an actor may ask for another one in its constructor.
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
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC, first_number

__all__ = ["DIRECTORY", "Processes", "directory_of", "spawn_of"]

DIRECTORY = first_number(0, CONTROLLER_PROC + 1) - 2
"""The number of the directory: the last number that the controller could make."""

_NAME = "directory"

_ENDING_S = 4.0
"""How long `Processes` waits for the end of its processes, in seconds; their owner waits longer for `Processes`."""


class _Directory(Actor):
    """Starts and ends processes for ranks, and holds the actors of `get_or_spawn_controller`."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Call the fault hook of the program, and go on. The next request for the actor spawns a new one."""
        call_fault_hook(failure)
        return True

    @concurrent_endpoint
    async def stop_procs(self, mesh: Any, reason: str, grace_s: float) -> None:
        """End the processes of a mesh, as `ProcMesh.stop` does."""
        await mesh.stop(reason, grace_s=grace_s)

    @concurrent_endpoint
    async def replace_procs(self, mesh: Any, grace_s: float | None) -> Any:
        """Replace processes of a mesh, as `ProcMesh.heal` does; with a grace time, as `ProcMesh.restart` does."""
        return await (mesh.heal() if grace_s is None else mesh.restart(grace_s=grace_s))

    @concurrent_endpoint
    async def get_or_spawn(self, place: Any, name: str, cls: type[Actor], args: Any, kwargs: Any) -> Any:
        """Return the actor with this name. The first call spawns it, and so does the next call after it has ended."""
        known = self._named.get(name)
        if known is not None and known.initialized.done() and not _lives(known):
            known.stop()
            known = None
        if known is None:
            known = self._named[name] = place.spawn(name, cls, *args, **kwargs)
        await known.initialized
        return known


def _lives(mesh: Any) -> bool:
    """Whether an actor of this process has not ended. This sends no request to the actor, which may be busy."""
    hosted = mesh._client.actor_server.hosted.get(mesh._actor)
    return hosted is not None and not hosted.ended


class Processes(Actor):
    """Holds the processes that an actor on a rank has started. That actor owns this one, so the processes end with it."""

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
        """Start processes on hosts, as `HostMesh.spawn_procs` does."""
        self._mesh = hosts.spawn_procs(per_host, bootstrap, **options)
        return self._mesh

    def __cleanup__(self, error: BaseException | None) -> None:
        """End the processes, and wait until they are gone."""
        if self._mesh is not None:
            ending = self._mesh.stop("their owner ended" if error is None else f"their owner failed: {error}")
            ending.wait(_ENDING_S)  # get() would raise if the session ends meanwhile


class _ProgramProcs:
    """The program's own process, as the handle of the directory needs it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._base: Sequence[int] = (CONTROLLER_PROC,)


def directory_of(client: Client) -> Any:
    """Return a handle of the directory that uses this client."""
    endpoints: dict[str, EndpointSpec] = endpoints_of(_Directory, RESERVED)
    return ActorMesh(_ProgramProcs(client), Region.whole(Extent()), _NAME, DIRECTORY, _Directory, endpoints)


def spawn_of() -> tuple[Spawn, Any]:
    """Return the message that spawns the directory, and its frames."""
    payload, frames = dump((_Directory, (), {}))
    return Spawn(0, DIRECTORY, _NAME, Region.whole(Extent()).pack(), payload), frames
