"""The table of the engines that ``--on`` names, with their options and launchers.

This module imports an engine's launcher only when the engine is chosen, so that a notebook needs only the libraries of that
engine. The command line, its help and its completion come from this table (`notebook.syntax.options`), and no other module
knows the engines by name.

`make_launcher` passes keyword arguments only: the fields of the options that were given, and the fields of `COMMON` that the
engine takes. The launcher has its own defaults for everything else. Besides the methods of `Launcher` it may have
``plan(hosts: int) -> str``, which returns what it would ask for, such as a script; ``--dry-run`` prints that.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import Launcher, agent_command

__all__ = ["COMMON", "ENGINES", "Engine", "EngineOption", "make_launcher", "plan_text"]

Common = Literal["python", "hosts", "gpus", "occupied", "last_resort"]

COMMON: Mapping[Common, str] = {
    "python": "interpreter of the hosts (str); left out if it is that of the notebook",
    "hosts": "the names of the hosts (tuple[str, ...]), if the engine does not choose them",
    "gpus": "GPUs that each host must have (int); left out if none are requested",
    "occupied": "machines, as in `HostHandle.node`, where an earlier launcher has hosts of the same mesh (tuple[str, ...])",
    "last_resort": "machines where an earlier launcher lost hosts, to be used only as a last resort (tuple[str, ...])",
}
"""Arguments of every command line that a launcher may take: keyword argument -> its meaning."""


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError("takes a whole number, such as 4")
    return count


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError("takes a port number, 1 to 65535")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise ValueError("takes a number, such as 4 or 0.5")
    return number


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError("takes NAME=VALUE")
    return name, value


def _exported(text: str) -> tuple[str, ...]:
    names: tuple[str, ...] = importlib.import_module("monarch_kernel.launch.slurm.exported").names_of(text)
    return names


def _tunnel(text: str) -> str:
    if text not in ("auto", "always", "never"):
        raise ValueError("takes auto, always or never")
    return text


@dataclass(frozen=True)
class EngineOption:
    """One option of an engine.

    Attributes:
        flags: its spellings, the long one first.
        field: keyword argument of the launcher.
        help: what it does, in one line.
        metavar: name of its value; empty if it takes none, and the argument is True.
        parse: converts the text to the argument; raises a ValueError that says what the option takes.
        repeated: whether it may be given several times; the argument is then a tuple.
    """

    flags: tuple[str, ...]
    field: str
    help: str
    metavar: str = ""
    parse: Callable[[str], Any] = str
    repeated: bool = False


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        name: its name in ``--on``.
        title: its name in sentences, such as ``Slurm``.
        help: what it is, in one line.
        module: the module of its launcher.
        launcher: the class of its launcher.
        takes: the fields of `COMMON` that the launcher takes. With ``hosts``, the user names the hosts, else only their number.
        extra: the extra of this package that installs what the launcher imports; empty if it needs nothing.
        options: its own options.
        ends_with_us: why its hosts can't outlive the notebook's process; empty if they can.
    """

    name: str
    title: str
    help: str
    module: str
    launcher: str
    takes: tuple[Common, ...] = ("python",)
    extra: str = ""
    options: tuple[EngineOption, ...] = ()
    ends_with_us: str = ""


_CPUS = EngineOption(("--cpus",), "cpus", "CPU cores of each host", "N", _number)

_LOCAL = Engine(
    "local",
    "this machine",
    "this machine (default); with --hosts N it acts as N hosts, for experiments",
    "monarch_kernel.launch.local",
    "LocalLauncher",
)

_RAY = Engine(
    "ray",
    "Ray",
    "a Ray cluster, also on Kubernetes (KubeRay)",
    "monarch_kernel.launch.ray",
    "RayLauncher",
    takes=("python", "gpus", "occupied", "last_resort"),
    extra="ray",
    options=(
        EngineOption(("--address",), "address", "the cluster: auto (default), HOST:PORT or ray://HOST:PORT", "ADDRESS"),
        _CPUS,
        EngineOption(
            ("--resource",),
            "resources",
            "resource that each host must have; may be repeated",
            "NAME=N",
            _pair,
            repeated=True,
        ),
        EngineOption(("--grows",), "grows", "wait for nodes that do not exist yet, as with an autoscaler"),
        EngineOption(("--dial",), "dials", "connect to the hosts, if they can't connect to this machine"),
    ),
)

_SSH = Engine(
    "ssh",
    "SSH",
    "machines that you can log in to with SSH",
    "monarch_kernel.launch.ssh",
    "SshLauncher",
    takes=("python", "hosts", "occupied", "last_resort"),
    extra="ssh",
    options=(
        EngineOption(("--user", "-l"), "user", "log in as", "USER"),
        EngineOption(("--port",), "port", "port of sshd", "PORT", _port),
        EngineOption(("--identity", "-i"), "identity", "file with the private key", "FILE"),
        EngineOption(("--ssh-config", "-F"), "config", "configuration file, instead of ~/.ssh/config", "FILE"),
        EngineOption(("--forward-agent",), "forward_agent", "let programs on the hosts use your SSH agent"),
        EngineOption(
            ("--tunnel",), "tunnel", "hosts connect through SSH: auto (if necessary), always, never", "WHEN", _tunnel
        ),
    ),
)

