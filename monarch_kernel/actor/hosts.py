"""Meshes of hosts, where processes come from."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar, cast

from monarch_kernel.actor.actor import Actor, endpoints_of
from monarch_kernel.actor.answers import check_type
from monarch_kernel.actor.directory import DIRECTORY, Processes, directory_of, spawn_of
from monarch_kernel.actor.endpoints import RESERVED
from monarch_kernel.actor.hosting import host_actors
from monarch_kernel.actor.ports import asker_here
from monarch_kernel.actor.procs import ProcMesh, check_constructor
from monarch_kernel.actor.rankwise import cells_of
from monarch_kernel.agent.processes import gpu_ids
from monarch_kernel.asking.answer import Answer
from monarch_kernel.asking.asker import Asker
from monarch_kernel.asking.future import Future
from monarch_kernel.asking.home import HOME, Handle, opener
from monarch_kernel.asking.numbers import CONTROLLER_PROC
from monarch_kernel.controller.runtime import Runtime
from monarch_kernel.controller.session import Session, close_session, current_session
from monarch_kernel.errors import ActorError, Failure, LaunchError, MonarchError
from monarch_kernel.mesh import Extent, Region, Shaped
from monarch_kernel.supervise.policy import Restart, RestartPolicy
from monarch_kernel.wire.codec import dump_bytes, pack
from monarch_kernel.wire.messages import (
    Ping,
    RankSpec,
)

__all__ = ["HostMesh", "get_or_spawn_controller", "serve_ranks", "shutdown_context", "this_host", "this_proc"]

_MAX_BOOTSTRAP_NBYTES = 1 << 17  # it travels in one packet to the process that forks the ranks

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")
Device = Literal["auto", "cpu", "cuda"]

THE_CALLERS_HOST = 0
"""Stands for the host that a rank is on, until the program gives it its number."""


class HostMesh(Handle, Shaped):
    """Machines of a session."""

    def __init__(self, asker: Asker, region: Region, hosts: Sequence[int]) -> None:
        self._asker = asker
        self._region = region
        self._hosts = hosts

    def __repr__(self) -> str:
        return f"<HostMesh {self.extent}>"

    def _with_region(self, region: Region) -> HostMesh:
        return HostMesh(self._asker, region, self._hosts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_hosts, (self._region, tuple(self._hosts))

    @property
    def _session(self) -> Session:
        """Of the program; what only that knows or can do is not to be had elsewhere."""
        session = getattr(self._asker, "session", None)
        if not isinstance(session, Session):
            raise RuntimeError(
                "this can be done only by the program that has the hosts; ranks can spawn_procs() on them"
            )
        return session

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
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
            bootstrap: a function without arguments, sync or async, that each process runs before it has any actor. If it
                raises, ``initialized`` of the mesh and of what is spawned on it do, too.
            name: what the mesh is called in messages.
            env: added to the environment of the processes.
            device: ``cuda`` gives each process a GPU of its own, ``cpu`` none; ``auto`` is ``cuda`` where there are GPUs.
            restart: what is replaced when a process dies: nothing (``never``), its ``rank``, or the whole ``mesh``; the actors
                that were there are made again (`ProcMesh.heal`).
            max_restarts: how often that is done for the same rank (or the mesh) within ``restart_within_s`` seconds.
            restart_within_s: how long a restart counts.
            backoff_s: how long the second restart waits, in seconds; each further one twice as long, the first not at all.

        Raises:
            TypeError: a name or a value of ``env`` is no str; ``bootstrap`` takes arguments, or can't be sent.
            ValueError: an axis is named twice, there are fewer GPUs than processes, or restarts make no sense.
        """
        policy = RestartPolicy(restart, max_restarts, restart_within_s, backoff_s)
        for key, value in (env or {}).items():
            check_type(f"env[{key!r}]", value, str)
        check_type("name", name, str)
        if per_host is not None and not isinstance(per_host, Mapping):
            raise TypeError(f"per_host takes the sizes of axes by their names, such as {{'gpus': 4}}, not {per_host!r}")
        boot = b"" if bootstrap is None else _pack_bootstrap(bootstrap)
        if not isinstance(self._asker, Runtime):  # on a rank: only the program starts processes
            options: dict[str, Any] = {"name": name, "env": env, "device": device, "restart": restart}
            options |= {"max_restarts": max_restarts, "restart_within_s": restart_within_s, "backoff_s": backoff_s}
            keeper = _program(self._asker).spawn("processes", Processes)
            try:
                return cast(ProcMesh, _rethrow(keeper.start.call_one(self, per_host, bootstrap, options)))
            except Exception:
                keeper.stop("there are no processes to keep")
                raise
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
        if policy.restart != "never":
            runtime.restart_when_lost(procs, policy, self._session.replace_hosts)
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
        """End the session: all processes and agents.

        Raises:
            RuntimeError: this is a rank; only the program can end its session.
        """
        _ = self._session  # only the program has one
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
    return cast(ProcMesh, HOME.place) if HOME.place is not None else serve_ranks(current_session())


