"""Meshes of hosts, where processes come from."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from monarch_kernel.actor.answers import check_type
from monarch_kernel.actor.instance import host_actors
from monarch_kernel.actor.procs import ProcMesh
from monarch_kernel.actor.rankwise import cells_of
from monarch_kernel.agent.processes import gpu_ids
from monarch_kernel.asking.answer import Answer
from monarch_kernel.asking.future import Future
from monarch_kernel.asking.home import HOME
from monarch_kernel.asking.numbers import CONTROLLER_PROC
from monarch_kernel.controller.session import Session, close_session, current_session
from monarch_kernel.errors import Failure, LaunchError
from monarch_kernel.mesh import Extent, Region, Shaped
from monarch_kernel.wire.codec import dump_bytes, pack
from monarch_kernel.wire.messages import (
    Ping,
    RankSpec,
)

__all__ = ["HostMesh", "shutdown_context", "this_host", "this_proc"]

_MAX_BOOTSTRAP_NBYTES = 1 << 17  # it travels in one packet to the process that forks the ranks

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
        bootstrap: Callable[[], Any] | None = None,
        *,
        name: str = "",
        env: Mapping[str, str] | None = None,
        device: Device = "auto",
    ) -> ProcMesh:
        """Start processes on every host; returns at once, the first answer waits for them.

        Args:
            per_host: axis -> number of processes along it on each host, such as ``{"gpus": 8}``.
            bootstrap: a function without arguments, sync or async, that each process runs before it has any actor. If it
                raises, ``initialized`` of the mesh and of what is spawned on it do, too.
            name: what the mesh is called in messages.
            env: added to the environment of the processes.
            device: ``cuda`` gives each process a GPU of its own, ``cpu`` none; ``auto`` is ``cuda`` where there are GPUs.

        Raises:
            TypeError: a name or a value of ``env`` is no str; ``bootstrap`` takes arguments, or can't be sent.
            ValueError: an axis is named twice, or there are fewer GPUs than processes.
        """
        for key, value in (env or {}).items():
            check_type(f"env[{key!r}]", value, str)
        check_type("name", name, str)
        boot = b"" if bootstrap is None else _pack_bootstrap(bootstrap)
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
                    bootstrap=boot,
                )
                for local_rank in range(per)
            ]
            runtime.start_ranks(self._hosts[base], specs)
        return ProcMesh(runtime, Region.whole(extent), procs, name, time.monotonic(), extent, self._session)

    @property
    def initialized(self) -> Future[bool]:
        """Resolves when every host is up and can start processes; raises a `LaunchError` if one did not come up."""

        def up(answers: Sequence[Answer]) -> bool:
            for answer in answers:
                if isinstance(answer, Failure):
                    raise LaunchError("\n".join([f"a host is gone: {answer.message}", *answer.last_lines]))
            return True

        return self._session.runtime.await_hosts(self._numbers, up)

    def stop(self, reason: str = "stopped by client", *, grace_s: float = 2.0) -> Future[None]:
        """End all processes on these hosts, and with them their actors; the hosts stay, and can start others."""
        runtime = self._session.runtime
        runtime.stop_ranks(runtime.procs_on(self._numbers), reason, grace_s)
        return runtime.request((), lambda id: pack(Ping(id)), "", lambda answers: None)

    @property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(self._hosts[base] for base in self._region.ranks)

    def shutdown(self) -> Future[None]:
        """End the session: all processes and agents."""
        return shutdown_context()


def _pack_bootstrap(function: Callable[[], Any]) -> bytes:
    if not callable(function):
        raise TypeError(f"bootstrap must be a function, not a {type(function).__name__}")
    what = f"bootstrap {getattr(function, '__name__', 'function')}()"
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TypeError(f"{what} is called without arguments: {error}") from None
    except ValueError:
        pass  # a builtin without a signature
    return dump_bytes((function, cells_of(function)), what, _MAX_BOOTSTRAP_NBYTES)


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
