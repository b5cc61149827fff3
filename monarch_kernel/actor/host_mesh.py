"""Meshes of hosts, which start processes."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from monarch_kernel.actor.actor import Actor, endpoints_of
from monarch_kernel.actor.actor_mesh import RESERVED
from monarch_kernel.actor.channels import client_here
from monarch_kernel.actor.done_awaitable import DoneAwaitable
from monarch_kernel.actor.hosting.enable_hosting import host_actors
from monarch_kernel.actor.per_rank import cells_of
from monarch_kernel.actor.proc_mesh import ProcMesh, check_constructor
from monarch_kernel.actor.process_service import DIRECTORY, Processes, directory_of, spawn_of
from monarch_kernel.actor.spawning import SPAWN_DEFAULTS, BootstrapCommand, Device, check_binds, starts, steps
from monarch_kernel.base.events import HostsView
from monarch_kernel.base.frontend import shows_all_output
from monarch_kernel.base.mesh import Extent, Point, Region, Shaped
from monarch_kernel.base.text import plural
from monarch_kernel.errors import ActorError, Failure, LaunchError, MonarchError, SupervisionError
from monarch_kernel.launch.base import Launcher
from monarch_kernel.net.wire.codec import dump_bytes
from monarch_kernel.net.wire.config import LEAST_SILENCE_S, SAME
from monarch_kernel.net.wire.messages import RankSpec
from monarch_kernel.runtime.controller.environment import read_at_start
from monarch_kernel.runtime.controller.host_compatibility import Comparison
from monarch_kernel.runtime.controller.restart_policy import Restart, RestartPolicy
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.controller.session import Session, close_session, current_session
from monarch_kernel.runtime.host.gpus import gpu_ids
from monarch_kernel.runtime.host.resources import TooFewGpusError, assign_resources
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.client import Client
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import check_title, check_type, gather
from monarch_kernel.runtime.rpc.handles import PROCESS, Handle, client_for_unpickling
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

_MAX_BOOTSTRAP_NBYTES = 1 << 17  # one packet carries it to the process that forks the ranks

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")


def lost_hosts(mesh: ProcMesh) -> HostMesh | None:
    """Return the remote hosts of some processes that are lost or being replaced, as a mesh; None if there are none."""
    session = mesh._session
    if session is None:
        return None
    host_pool = session.runtime.host_pool
    gone = [host for host in host_pool.not_up(mesh.procs) if session.launcher_of(host) is not None]
    return HostMesh(session.runtime, Region.whole(Extent({"hosts": len(gone)})), gone) if gone else None


class HostMesh(Handle, Shaped):
    """Hosts of a session. They start processes.

    Args:
        client: sends the requests.
        region: the hosts that the mesh includes.
        hosts: numbers of all hosts. A negative number stands for the host of that process, which only the program knows.
        python: the interpreter of processes; empty for that of their host.
        view: which of several views of the same hosts this is (`view_of`); 0 for the hosts as they were allocated.
    """

    is_fake_in_process = False
    """Whether actors run in the process of the program; they never do."""

    stream_logs = True
    """Whether output of processes reaches the program; it always does."""

    def __init__(self, client: Client, region: Region, hosts: Sequence[int], python: str = "", view: int = 0) -> None:
        self._python = python
        self._view = view
        self._client = client
        self._region = region
        self._hosts = hosts

    def __repr__(self) -> str:
        return f"<HostMesh {self.extent}>"

    def _with_region(self, region: Region) -> HostMesh:
        return HostMesh(self._client, region, self._hosts, self._python, self._view)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_hosts, (self._region, tuple(self._hosts), self._python, self._view)

    @property
    def region(self) -> Region:
        """The hosts of this mesh, in the mesh as it was allocated."""
        return self._region

    def with_python_executable(self, python_executable: str) -> HostMesh:
        """Return the same hosts, on which processes start with this interpreter, as new processes.

        The interpreter must have this package, in this version.
        """
        check_type("python_executable", python_executable, str)
        return HostMesh(self._client, self._region, self._hosts, python_executable, self._view)

    def sync_workspace(self, workspace: Any = None, conda: bool = False, auto_reload: bool = False) -> DoneAwaitable:
        """Do nothing: processes on this machine use the files of this program. Hosts elsewhere need a shared file system.

        Raises:
            RuntimeError: hosts are elsewhere; the text says what to use.
        """
        session = self._session
        if any(session.launcher_of(number) is not None for number in self._numbers):
            raise RuntimeError(
                "files are not copied to other machines: use a shared file system, or send changed modules to the processes of "
                "a mesh with procs.sync() or %mesh sync"
            )
        return DoneAwaitable()

    async def __aenter__(self) -> HostMesh:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all processes on these hosts, and give the hosts back to their engine; this machine goes on with the session."""
        session, numbers = self._session, self._numbers
        is_here = any(session.launcher_of(number) is None for number in numbers)
        await (self.stop() if is_here else self.shutdown())

    @property
    def _session(self) -> Session:
        """The session of the program. It raises in other processes, which can't do what needs the session."""
        session = getattr(self._client, "session", None)
        if not isinstance(session, Session):
            raise RuntimeError("only the program that has the hosts can do this; a rank can call spawn_procs() on them")
        return session

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], Any] | None = None,
        name: str | None = None,
        proc_bind: Sequence[Mapping[str, str]] | None = None,
        bootstrap_command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        device: Device | None = None,
        axes: Mapping[str, int] | None = None,
        restart: Restart = "never",
        max_restarts: int = 3,
        restart_within_s: float = 300.0,
        backoff_s: float = 1.0,
        fresh: bool | None = None,
    ) -> ProcMesh:
        """Start processes on every host. Returns at once; the first request waits until the processes are up.

        Processes on this machine, and those that replace them, have the environment that this program has now, except for
        ``CUDA_VISIBLE_DEVICES`` and the variables of torchrun, such as ``RANK``. On other hosts they have that of the host.

        Args:
            per_host: axis -> number of processes along it on each host, such as ``{"gpus": 8}``.
            bootstrap: a function without arguments, sync or async, that each process runs before it has any actor. If it
                raises, so does ``initialized`` of the mesh and of every actor that is spawned on it.
            name: the name of the mesh in messages.
            env: variables to add to the environment of the processes. If it has one that torch or Python reads when it starts,
                such as ``TORCH_LOGS``, they start as new processes.
            device: ``cuda`` gives each process one GPU, ``cpu`` none. ``auto`` means ``cuda`` on a host that has as many GPUs
                as processes. If ``env`` has ``CUDA_VISIBLE_DEVICES``, processes get the GPUs that it names, in this order.
                ``visible`` gives each process all GPUs that ``CUDA_VISIBLE_DEVICES`` names, and its code chooses one.
            axes: the axes of all processes, such as ``{"dp": 4, "tp": 4}`` on 2 hosts with 8 processes each. By default the
                axes of the hosts and then those of ``per_host``. Processes are numbered host by host.
            restart: what to replace when a process dies: nothing (``never``), its ``rank``, or the whole ``mesh``. The new
                processes make the actors again, as `ProcMesh.heal` does.
            max_restarts: the number of restarts of the same rank (or the mesh) within ``restart_within_s`` seconds.
            restart_within_s: how long a restart counts, in seconds.
            backoff_s: the delay before the second restart, in seconds. Each later restart waits twice as long; the first does
                not wait.
            fresh: whether each process is a new interpreter with nothing imported, and not a fork of one that has imported
                torch. It then imports torch when its code does, which takes a second.
            bootstrap_command: an environment and an interpreter, for code of PyTorch Monarch: ``default_bootstrap_cmd()
                .with_env({...})``, or a function that returns such a command for the point of a process. As there, the value of
                ``CUDA_VISIBLE_DEVICES`` reaches each process as it is.
            proc_bind: for each process of a host the CPUs that it may use, such as ``[{"cpus": "0-3"}, {"cpus": "4-7"}]``;
                ``cpunodebind`` names NUMA nodes.

        Raises:
            TypeError: a name or a value of ``env`` is not a str; ``bootstrap`` takes arguments, or can't be sent.
            ValueError: the name is longer than 200 characters, an axis occurs twice, the axes do not match the number of
                processes, there are fewer GPUs than processes, or the options of restarts are invalid.
            LaunchError: the working directory of this program was deleted.
        """
        policy = RestartPolicy(restart, max_restarts, restart_within_s, backoff_s)
        name = "" if name is None else name
        for key, value in (env or {}).items():
            check_type(f"env[{key!r}]", value, str)
        check_title("name", name)
        if per_host is not None and not isinstance(per_host, Mapping):
            raise TypeError(f"per_host must map names of axes to sizes, such as {{'gpus': 4}}, not {per_host!r}")
        boot = b"" if bootstrap is None else _pack_bootstrap(bootstrap)
        if not isinstance(self._client, Runtime):  # on a rank: only the program starts processes
            options: dict[str, Any] = {"name": name, "env": env, "device": device, "restart": restart}
            options |= {
                "bootstrap_command": bootstrap_command,
                "proc_bind": proc_bind,
                "axes": axes,
                "max_restarts": max_restarts,
                "restart_within_s": restart_within_s,
                "backoff_s": backoff_s,
                "fresh": fresh,
            }
            owner = _program(self._client).spawn("processes", Processes)
            try:
                return cast(ProcMesh, _rethrow(owner.start.call_one(self, per_host, bootstrap, options)))
            except Exception:
                owner.stop("there are no processes to keep")
                raise
        local = Extent(per_host or {})
        per = local.nelements
        if bootstrap_command is not None:
            device = device or "visible"
        device = device or SPAWN_DEFAULTS.device
        if proc_bind is not None:
            check_binds(proc_bind, per)
        boot = steps(SPAWN_DEFAULTS.prepare, proc_bind or (), boot, per, _MAX_BOOTSTRAP_NBYTES)
        world = len(self) * per
        extent = Extent(axes if axes is not None else [*self.extent.items(), *local.items()])
        if extent.nelements != world:
            raise ValueError(
                f"axes {dict(extent)} have {plural(extent.nelements, 'point')}, but there {'is' if world == 1 else 'are'} "
                f"{plural(world, 'process', 'processes')}: name axes whose sizes multiply to {world}"
            )
        all_starts = starts(bootstrap_command, env, self._python, extent)
        session = self._session
        runtime = session.runtime
        if any(session.launcher_of(number) is None for number in self._numbers):
            session.renew_local_host()
        changed = session.environment_changes()
        numbers = self._numbers
        are_here = [session.launcher_of(number) is None for number in numbers]
        cwd = _working_directory()
        all_output = shows_all_output()
        gpus = functools.cache(gpu_ids)
        is_fresh = SPAWN_DEFAULTS.is_fresh if fresh is None else fresh
        procs = runtime.new_procs(world)
        name = name or f"procs{procs[0]}"
        for i, (number, is_here) in enumerate(zip(numbers, are_here, strict=True)):
            values, unset = (changed.values, changed.removed) if is_here else ({}, ())
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
                    threads=0,
                    env={**{name: values[name] for name in values if name not in start.removed}, **start.env},
                    cwd=cwd,
                    sys_path=tuple(sys.path),
                    record=session.record_of(procs[i * per + local_rank], is_here=is_here),
                    bootstrap=boot,
                    unset=(*unset, *start.removed),
                    python=start.python or (SAME if is_fresh or read_at_start([*start.env, *start.removed]) else ""),
                    all_output=all_output,
                )
                for local_rank, start in enumerate(all_starts[i * per : (i + 1) * per])
            ]
            if is_here:  # a remote host fills in the device, the threads and the GPUs itself
                specs = [_complete_here(spec, gpus) for spec in specs]
            runtime.start_ranks(number, specs, view=self._view)
        if policy.restart != "never":
            runtime.replacement.restart_when_lost(procs, policy, session.replace_hosts)
        mesh = ProcMesh(runtime, Region.whole(extent), procs, name, extent, session)
        mesh.place_on(self)
        return mesh

    @property
    def initialized(self) -> Future[bool]:
        """A future that resolves when every host can start processes; it raises a `LaunchError` if a host did not come up."""
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

        return self._session.runtime.host_pool.wait_for(numbers, up)

    @property
    def is_ending(self) -> bool:
        """Whether the agent of a host has ended, or ends because something has asked it to: it starts no more processes."""
        session = self._session
        return not all(map(session.runtime.host_pool.starts_ranks, self._numbers))

    def view(self) -> HostsView:
        """Return the current state of the hosts, for display."""
        session, numbers = self._session, self._numbers
        launcher = session.launcher_of(numbers[0])
        hosts = session.runtime.host_pool.views(numbers)
        is_coming = any(host.state == "starting" for host in hosts)
        return HostsView(
            "" if launcher is None else launcher.name, hosts, launcher.progress() if launcher and is_coming else ""
        )

    def hints(self) -> list[str]:
        """Return lines of help for hosts that did not come up: their versions, and the addresses that agents connect to."""
        lines = list(self.compare().table)
        session, numbers = self._session, self._numbers
        silent = [view.number for view in session.runtime.host_pool.views(numbers) if view.is_silent]
        addresses = session.addresses_for(silent[0]) if silent else ()
        if addresses:
            lines.append(
                f"agents connect to this machine at {' or '.join(addresses)}: check that the hosts can reach it, "
                "and that no firewall blocks it"
            )
        return lines

    def compare(self) -> Comparison:
        """Compare the software and the clocks of the hosts that are up with those of this machine."""
        return self._session.runtime.host_pool.compare(self._numbers)

    def stop(self, reason: str = "stopped by client", *, grace_s: float = 2.0) -> Future[None]:
        """End all processes on these hosts, and with them their actors. The hosts stay, and can start other processes.

        Processes that were spawned through another view of the hosts (`view_of`) go on. The arguments, the result and the
        errors are those of `ProcMesh.stop`.
        """
        runtime = self._session.runtime
        procs = runtime.host_pool.procs_on(self._numbers, self._view)
        if not procs:
            return Future.resolved(None)
        finish = gather(
            Region.whole(Extent({"processes": len(procs)})), "stopping hosts", SupervisionError, lambda _: None
        )

        def stopped(answers: Sequence[Answer]) -> None:
            finish(answers)

        return runtime.stop_ranks(procs, reason, stopped, grace_s)

    @property
    def is_closed(self) -> bool:
        """Whether the session that these hosts are of has ended."""
        return self._session.runtime.closed

    @property
    def _numbers(self) -> tuple[int, ...]:
        """Numbers of the current agents; an agent may have replaced another."""
        now = self._session.runtime.host_pool.now
        return tuple(now(self._hosts[base]) for base in self._region.ranks)

    def shutdown(self) -> Future[None]:
        """End all processes on these hosts and give the hosts back to the engine. For this machine, end the session.

        Raises:
            RuntimeError: a rank called this; only the program can end its session.
        """
        session, numbers = self._session, self._numbers
        if any(session.launcher_of(number) is None for number in numbers):
            return shutdown_context()
        session.release_hosts(numbers, "its host was given back")
        return Future.resolved(None)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "the working directory was deleted, and ranks start in it: change to another, such as with %cd ~ in a notebook"
        ) from None


