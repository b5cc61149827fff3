"""Enables a process to host actors."""

from __future__ import annotations

from monarch_kernel.actor.context import carry_into_threads
from monarch_kernel.actor.hosting.actor_host import ActorHost
from monarch_kernel.actor.hosting.async_actor import AsyncRunner
from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.net.wire.messages import Spawn
from monarch_kernel.runtime.worker.actor_server import ActorServer
from monarch_kernel.runtime.worker.executor import Executor

__all__ = ["host_actors"]


def host_actors(actor_server: ActorServer, rank: int, proc_mesh: ProcMesh) -> None:
    """Enable a process to host actors.

    Args:
        actor_server: the actor server of the process.
        rank: the flat rank of the process in its mesh as spawned.
        proc_mesh: that mesh.
    """

    def on_spawn(message: Spawn, executor: Executor) -> None:
        carry_into_threads()
        actor_server.hosted[message.actor] = ActorHost(actor_server, rank, proc_mesh, message, executor, AsyncRunner)

    actor_server.on_spawn = on_spawn
