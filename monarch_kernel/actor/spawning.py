"""How processes start: what an integration sets for all meshes, and the steps before the user's bootstrap."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from monarch_kernel.base.mesh import Extent, Point
from monarch_kernel.base.text import plural
from monarch_kernel.net.wire.codec import dump_bytes
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.function_calls import run_bootstrap

__all__ = [
    "SPAWN_DEFAULTS",
    "BootstrapCommand",
    "Device",
    "SpawnDefaults",
    "Start",
    "check_binds",
    "default_bootstrap_cmd",
    "starts",
    "steps",
]

Device = Literal["auto", "cpu", "cuda", "visible"]

_NODES = "/sys/devices/system/node"
_CPU_KEYS = ("cpus", "physcpubind", "cpunodebind")


class SpawnDefaults:
    """What `HostMesh.spawn_procs` does where the caller does not say.

    Attributes:
        device: the device of processes.
        is_fresh: whether processes are new interpreters.
        prepare: a function that each process calls before the user's bootstrap is unpickled; it is sent by name.
    """

    def __init__(self) -> None:
        self.device: Device = "auto"
        self.is_fresh = False
        self.prepare: Callable[[], Any] | None = None


SPAWN_DEFAULTS = SpawnDefaults()
"""Those of this program. An integration sets them."""


@dataclass(frozen=True)
class BootstrapCommand:
    """How the processes of a mesh start, in the words of PyTorch Monarch.

    Attributes:
        program: the interpreter; empty for that of the host.
        arg0: the name of the program in its own arguments; it has no effect.
        args: must be empty: the arguments of the interpreter are ours.
        env: variables to add to the environment; those whose value is None are removed from it.
        inherit_env: must be True: the rest of the environment is that of the host.

    Raises:
        TypeError: a name or a value of ``env`` is no text.
        ValueError: there are arguments, or the environment is not to be inherited.
    """

    program: str = ""
    arg0: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    inherit_env: bool = True

    def __post_init__(self) -> None:
        if self.args or not self.inherit_env:
            raise ValueError(
                "a BootstrapCommand has an interpreter and variables: leave out args and inherit_env, and write a script that "
                "starts the interpreter as it should be, for HostMesh.with_python_executable()"
            )
        for name, value in self.env.items():
            if not isinstance(name, str) or not (value is None or isinstance(value, str)):
                raise TypeError(f"env must map names to texts or None, not {name!r} to {value!r}")
        object.__setattr__(self, "env", dict(self.env))

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """Return a command with more variables, or with fewer where the value is None."""
        return BootstrapCommand(self.program, self.arg0, self.args, {**self.env, **env})


def default_bootstrap_cmd() -> BootstrapCommand:
    """Return the command that starts processes with the interpreter of their host."""
    return BootstrapCommand()


@dataclass(frozen=True)
class Start:
    """How one process starts.

    Attributes:
        env: variables to add to its environment.
        removed: variables to remove from it.
        python: the interpreter; empty for that of the host.
    """

    env: dict[str, str]
    removed: tuple[str, ...]
    python: str


def starts(
    command: BootstrapCommand | Callable[[Point], BootstrapCommand] | None,
    env: Mapping[str, str] | None,
    python: str,
    extent: Extent,
) -> list[Start]:
    """Return how each process of a mesh starts.

    Args:
        command: of all processes, or of the process at a point.
        env: variables that all processes have; they count more than those of the command.
        python: the interpreter if the command has none.
        extent: the axes of the mesh.

    Raises:
        TypeError: a command is of another type.
    """
    given = dict(env or {})
    if command is None:
        return [Start(given, (), python)] * extent.nelements
    found = []
    for rank in range(extent.nelements):
        point = extent.point(rank)
        one = command(point) if callable(command) else command
        if not isinstance(one, BootstrapCommand):
            raise TypeError(
                f"bootstrap_command must be default_bootstrap_cmd().with_env({{...}}), or a function of the point that returns "
                f"such a command, not {one!r}"
            )
        values = {name: value for name, value in one.env.items() if value is not None}
        removed = tuple(name for name, value in one.env.items() if value is None and name not in given)
        found.append(Start({**values, **given}, removed, one.program or python))
    return found


class _Steps:
    """A bootstrap of several steps, the last of which is the user's."""

    def __init__(
        self, prepare: Callable[[], Any] | None, binds: Sequence[Mapping[str, str]], bootstrap: bytes, per_host: int
    ) -> None:
        self._prepare = prepare
        self._binds = binds
        self._bootstrap = bootstrap
        self._per_host = per_host

    def __call__(self) -> None:
        if self._prepare is not None:
            self._prepare()
        if self._binds:
            _bind(_cpus_of(self._binds[PROCESS.proc.ranks[0] % self._per_host]))
        if self._bootstrap:
            run_bootstrap(self._bootstrap)


def steps(
    prepare: Callable[[], Any] | None,
    binds: Sequence[Mapping[str, str]],
    bootstrap: bytes,
    per_host: int,
    limit_nbytes: int,
) -> bytes:
    """Pack the steps of a bootstrap; the user's alone, if there is no other step.

    Args:
        prepare: the first step.
        binds: for each process of a host the CPUs to which it is bound, as `check_binds` accepts them.
        bootstrap: the packed bootstrap of the user; empty for none.
        per_host: the number of processes of each host.
        limit_nbytes: the limit for the packed steps.
    """
    if prepare is None and not binds:
        return bootstrap
    together = _Steps(prepare, tuple(dict(bind) for bind in binds), bootstrap, per_host)
    return dump_bytes((together, {}), "the bootstrap", limit_nbytes)


def check_binds(binds: Sequence[Mapping[str, str]], per_host: int) -> None:
    """Check that there is a binding for each process of a host.

    Raises:
        TypeError: a binding is not a dict of texts.
        ValueError: there are too few or too many, or a key is unknown.
    """
    if len(binds) != per_host:
        raise ValueError(
            f"proc_bind has {plural(len(binds), 'entry', 'entries')}, but each host has "
            f"{plural(per_host, 'process', 'processes')}"
        )
    for bind in binds:
        if not isinstance(bind, Mapping):
            raise TypeError(f"an entry of proc_bind is a dict such as {{'cpus': '0-3'}}, not {bind!r}")
        for key, value in bind.items():
            if key not in _CPU_KEYS:
                raise ValueError(
                    f"proc_bind has the key {key!r}, but processes can be bound only to CPUs, by {', '.join(_CPU_KEYS)}; for "
                    "memory start the program under numactl"
                )
            _numbers(key, value)


def _numbers(key: str, text: str) -> set[int]:
    """Read a list such as ``0-3,8``."""
    found: set[int] = set()
    try:
        for part in str(text).split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise ValueError(f"proc_bind: {key} must be a list of numbers such as '0-3,8', not {text!r}") from None
    return found


def _cpus_of(bind: Mapping[str, str]) -> set[int]:
    """Return the CPUs that a binding names; those that all its keys name."""
    cpus = os.sched_getaffinity(0)
    for key, value in bind.items():
        named = _numbers(key, value)
        if key == "cpunodebind":
            nodes, named = named, set()
            for node in nodes:
                with open(f"{_NODES}/node{node}/cpulist", encoding="ascii") as file:
                    named |= _numbers(key, file.read().strip())
        cpus &= named
    if not cpus:
        raise ValueError(f"proc_bind: this process may use no CPU of {dict(bind)}")
    return cpus


def _bind(cpus: set[int]) -> None:
    """Bind all threads of this process to CPUs, and those that they start."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:  # it has just ended
            continue
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(len(cpus))
