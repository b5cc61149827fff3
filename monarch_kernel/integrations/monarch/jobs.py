"""Jobs: what they have in common, and those of this machine."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, cast

from monarch_kernel.actor import HostMesh, allocate, this_host
from monarch_kernel.actor.host_mesh import view_of
from monarch_kernel.launch.base import Launcher
from monarch_kernel.launch.local import LocalLauncher

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "JobState",
    "JobTrait",
    "LocalJob",
    "MeshAdminConfig",
    "ProcessJob",
    "Request",
    "TelemetryConfig",
    "checked",
    "given",
    "hosts_from_config",
]

DEFAULT_TIMEOUT_S = 600.0
"""How long hosts may take to come up, unless the job says otherwise, in seconds."""

Request = tuple[Callable[[], Launcher], int]
"""What makes the launcher of a mesh, and the number of its hosts."""


J = TypeVar("J", bound="JobTrait")

_FILES = "use a directory that hosts share, sync_workspace() for code, or send the content to an actor"
_NOT_SAVED = (
    "a job is not saved, because its hosts end with the program: call state() in the program; a mesh of a notebook goes on "
    "with %mesh up --detach"
)


@dataclass(frozen=True)
class TelemetryConfig:
    """Options of Monarch's dashboard, which have no effect."""

    retention_secs: int = 3600
    include_dashboard: bool = False
    dashboard_port: int = 8265
    snapshot_interval_secs: float = 30.0


@dataclass(frozen=True)
class MeshAdminConfig:
    """Options of Monarch's server for administration, which have no effect."""

    admin_addr: str | None = None


_OF_DASHBOARD = frozenset({"admin_url", "dashboard_url", "query_engine", "query_engine_client", "telemetry_url"})
"""Attributes of a state of Monarch that are None without its dashboard, which there is none of here."""


class JobState:
    """The meshes of hosts of a job, as attributes; ``admin_url`` and the like are None, as in Monarch without a dashboard.

    Args:
        hosts: the meshes by their names.
    """

    def __init__(self, hosts: Mapping[str, HostMesh]) -> None:
        self._hosts = dict(hosts)

    def __getattr__(self, name: str) -> HostMesh:
        hosts = self.__dict__.get("_hosts", {})
        if name not in hosts:
            if name in _OF_DASHBOARD:
                return cast("HostMesh", None)
            raise AttributeError(f"the job has no mesh {name!r}; it has {', '.join(hosts) or 'none'}")
        found: HostMesh = hosts[name]
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._hosts})

    def __repr__(self) -> str:
        return f"JobState({', '.join(f'{name}: {len(mesh)}' for name, mesh in self._hosts.items())})"


