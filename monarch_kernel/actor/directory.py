"""What the program's own process does for others: it starts and ends processes, and has one actor for each name.

It is an actor like others, in the controller's process, but nobody spawns it: it comes up with the first call, and every
process knows its number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch_kernel.actor.actor import Actor, EndpointSpec, endpoint, endpoints_of
from monarch_kernel.actor.endpoints import RESERVED, ActorMesh
from monarch_kernel.actor.faults import call_fault_hook
from monarch_kernel.asking.asker import Asker
from monarch_kernel.asking.numbers import CONTROLLER_PROC, first_number
from monarch_kernel.errors import MeshFailure
from monarch_kernel.mesh import Extent, Region
from monarch_kernel.wire.codec import dump
from monarch_kernel.wire.messages import Spawn

__all__ = ["DIRECTORY", "directory_of", "spawn_of"]

DIRECTORY = first_number(0, CONTROLLER_PROC + 1) - 2
"""Its number: the last that the controller could ever make."""

_NAME = "directory"


class _Directory(Actor):
    """Meshes of processes and actors that ranks have asked for."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}

    def __supervise__(self, failure: MeshFailure) -> bool:
        """What it has spawned for others is the program's; it goes on, and makes another when it is asked again."""
        call_fault_hook(failure)
        return True

    @endpoint
    def spawn_procs(
        self,
        hosts: Any,
        per_host: Mapping[str, int] | None,
        bootstrap: Callable[[], Any] | None,
        options: dict[str, Any],
    ) -> Any:
        """Start processes on hosts, as `HostMesh.spawn_procs`."""
        return hosts.spawn_procs(per_host, bootstrap, **options)

    @endpoint
    def stop_procs(self, mesh: Any, reason: str, grace_s: float) -> None:
        """End the processes of a mesh, as `ProcMesh.stop`."""
        mesh.stop(reason, grace_s=grace_s).get()

    @endpoint
    def replace_procs(self, port: Any, mesh: Any, grace_s: float | None) -> None:
        """Have others take the places of processes, as `ProcMesh.heal`, or `restart` with a grace; the port is told the end.

        What is healed may itself ask something here, so this does not wait.
        """
        try:
            future = mesh.heal() if grace_s is None else mesh.restart(grace_s=grace_s)
        except Exception as error:  # it is for whoever waits at the port
            port.exception(error)
            return

        def over() -> None:
            error = future.exception(0)
            if error is None:
                port.send(future.get(0))
            else:
                port.exception(error)

        future.add_done_callback(over)

    @endpoint
    def get_or_spawn(self, place: Any, name: str, cls: type[Actor], args: Any, kwargs: Any) -> Any:
        """The actor of this name in the program's process; made with the first call, and again if it has ended."""
        known = self._named.get(name)
        if known is None or known._ping().exception() is not None:
            known = self._named[name] = place.spawn(name, cls, *args, **kwargs)
            known.initialized.get()
        return known


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
