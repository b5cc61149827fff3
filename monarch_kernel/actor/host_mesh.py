"""Meshes of hosts, where processes come from."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar, cast

from monarch_kernel.actor.actor import Actor, endpoints_of
from monarch_kernel.actor.actor_mesh import RESERVED
from monarch_kernel.actor.channels import asker_here
from monarch_kernel.actor.hosting.install import host_actors
from monarch_kernel.actor.per_rank import cells_of
from monarch_kernel.actor.proc_mesh import ProcMesh, check_constructor
from monarch_kernel.actor.process_service import DIRECTORY, Processes, directory_of, spawn_of
from monarch_kernel.base.events import HostsView
from monarch_kernel.base.mesh import Extent, Region, Shaped
from monarch_kernel.errors import ActorError, Failure, LaunchError, MonarchError, SupervisionError
from monarch_kernel.launch.base import Launcher
from monarch_kernel.net.wire.codec import dump_bytes
from monarch_kernel.net.wire.config import LEAST_SILENCE_S
from monarch_kernel.net.wire.messages import RankSpec
from monarch_kernel.runtime.controller.host_compatibility import Comparison
from monarch_kernel.runtime.controller.restarts import Restart, RestartPolicy
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.controller.session import Session, close_session, current_session
from monarch_kernel.runtime.host.processes import gpu_ids
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Asker
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import check_type, gather
from monarch_kernel.runtime.rpc.handles import HOME, Handle, opener
from monarch_kernel.runtime.rpc.ids import CONTROLLER_PROC

__all__ = [
    "HostMesh",
    "allocate",
    "get_or_spawn_controller",
    "hosts_of",
    "lost_hosts",
    "serve_ranks",
    "shutdown_context",
    "this_host",
    "this_proc",
]

_MAX_BOOTSTRAP_NBYTES = 1 << 17  # it travels in one packet to the process that forks the ranks

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")
Device = Literal["auto", "cpu", "cuda"]


def lost_hosts(mesh: ProcMesh) -> HostMesh | None:
    """The hosts elsewhere of some processes that are lost, or are asked for or have come in their places; None if none is."""
    session = mesh._session
    if session is None:
        return None
    fleet = session.runtime.fleet
    gone = [host for host in fleet.not_up(mesh.procs) if session.launcher_of(host) is not None]
    return HostMesh(session.runtime, Region.whole(Extent({"hosts": len(gone)})), gone) if gone else None


class HostMesh(Handle, Shaped):
    """Machines of a session.

    Args:
        asker: carries requests.
        region: which of the hosts.
        hosts: their numbers; a negative one stands for the host of that process, which only the program knows.
    """

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
        axes: Mapping[str, int] | None = None,
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
            device: ``cuda`` gives each process a GPU of its own, ``cpu`` none; ``auto`` is ``cuda`` where there are GPUs (of
                this machine; elsewhere: where there are as many as processes, which each host sees for itself).
            axes: the axes of all processes, such as ``{"dp": 4, "tp": 4}`` on 2 hosts with 8 each; left out, those of the hosts
                and then those of ``per_host``. Processes are numbered host by host.
            restart: what is replaced when a process dies: nothing (``never``), its ``rank``, or the whole ``mesh``; the actors
                that were there are made again (`ProcMesh.heal`).
            max_restarts: how often that is done for the same rank (or the mesh) within ``restart_within_s`` seconds.
            restart_within_s: how long a restart counts.
            backoff_s: how long the second restart waits, in seconds; each further one twice as long, the first not at all.

        Raises:
            TypeError: a name or a value of ``env`` is no str; ``bootstrap`` takes arguments, or can't be sent.
            ValueError: an axis is named twice, axes do not fit the number of processes, there are fewer GPUs than processes, or
                restarts make no sense.
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
            options |= {
                "axes": axes,
                "max_restarts": max_restarts,
                "restart_within_s": restart_within_s,
                "backoff_s": backoff_s,
            }
            keeper = _program(self._asker).spawn("processes", Processes)
            try:
                return cast(ProcMesh, _rethrow(keeper.start.call_one(self, per_host, bootstrap, options)))
            except Exception:
                keeper.stop("there are no processes to keep")
                raise
        local = Extent(per_host or {})
        per = local.nelements
        world = len(self) * per
        extent = Extent(axes if axes is not None else [*self.extent.items(), *local.items()])
        if extent.nelements != world:
            raise ValueError(f"axes {dict(extent)} have {extent.nelements} places, for {world} processes")
        session = self._session
        runtime = session.runtime
        numbers = self._numbers
        are_here = [session.launcher_of(number) is None for number in numbers]
        share = _share_here(per, device) if any(are_here) else None
        procs = runtime.new_procs(world)
        name = name or f"procs{procs[0]}"
        for i, (number, is_here) in enumerate(zip(numbers, are_here, strict=True)):
            # A host elsewhere fills in by itself what is not known here.
            known = share if share is not None and is_here else None
            specs = [
                RankSpec(
                    proc=procs[i * per + local_rank],
                    rank=i * per + local_rank,
                    world_size=world,
                    local_rank=local_rank,
                    local_world_size=per,
                    axes=tuple(extent.items()),
                    mesh=name,
                    device=known.device if known else device,
                    threads=known.threads if known else 0,
                    env=known.environment(local_rank, env or {}) if known else dict(env or {}),
                    cwd=os.getcwd(),
                    sys_path=tuple(sys.path),
                    record=session.record_of(procs[i * per + local_rank], is_here=is_here),
                    bootstrap=boot,
                )
                for local_rank in range(per)
            ]
            runtime.start_ranks(number, specs)
        if policy.restart != "never":
            runtime.restart_when_lost(procs, policy, session.replace_hosts)
        return ProcMesh(runtime, Region.whole(extent), procs, name, time.monotonic(), extent, session)

    @property
    def initialized(self) -> Future[bool]:
        """Resolves when every host is up and can start processes; raises a `LaunchError` if one did not come up."""
        numbers = self._numbers

        def up(answers: Sequence[Answer]) -> bool:
            ended = [(i, answer) for i, answer in enumerate(answers) if isinstance(answer, Failure)]
            if ended:
                said = [f"{len(ended)} of {len(numbers)} hosts are gone:"] if len(numbers) > 1 else []
                for i, failure in ended:
                    what = f"host {i}" if len(numbers) > 1 else "a host is gone"
                    said += [f"{what}: {failure.message}", *failure.last_lines]
                raise LaunchError("\n".join([*said, *self.hints()]))
            return True

        return self._session.runtime.fleet.wait_for(numbers, up)

    def view(self) -> HostsView:
        """The hosts as they are now, for showing."""
        session, numbers = self._session, self._numbers
        launcher = session.launcher_of(numbers[0])
        hosts = session.runtime.fleet.views(numbers)
        is_coming = any(host.state == "starting" for host in hosts)
        return HostsView(
            "" if launcher is None else launcher.name, hosts, launcher.progress() if launcher and is_coming else ""
        )

    def hints(self) -> list[str]:
        """Lines that help where hosts did not come: what runs where, and which way their agents have to this program."""
        lines = list(self.compare().table)
        session, numbers = self._session, self._numbers
        unheard = [view.number for view in session.runtime.fleet.views(numbers) if view.is_unheard]
        addresses = session.addresses_for(unheard[0]) if unheard else ()
        if addresses:
            lines.append(
                f"agents connect to this machine, at {' or '.join(addresses)}: can that be reached from there, "
                "or is there a firewall, or no network between?"
            )
        return lines

    def compare(self) -> Comparison:
        """What those that have come run, and their clocks, beside what is here."""
        return self._session.runtime.fleet.compare(self._numbers)

    def stop(self, reason: str = "stopped by client", *, grace_s: float = 2.0) -> Future[None]:
        """End all processes on these hosts, and with them their actors; the hosts stay, and can start others.

        Arguments, result and errors are those of `ProcMesh.stop`.
        """
        runtime = self._session.runtime
        procs = runtime.fleet.procs_on(self._numbers)
        finish = gather(
            Region.whole(Extent({"processes": len(procs)})), "stopping hosts", SupervisionError, lambda _: None
        )

        def stopped(answers: Sequence[Answer]) -> None:
            finish(answers)

        return runtime.stop_ranks(procs, reason, stopped, grace_s)

    @property
    def _numbers(self) -> tuple[int, ...]:
        """Of the agents that are there now: others may have come in their places."""
        now = self._session.runtime.fleet.now
        return tuple(now(self._hosts[base]) for base in self._region.ranks)

    def shutdown(self) -> Future[None]:
        """End all processes on these hosts, and give the hosts back to the engine; of this machine: end the session.

        Raises:
            RuntimeError: this is a rank; only the program can end its session.
        """
        session, numbers = self._session, self._numbers
        if any(session.launcher_of(number) is None for number in numbers):
            return shutdown_context()
        session.release_hosts(numbers, "its host was given back")
        return Future.resolved(None)


@dataclass(frozen=True)
class _Share:
    """What each of the processes on this machine gets of it.

    Attributes:
        device: ``cuda`` or ``cpu``.
        threads: of its own.
        gpus: of this machine.
    """

    device: str
    threads: int
    gpus: Sequence[str]

    def environment(self, local_rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """Of one of them."""
        return {
            "GLOO_SOCKET_IFNAME": "lo",  # else gloo takes the interface that the host's name resolves to
            **env,
            "CUDA_VISIBLE_DEVICES": self.gpus[local_rank] if self.device == "cuda" else "",
        }


def _share_here(per_host: int, device: Device) -> _Share:
    """What processes get of this machine.

    Raises:
        ValueError: it has fewer GPUs.
    """
    gpus = gpu_ids()
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and per_host > len(gpus):
        raise ValueError(
            f"{per_host} processes with a GPU each were asked for, and this machine has {len(gpus)} GPUs; "
            "ask for fewer, or for device='cpu'"
        )
    return _Share(device, max(1, len(os.sched_getaffinity(0)) // per_host), gpus)


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
        hosts = [host if host > 0 else asker.session.host_of(-host) for host in hosts]
    return HostMesh(asker, region, hosts)


def this_host() -> HostMesh:
    """The machine of the caller, as a mesh of one host with no axes."""
    if HOME.asker is not None:
        return HostMesh(HOME.asker, Region.whole(Extent()), (-HOME.place.procs[0],))
    session = current_session()
    serve_ranks(session)
    return HostMesh(session.runtime, Region.whole(Extent()), (session.local_host(),))


def allocate(
    launcher: Launcher, hosts: int = 4, *, axis: str = "hosts", timeout_s: float = 600.0, lost_after_s: float = 1.0
) -> HostMesh:
    """Ask an engine for hosts; returns at once, processes can be spawned there before they are up.

    They are given back by ``shutdown`` of the mesh, and when the session ends.

    Args:
        launcher: of the engine, such as ``SshLauncher(hosts=["a", "b"])``.
        hosts: how many.
        axis: what the axis along them is called.
        timeout_s: how long they may take to come, in seconds; one that has not come by then is lost.
        lost_after_s: how long one may be silent, in seconds, before it is lost; at least 0.5.

    Raises:
        LaunchError: the engine can't be reached, or will never have that many.
        RuntimeError: this is a rank; only the program can ask for hosts.
        ValueError: a number makes no sense.
    """
    check_type("axis", axis, str)
    for what, value in (("hosts", hosts), ("timeout_s", timeout_s), ("lost_after_s", lost_after_s)):
        if not value > 0:
            raise ValueError(f"{what} must be more than 0, not {value}")
    if lost_after_s < LEAST_SILENCE_S:
        raise ValueError(
            f"lost_after_s must be at least {LEAST_SILENCE_S}, not {lost_after_s}: hosts say four times a second that they "
            "are there"
        )
    if HOME.asker is not None:
        raise RuntimeError(
            "hosts are asked for by the program, not by a rank; ranks can spawn_procs() on those that it has"
        )
    return hosts_of(current_session(), launcher, hosts, axis=axis, timeout_s=timeout_s, lost_after_s=lost_after_s)


def hosts_of(
    session: Session, launcher: Launcher, hosts: int, *, axis: str = "hosts", timeout_s: float, lost_after_s: float
) -> HostMesh:
    """Ask an engine for hosts of a session; arguments as for `allocate`."""
    region = Region.whole(Extent({axis: hosts}))  # an error in the name comes before the engine starts anything
    serve_ranks(session)
    numbers = session.add_hosts(launcher, hosts, timeout_s=timeout_s, lost_after_s=lost_after_s)
    return HostMesh(session.runtime, region, numbers)


def shutdown_context() -> Future[None]:
    """End the session of this process: every mesh, process and agent. A later `this_host` starts a new one."""
    return close_session()