_SLURM = Engine(
    "slurm",
    "Slurm",
    "a Slurm cluster, with sbatch on this machine",
    "monarch_kernel.launch.slurm",
    "SlurmLauncher",
    takes=("python", "gpus"),
    options=(
        EngineOption(("--partition", "-p"), "partition", "partition of the cluster", "NAME"),
        EngineOption(("--account", "-A"), "account", "account to charge", "NAME"),
        EngineOption(("--qos", "-q"), "qos", "quality of service", "NAME"),
        EngineOption(("--time", "-t"), "time", "time limit of the hosts", "[D-]HH:MM:SS"),
        EngineOption(("--nodelist", "-w"), "nodelist", "nodes that must be included", "NODES"),
        EngineOption(("--exclude", "-x"), "exclude", "nodes to exclude", "NODES"),
        EngineOption(("--constraint", "-C"), "constraint", "only nodes with these features", "FEATURES"),
        EngineOption(("--cpus",), "cpus", "CPU cores of each host", "N", _count),
        EngineOption(("--mem",), "mem", "memory of each host, such as 64G", "SIZE"),
        EngineOption(
            ("--directory",), "directory", "directory for logs, shared with the nodes (default: ~/.monarch)", "DIR"
        ),
        EngineOption(
            ("--export",),
            "export",
            "variables that hosts get, such as HF_HOME,NCCL_*; default: ALL",
            "NAMES",
            _exported,
        ),
        EngineOption(("--sbatch",), "sbatch", "any other option of sbatch; may be repeated", "OPTION", repeated=True),
    ),
)

_KUBERNETES = Engine(
    "kubernetes",
    "Kubernetes",
    "pods of a Kubernetes cluster",
    "monarch_kernel.launch.kubernetes",
    "KubernetesLauncher",
    takes=("python", "gpus"),
    extra="kubernetes",
    ends_with_us="the connection to pods may go through the kernel, and only the kernel removes them",
    options=(
        EngineOption(("--image",), "image", "container image that has monarch_kernel installed", "IMAGE"),
        EngineOption(("--namespace",), "namespace", "namespace of the pods", "NAME"),
        EngineOption(("--context",), "context", "context of the kubeconfig", "NAME"),
        _CPUS,
        EngineOption(("--mem",), "mem", "memory of each pod, such as 64Gi", "SIZE"),
        EngineOption(
            ("--node-selector",),
            "node_selector",
            "label that a node must have; may be repeated",
            "K=V",
            _pair,
            repeated=True,
        ),
        EngineOption(("--service-account",), "service_account", "service account of the pods", "NAME"),
        EngineOption(("--gpu-resource",), "gpu_resource", "resource name of a GPU (default: nvidia.com/gpu)", "NAME"),
        EngineOption(("--dial",), "dial", "connect to the pods, if they can't connect to this machine"),
        EngineOption(("--tunnel",), "tunnel", "connect to the pods through the API server, if they are not reachable"),
        EngineOption(("--pod",), "pod", "YAML file with other fields of the pods: volumes, tolerations ...", "FILE"),
    ),
)

_LIGHTNING = Engine(
    "lightning",
    "Lightning",
    "machines of Lightning.ai, from a Studio",
    "monarch_kernel.launch.lightning",
    "LightningLauncher",
    extra="lightning",
    ends_with_us="only the kernel stops its machines, which cost money",
    options=(
        EngineOption(("--machine",), "machine", "machine type of each host, such as H100_X_8", "MACHINE"),
        EngineOption(
            ("--studio",), "studio", "Studio whose environment the hosts get (default: the current one)", "NAME"
        ),
        EngineOption(("--image",), "image", "container image, instead of a Studio's environment", "IMAGE"),
        EngineOption(("--teamspace",), "teamspace", "teamspace, instead of the current one", "[OWNER/]NAME"),
        EngineOption(("--cloud",), "cloud", "cloud provider or account, instead of the teamspace's", "NAME"),
        EngineOption(("--interruptible",), "interruptible", "use cheaper machines, which Lightning may take away"),
        EngineOption(("--separate",), "separate", "run each host as a separate job, instead of one job for all"),
    ),
)

ENGINES: Mapping[str, Engine] = {
    engine.name: engine for engine in (_LOCAL, _RAY, _SSH, _SLURM, _KUBERNETES, _LIGHTNING)
}
"""The engines by name, in the order of the help text."""


def make_launcher(engine: Engine, options: Mapping[str, Any], **common: Any) -> Launcher:
    """Make a launcher.

    Args:
        engine: the engine.
        options: field of one of the engine's options -> value.
        common: fields of `COMMON`; empty ones, and those that the launcher does not take, are left out.

    Raises:
        LaunchError: a library is not installed, and the text says how to install it; or the launcher refuses an option.
    """
    given = {name: common[name] for name in engine.takes if common.get(name)}
    try:
        make = getattr(importlib.import_module(engine.module), engine.launcher)
    except ImportError as error:
        raise LaunchError(_missing(engine, error)) from error
    try:
        return cast(Launcher, make(**options, **given))
    except ValueError as error:
        raise LaunchError(f"--on {engine.name}: {error}") from error


def _missing(engine: Engine, error: ImportError) -> str:
    if not engine.extra or (error.name or "").partition(".")[0] == __name__.partition(".")[0]:
        return f"--on {engine.name}: {error}"
    what = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
    return f"--on {engine.name}: {what}; install it with: pip install 'monarch_kernel[{engine.extra}]'"


def plan_text(engine: Engine, launcher: Launcher, hosts: int, options: Mapping[str, Any]) -> str:
    """Return what a launcher would ask for: the text of its ``plan`` method if it has one."""
    plan = getattr(launcher, "plan", None)
    if plan is not None:
        return str(plan(hosts))
    given = {name: value for name, value in options.items() if value not in ("", None, False, ()) and name != "python"}
    asked = ", ".join(f"{name}={value}" for name, value in given.items())
    count = f"{hosts} host{'s' * (hosts != 1)}"
    command = shlex.join(agent_command(str(options.get("python", ""))))
    return f"would ask {engine.title} for {count}{f' with {asked}' if asked else ''}, and run on each: {command}"
