"""How a process becomes one that hosts actors."""

from __future__ import annotations

from monarch_kernel.actor.context import carry_into_threads
from monarch_kernel.actor.instance import ActorHost
from monarch_kernel.actor.life import AsyncLife
from monarch_kernel.actor.procs import ProcMesh
from monarch_kernel.rank.executor import Executor
from monarch_kernel.rank.workplace import Workplace
from monarch_kernel.wire.messages import Spawn

__all__ = ["host_actors"]


def host_actors(workplace: Workplace, rank: int, proc_mesh: ProcMesh) -> None:
    """Let a process host actors.

    Args:
        workplace: of the process.
        rank: its flat rank in the mesh of processes as spawned.
        proc_mesh: that mesh.
    """

    def on_spawn(message: Spawn, executor: Executor) -> None:
        carry_into_threads()
        workplace.hosted[message.actor] = ActorHost(workplace, rank, proc_mesh, message, executor, AsyncLife)

    workplace.on_spawn = on_spawn