def _complete_here(spec: RankSpec, gpus: Callable[[str | None], Sequence[str]]) -> RankSpec:
    """Give a process its share of this machine.

    Raises:
        ValueError: the machine has fewer GPUs than processes.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // spec.local_world_size)
    try:
        return assign_resources(spec, os.environ, gpus, "here", "", threads)
    except TooFewGpusError as error:
        raise ValueError(
            f"{plural(error.needed, 'process', 'processes')} requested with a GPU each, but this machine has {error.found}; "
            "spawn fewer processes, or pass device='cpu'"
        ) from None


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
    roots = {getattr(function, "__name__", "function"): function}
    return dump_bytes((function, cells_of(function)), what, _MAX_BOOTSTRAP_NBYTES, roots=roots)


def this_proc() -> ProcMesh:
    """Return the process of the caller as a mesh without axes: the rank that runs the code, or the program itself."""
    return cast(ProcMesh, PROCESS.proc) if PROCESS.proc is not None else serve_ranks(current_session())


def serve_ranks(session: Session) -> ProcMesh:
    """Let the program's own process host actors, such as the directory that serves ranks; return the process as a mesh."""
    runtime = session.runtime
    mesh = ProcMesh(runtime, Region.whole(Extent()), (CONTROLLER_PROC,), "this process", Extent(), session)
    if runtime.actor_server.on_spawn is None:
        host_actors(runtime.actor_server, 0, mesh)
        runtime.actor_server.services[DIRECTORY] = spawn_of
        runtime.host_actors()
    return mesh


