"""Meshes of hosts, where processes come from."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Literal, cast

from monarch_kernel.actor.answers import check_type
from monarch_kernel.actor.instance import host_actors
from monarch_kernel.actor.procs import ProcMesh
from monarch_kernel.agent.processes import gpu_ids
from monarch_kernel.asking.future import Future
from monarch_kernel.asking.home import HOME
from monarch_kernel.asking.numbers import CONTROLLER_PROC
from monarch_kernel.controller.session import Session, close_session, current_session
from monarch_kernel.mesh import Extent, Region, Shaped
from monarch_kernel.supervise.policy import Restart, RestartPolicy
from monarch_kernel.wire.messages import (
    RankSpec,
)

__all__ = ["HostMesh", "shutdown_context", "this_host", "this_proc"]

Device = Literal["auto", "cpu", "cuda"]


class HostMesh(Shaped):
    """Machines of a session."""

    def __init__(self, session: Session, region: Region, hosts: Sequence[int]) -> None:
        self._session = session
        self._region = region
        self._hosts = hosts

    def __repr__(self) -> str:
        return f"<HostMesh {self.extent}>"

    def _with_region(self, region: Region) -> HostMesh:
        return HostMesh(self._session, region, self._hosts)

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        *,
        name: str = "",
        env: Mapping[str, str] | None = None,
        device: Device = "auto",
        restart: Restart = "never",
        max_restarts: int = 3,
        restart_within_s: float = 300.0,
        backoff_s: float = 1.0,
    ) -> ProcMesh:
        """Start processes on every host; returns at once, the first answer waits for them.

        Args:
            per_host: axis -> number of processes along it on each host, such as ``{"gpus": 8}``.
            name: what the mesh is called in messages.
            env: added to the environment of the processes.
            device: ``cuda`` gives each process a GPU of its own, ``cpu`` none; ``auto`` is ``cuda`` where there are GPUs.
            restart: what is replaced when a process dies: nothing (``never``), its ``rank``, or the whole ``mesh``; the actors
                that were there are made again (`ProcMesh.heal`).
            max_restarts: how often that is done for the same rank (or the mesh) within ``restart_within_s`` seconds.
            restart_within_s: how long a restart counts.
            backoff_s: how long the second restart waits, in seconds; each further one twice as long, the first not at all.

        Raises:
            TypeError: a name or a value of ``env`` is no str.
            ValueError: an axis is named twice, there are fewer GPUs than processes, or restarts make no sense.
        """
        policy = RestartPolicy(restart, max_restarts, restart_within_s, backoff_s)
        for key, value in (env or {}).items():
            check_type(f"env[{key!r}]", value, str)
        check_type("name", name, str)
        local = Extent(per_host or {})
        extent = Extent([*self.extent.items(), *local.items()])
        per = local.nelements
        gpus = gpu_ids()
        if device == "auto":
            device = "cuda" if gpus else "cpu"
        if device == "cuda" and per > len(gpus):
            raise ValueError(
                f"{per} processes with a GPU each were asked for, and this machine has {len(gpus)} GPUs; "
                "ask for fewer, or for device='cpu'"
            )
        runtime = self._session.runtime
        world = extent.nelements
        procs = runtime.new_procs(world)
        name = name or f"procs{procs[0]}"
        for i, base in enumerate(self._region.ranks):
            specs = [
                RankSpec(
                    proc=procs[i * per + local_rank],
                    rank=i * per + local_rank,
                    world_size=world,
                    local_rank=local_rank,
                    local_world_size=per,
                    axes=tuple(extent.items()),
                    mesh=name,
                    device=device,
                    threads=max(1, len(os.sched_getaffinity(0)) // per),
                    env={
                        "GLOO_SOCKET_IFNAME": "lo",  # else gloo takes the interface that the host's name resolves to
                        **(env or {}),
                        "CUDA_VISIBLE_DEVICES": gpus[local_rank] if device == "cuda" else "",
                    },
                    cwd=os.getcwd(),
                    sys_path=tuple(sys.path),
                    record=self._session.record_of(procs[i * per + local_rank]),
                )
                for local_rank in range(per)
            ]
            runtime.start_ranks(self._hosts[base], specs)
        if policy.restart != "never":
            runtime.restart_when_lost(procs, policy, self._session.local_host)
        return ProcMesh(runtime, Region.whole(extent), procs, name, time.monotonic(), extent, self._session)

    def shutdown(self) -> Future[None]:
        """End the session: all processes and agents."""
        return shutdown_context()


def this_proc() -> ProcMesh:
    """The process of the caller, as a mesh without axes: a rank for code that runs there, else that of the program itself."""
    if HOME.place is not None:
        return cast(ProcMesh, HOME.place)
    session = current_session()
    runtime = session.runtime
    mesh = ProcMesh(
        runtime, Region.whole(Extent()), (CONTROLLER_PROC,), "this process", time.monotonic(), Extent(), session
    )
    if runtime.workplace.on_spawn is None:
        host_actors(runtime.workplace, 0, mesh)
        runtime.host_actors()
    return mesh


def this_host() -> HostMesh:
    """The machine of the caller, as a mesh of one host with no axes."""
    session = current_session()
    return HostMesh(session, Region.whole(Extent()), (session.local_host(),))


def shutdown_context() -> Future[None]:
    """End the session of this process: every mesh, process and agent. A later `this_host` starts a new one."""
    return close_session()