class JobTrait:
    """Base of jobs.

    A subclass of the user has `_create`, `_state`, `can_run` and `_kill`, as in Monarch. Those of this package have
    `_launchers`.
    """

    _has_hosts = False
    _apply_id: str | None = None
    _held: Mapping[str, HostMesh] = MappingProxyType({})
    _timeout_s = DEFAULT_TIMEOUT_S

    def _launchers(self) -> Mapping[str, Request]:
        """Return what brings up each mesh."""
        raise NotImplementedError(f"{type(self).__name__} must define _state(), which returns a JobState")

    def _create(self, client_script: str | None) -> None:
        """Request the hosts.

        Raises:
            NotImplementedError: a script is given: a program runs where it was started.
        """
        if client_script is not None:
            raise NotImplementedError(
                "apply(client_script=...) runs a program on the cluster: submit the program itself, such as with sbatch, and "
                "call state() in it"
            )
        self._held = hosts = dict[str, HostMesh]()
        try:
            for name, (make, count) in self._launchers().items():
                hosts[name] = allocate(make(), count, timeout_s=self._timeout_s)
        except BaseException:
            self._kill()
            self._held = {}
            raise

    def _state(self) -> JobState:
        """Return views of the hosts that `_create` has requested."""
        return JobState({name: view_of(hosts) for name, hosts in self._held.items()})

    def _kill(self) -> None:
        """Give the hosts back."""
        for hosts in self._held.values():
            hosts.shutdown().get()

    def enable_telemetry(
        self: J,
        config: TelemetryConfig | None = None,
        *,
        mesh_admin_config: MeshAdminConfig | None = None,
        **options: Any,
    ) -> J:
        """Return the job; Monarch's dashboard is not started."""
        return self

    def enable_admin(self: J, config: MeshAdminConfig | None = None, **options: Any) -> J:
        """Return the job; Monarch's server for administration is not started."""
        return self

    def telemetry_query_client(self) -> NoReturn:
        """Raise an error: there is no dashboard that could be asked."""
        raise NotImplementedError("Monarch's dashboard is not started: %mesh show, or get_meter() with OpenTelemetry")

    def profile(self, *, on_trace_ready: Callable[[Any], Any] | None = None) -> NoReturn:
        """Raise an error: meshes are profiled, and not jobs."""
        raise NotImplementedError("profile a mesh of processes, with %mesh profile, or torch.profiler in an actor")

    def remote_mount(self, source: str, mntpoint: str | None = None, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: there are no mounts."""
        raise NotImplementedError(f"files are not mounted on hosts: {_FILES}")

    def gather_mount(self, remote_mount_point: str, local_mount_point: str, meshes: Any = None) -> NoReturn:
        """Raise an error: there are no mounts."""
        raise NotImplementedError(f"files of hosts are not mounted here: {_FILES}")

    def dump(self, filename: str) -> NoReturn:
        """Raise an error: hosts end with the program, so another program can't go on with them."""
        raise NotImplementedError(_NOT_SAVED)

    def dumps(self) -> NoReturn:
        """Raise the error of `dump`."""
        raise NotImplementedError(_NOT_SAVED)

    def apply(self, client_script: str | None = None) -> None:
        """Request the hosts, unless they have been requested.

        Args:
            client_script: a program to run on the hosts; jobs of this package have no such thing.
        """
        if not self._has_hosts:
            self._create(client_script)
            self._has_hosts, self._apply_id = True, str(uuid.uuid4())

    def state(self, cached_path: str | None = ".monarch/job_state.pkl") -> JobState:
        """Return the hosts; the first call requests them, and they may still come up.

        Each call gives other meshes of the same hosts: their ``stop()`` ends the processes that were spawned through them.

        Args:
            cached_path: accepted for code of Monarch, without an effect.
        """
        self.apply()
        return self._state()

    @property
    def apply_id(self) -> str | None:
        """An identifier of the hosts, which changes when they are requested again; None if there are none."""
        return self._apply_id

    @property
    def active(self) -> bool:
        """Whether the hosts have been requested, and not been given back."""
        return self._has_hosts

    def can_run(self, spec: JobTrait) -> bool:
        """Whether the hosts of this job fit another one."""
        return self.active and spec is self

    def kill(self) -> None:
        """End all processes on the hosts, and give the hosts back."""
        if self._has_hosts:
            self._kill()
        self._held, self._has_hosts, self._apply_id = {}, False, None


def checked(meshes: Mapping[str, int]) -> dict[str, int]:
    """Check that each mesh has hosts.

    Raises:
        ValueError: a number is not an integer of at least 1.
    """
    for name, count in meshes.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"mesh {name!r} must have at least one host, not {count!r}")
    return dict(meshes)


class ProcessJob(JobTrait):
    """Hosts that are all this machine, for tests.

    Args:
        meshes: name -> number of hosts.
        env: variables of their agents and processes, in addition to those of this program.
    """

    def __init__(self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None) -> None:
        self._counts = checked(meshes)
        self._env = dict(env or {})

    def can_run(self, spec: JobTrait) -> bool:
        """Whether the hosts of this job fit another one, which has the same meshes."""
        return self.active and isinstance(spec, ProcessJob) and spec._counts == self._counts

    def _launchers(self) -> Mapping[str, Request]:
        return {name: (self._launcher, count) for name, count in self._counts.items()}

    def _launcher(self) -> Launcher:
        launcher = LocalLauncher()
        launcher.environment = {**os.environ, **self._env}
        return launcher


class LocalJob(JobTrait):
    """This machine itself, under each name.

    Args:
        hosts: the names.
    """

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        self._names = tuple(hosts)

    def _create(self, client_script: str | None) -> None:
        if client_script is not None:
            super()._create(client_script)
        self._held = {name: this_host() for name in self._names}

    @property
    def process(self) -> NoReturn:
        """Raise an error: no process runs a program as a job."""
        raise NotImplementedError("a job starts no program: the program that calls state() uses the hosts")

    def _kill(self) -> None:
        """Leave this machine as it is."""

    def __repr__(self) -> str:
        return f"LocalJob({self._names!r})"


def hosts_from_config(name: str) -> HostMesh:
    """Return two hosts that are this machine.

    Monarch has the name for a configuration of a project, which it does not read yet; its examples use it.
    """
    return cast(HostMesh, getattr(ProcessJob({name: 2}).state(), name))


def given(**options: Any) -> dict[str, Any]:
    """Return the options that have a value."""
    return {name: value for name, value in options.items() if value}