PROCESS.program_mesh = this_proc


def get_or_spawn_controller(name: str, Class: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> Future[A]:
    """Return the only actor with this name in the whole job. The first call spawns it in the program's own process.

    Raises:
        TypeError: the arguments do not match the constructor, or can't be sent.
        ValueError: the class is not an `Actor`, its endpoints are invalid, or the name is longer than 200 characters.
        ActorError: raised by the future: the constructor raised. The next call spawns a new actor.
    """
    check_title("name", name)
    endpoints_of(Class, RESERVED)
    assert isinstance(Class, type)
    check_constructor(Class, args, kwargs)
    client = client_here()
    if isinstance(client, Runtime):
        serve_ranks(client.session)
    future = directory_of(client).get_or_spawn.call_one(_program(client), name, Class, args, kwargs)
    return cast("Future[A]", future.read_with(partial(_as_if_here, future.finish)))


def _as_if_here(finish: Callable[[Sequence[Answer]], Any], answers: Sequence[Answer]) -> Any:
    """Read an answer of the directory. An error there is raised as if it had occurred here."""
    try:
        return finish(answers)
    except ActorError as error:
        cause = error.exception
        raise (cause if isinstance(cause, MonarchError) else error) from None


def _program(client: Client) -> ProcMesh:
    """Return the process of the program as a mesh that uses this client."""
    return ProcMesh(client, Region.whole(Extent()), (CONTROLLER_PROC,), "the program", Extent())


def _rethrow(future: Future[Any]) -> Any:
    """Wait for an answer of the directory. An error there is raised as if it had occurred here."""
    try:
        return future.get()
    except ActorError as error:
        raise error.exception from None


def view_of(hosts: HostMesh) -> HostMesh:
    """Return another view of the same hosts. `HostMesh.stop` of a view ends only the processes that were spawned through it."""
    session = hosts._session
    return HostMesh(hosts._client, hosts._region, hosts._hosts, hosts._python, session.runtime.host_pool.new_view())


def _open_hosts(region: Region, hosts: Sequence[int], python: str = "", view: int = 0) -> HostMesh:
    """Make the mesh of hosts that this process received as an argument or a result."""
    client = client_for_unpickling()
    if isinstance(client, Runtime):
        hosts = [host if host > 0 else client.session.host_of(-host) for host in hosts]
    return HostMesh(client, region, hosts, python, view)


def this_host() -> HostMesh:
    """Return the machine of the caller as a mesh of one host without axes.

    On a rank for which `HostMesh.with_python_executable` has chosen an interpreter, processes start with that one, too.
    """
    if PROCESS.client is not None:
        return HostMesh(PROCESS.client, Region.whole(Extent()), (-PROCESS.proc.procs[0],), PROCESS.python)
    session = current_session()
    serve_ranks(session)
    return HostMesh(session.runtime, Region.whole(Extent()), (session.local_host(),))


PROCESS.host_mesh = this_host


def allocate(
    launcher: Launcher, hosts: int = 4, *, axis: str = "hosts", timeout_s: float = 600.0, lost_after_s: float = 1.0
) -> HostMesh:
    """Request hosts from an engine. Returns at once; processes can be spawned on the hosts before they are up.

    ``shutdown`` of the mesh, and the end of the session, give the hosts back.

    Args:
        launcher: the launcher of the engine, such as ``SshLauncher(hosts=["a", "b"])``.
        hosts: the number of hosts.
        axis: the name of the axis along the hosts.
        timeout_s: how long hosts may take to come up, in seconds. A host that is not up by then is lost.
        lost_after_s: how long a host may be silent, in seconds, before it is lost; at least 0.5.

    Raises:
        LaunchError: the engine can't be reached, or can never provide that many hosts.
        RuntimeError: a rank called this; only the program can request hosts.
        ValueError: a number is out of range.
    """
    check_type("axis", axis, str)
    for what, value in (("hosts", hosts), ("timeout_s", timeout_s), ("lost_after_s", lost_after_s)):
        if not value > 0:
            raise ValueError(f"{what} must be more than 0, not {value}")
    if lost_after_s < LEAST_SILENCE_S:
        raise ValueError(
            f"lost_after_s must be at least {LEAST_SILENCE_S}, not {lost_after_s}: hosts send a heartbeat four times a second"
        )
    if PROCESS.client is not None:
        raise RuntimeError(
            "only the program can allocate hosts, not a rank; a rank can call spawn_procs() on the hosts of the program"
        )
    return hosts_of(current_session(), launcher, hosts, axis=axis, timeout_s=timeout_s, lost_after_s=lost_after_s)


def hosts_of(
    session: Session, launcher: Launcher, hosts: int, *, axis: str = "hosts", timeout_s: float, lost_after_s: float
) -> HostMesh:
    """Request hosts for a session; the arguments are those of `allocate`."""
    region = Region.whole(Extent({axis: hosts}))  # raises for a bad name before the engine starts anything
    serve_ranks(session)
    numbers = session.add_hosts(launcher, hosts, timeout_s=timeout_s, lost_after_s=lost_after_s)
    return HostMesh(session.runtime, region, numbers)


def shutdown_context(host_timeout: float | None = None) -> Future[None]:
    """End the session of this process: every mesh, process and agent. A later call of `this_host` starts a new session.

    Args:
        host_timeout: accepted for code of PyTorch Monarch. The end of a session waits five seconds for its hosts.

    Raises:
        ValueError: ``host_timeout`` is no number of seconds. The session goes on.
    """
    if host_timeout is not None and not 0 <= host_timeout < 2.0**64:  # NaN, too
        raise ValueError(f"host_timeout must be a finite number of seconds, and not negative; it is {host_timeout}")
    return close_session()