def serve_ranks(session: Session) -> ProcMesh:
    """Have the program's own process host actors, and so do what only it can do for ranks; gives it as a mesh."""
    runtime = session.runtime
    mesh = ProcMesh(
        runtime, Region.whole(Extent()), (CONTROLLER_PROC,), "this process", time.monotonic(), Extent(), session
    )
    if runtime.workplace.on_spawn is None:
        host_actors(runtime.workplace, 0, mesh)
        runtime.workplace.services[DIRECTORY] = spawn_of
        runtime.host_actors()
    return mesh


def get_or_spawn_controller(name: str, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> Future[A]:
    """The one actor of this name in the whole job, in the program's own process; spawned by the first call.

    Raises:
        TypeError: the arguments do not fit the constructor, or can't be sent.
        ValueError: the class is no `Actor`, or its endpoints can't be.
        ActorError: of the future: its constructor has raised; the next call makes another.
    """
    check_type("name", name, str)
    endpoints_of(cls, RESERVED)
    assert isinstance(cls, type)
    check_constructor(cls, args, kwargs)
    asker = asker_here()
    if isinstance(asker, Runtime):
        serve_ranks(asker.session)
    future = directory_of(asker).get_or_spawn.call_one(_program(asker), name, cls, args, kwargs)
    return cast("Future[A]", future.read_with(partial(_as_if_here, future.finish)))


def _as_if_here(finish: Callable[[Sequence[Answer]], Any], answers: Sequence[Answer]) -> Any:
    """Read an answer of the directory; what went wrong there is raised as if it had been done here."""
    try:
        return finish(answers)
    except ActorError as error:
        cause = error.exception
        raise (cause if isinstance(cause, MonarchError) else error) from None


def _program(asker: Asker) -> ProcMesh:
    """The process of the program, for whoever has this asker."""
    return ProcMesh(asker, Region.whole(Extent()), (CONTROLLER_PROC,), "the program", time.monotonic(), Extent())


def _rethrow(future: Future[Any]) -> Any:
    """Wait for what the directory does; what went wrong there is raised as if it had been done here."""
    try:
        return future.get()
    except ActorError as error:
        raise error.exception from None


def _open_hosts(region: Region, hosts: Sequence[int]) -> HostMesh:
    """A mesh of hosts that came as an argument or as a result."""
    asker = opener()
    if isinstance(asker, Runtime):
        hosts = [asker.session.local_host() if host == THE_CALLERS_HOST else host for host in hosts]
    return HostMesh(asker, region, hosts)


def this_host() -> HostMesh:
    """The machine of the caller, as a mesh of one host with no axes."""
    if HOME.asker is not None:
        return HostMesh(HOME.asker, Region.whole(Extent()), (THE_CALLERS_HOST,))
    session = current_session()
    serve_ranks(session)
    return HostMesh(session.runtime, Region.whole(Extent()), (session.local_host(),))


def shutdown_context() -> Future[None]:
    """End the session of this process: every mesh, process and agent. A later `this_host` starts a new one."""
    return close_session()
