"""The engines that ``--on`` names: what may be asked of each, and where its launcher is.

A table, and how a launcher is made of an entry. Nothing of an engine is imported before it is chosen, so that a notebook needs
only the libraries of the one it uses. The command line, its help and its completion are made of this table
(`notebook.syntax.options`), and nothing else knows the engines by name.

An engine's launcher is called with keyword arguments only: the fields of the options that were given, and those of `COMMON`
that its entry says it takes. What was not given is left to the launcher's own default. Beside the methods of `Launcher` it may
have ``plan(hosts: int) -> str``: what it would ask for, such as a script, which ``--dry-run`` prints.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import Launcher, agent_command

__all__ = ["COMMON", "ENGINES", "Engine", "Option", "make_launcher", "plan_text"]

Common = Literal["python", "hosts", "gpus", "occupied", "doubted"]

COMMON: Mapping[Common, str] = {
    "python": "interpreter of the hosts (str); not given where it is that of the notebook",
    "hosts": "the names of the hosts (tuple[str, ...]), where the engine does not choose them",
    "gpus": "GPUs that each host must have (int); not given where none are asked for",
    "occupied": "machines, as in `HostHandle.node`, where an earlier launcher has hosts of the same mesh (tuple[str, ...])",
    "doubted": "machines where it had hosts that are gone, which are taken if there are no others (tuple[str, ...])",
}
"""What every command line may have, and a launcher may want to know: keyword argument -> what it holds."""


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
        raise ValueError("takes the number of a port, 1 to 65535")
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


def _tunnel(text: str) -> str:
    if text not in ("auto", "always", "never"):
        raise ValueError("takes auto, always or never")
    return text


@dataclass(frozen=True)
class Option:
    """One option of an engine.

    Attributes:
        flags: how it is written, the long spelling first.
        field: keyword argument of the launcher.
        help: what it does, in one line.
        metavar: what its value is called; empty: it takes none, and the argument is True.
        parse: makes the argument of the text; raises a ValueError that says what it takes.
        repeated: may be given several times; the argument is a tuple.
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
        name: as in ``--on``.
        title: in sentences, such as ``Slurm``.
        help: what it is, in one line.
        module: where its launcher is.
        launcher: its class there.
        takes: which of `COMMON` the launcher takes. With ``hosts`` they are named; without, only counted.
        extra: of this package, which installs what the launcher imports; empty if it needs nothing.
        options: its own.
        ends_with_us: why its hosts can't outlive the notebook's process; empty if they can.
    """

    name: str
    title: str
    help: str
    module: str
    launcher: str
    takes: tuple[Common, ...] = ("python",)
    extra: str = ""
    options: tuple[Option, ...] = ()
    ends_with_us: str = ""


_CPUS = Option(("--cpus",), "cpus", "processor cores of each host", "N", _number)

_LOCAL = Engine(
    "local",
    "this machine",
    "this machine (default); with --hosts N as N hosts, to try things",
    "monarch_kernel.launch.local",
    "LocalLauncher",
)

_RAY = Engine(
    "ray",
    "Ray",
    "a Ray cluster, also on Kubernetes (KubeRay)",
    "monarch_kernel.launch.ray",
    "RayLauncher",
    takes=("python", "gpus", "occupied", "doubted"),
    extra="ray",
    options=(
        Option(("--address",), "address", "of the cluster: auto (default), HOST:PORT or ray://HOST:PORT", "ADDRESS"),
        _CPUS,
        Option(("--resource",), "resources", "each host must have it; may be repeated", "NAME=N", _pair, repeated=True),
        Option(("--grows",), "grows", "nodes that are missing may still come, as with an autoscaler: wait for them"),
        Option(("--dial",), "dials", "connect to the hosts from here, where they can't connect to this machine"),
    ),
)

_SSH = Engine(
    "ssh",
    "SSH",
    "machines that you can log in to",
    "monarch_kernel.launch.ssh",
    "SshLauncher",
    takes=("python", "hosts", "occupied", "doubted"),
    extra="ssh",
    options=(
        Option(("--user", "-l"), "user", "log in as", "USER"),
        Option(("--port",), "port", "of sshd", "PORT", _port),
        Option(("--identity", "-i"), "identity", "file with the private key", "FILE"),
        Option(("--ssh-config", "-F"), "config", "instead of ~/.ssh/config", "FILE"),
        Option(("--forward-agent",), "forward_agent", "let programs there use your SSH agent"),
        Option(
            ("--tunnel",), "tunnel", "hosts connect through SSH: auto (where they must), always, never", "WHEN", _tunnel
        ),
    ),
)

_SLURM = Engine(
    "slurm",
    "Slurm",
    "a Slurm cluster, by sbatch on this machine",
    "monarch_kernel.launch.slurm",
    "SlurmLauncher",
    takes=("python", "gpus"),
    options=(
        Option(("--partition", "-p"), "partition", "of the cluster", "NAME"),
        Option(("--account", "-A"), "account", "who is charged", "NAME"),
        Option(("--qos", "-q"), "qos", "quality of service", "NAME"),
        Option(("--time", "-t"), "time", "how long the hosts are kept at most", "[D-]HH:MM:SS"),
        Option(("--nodelist", "-w"), "nodelist", "with these nodes, all of them", "NODES"),
        Option(("--exclude", "-x"), "exclude", "not these nodes", "NODES"),
        Option(("--constraint", "-C"), "constraint", "only nodes with these features", "FEATURES"),
        Option(("--cpus",), "cpus", "processor cores of each host", "N", _count),
        Option(("--mem",), "mem", "memory of each host, such as 64G", "SIZE"),
        Option(("--directory",), "directory", "for logs, shared with the nodes (default: ~/.monarch)", "DIR"),
        Option(("--sbatch",), "sbatch", "any other option of sbatch; may be repeated", "OPTION", repeated=True),
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
    ends_with_us="the connection to pods may go through the kernel, and nobody else removes them",
    options=(
        Option(("--image",), "image", "of the container, with monarch_kernel in it", "IMAGE"),
        Option(("--namespace",), "namespace", "where the pods are made", "NAME"),
        Option(("--context",), "context", "of the kubeconfig", "NAME"),
        _CPUS,
        Option(("--mem",), "mem", "memory of each pod, such as 64Gi", "SIZE"),
        Option(("--node-selector",), "node_selector", "only such nodes; may be repeated", "K=V", _pair, repeated=True),
        Option(("--service-account",), "service_account", "that the pods run as", "NAME"),
        Option(("--gpu-resource",), "gpu_resource", "what the cluster calls a GPU (nvidia.com/gpu)", "NAME"),
        Option(("--dial",), "dial", "connect to the pods, where they can't reach this machine"),
        Option(("--tunnel",), "tunnel", "the same by way of the API server, where pods can't be reached"),
        Option(("--pod",), "pod", "file with what else the pods shall have: volumes, tolerations ...", "FILE"),
    ),
)

_LIGHTNING = Engine(
    "lightning",
    "Lightning",
    "machines of Lightning.ai, from a Studio",
    "monarch_kernel.launch.lightning",
    "LightningLauncher",
    extra="lightning",
    ends_with_us="nobody but the kernel would stop its machines, which cost money",
    options=(
        Option(("--machine",), "machine", "of each host, such as H100_X_8", "MACHINE"),
        Option(("--studio",), "studio", "whose environment they get; in a Studio, that one (default)", "NAME"),
        Option(("--image",), "image", "of a container, instead of a Studio's environment", "IMAGE"),
        Option(("--teamspace",), "teamspace", "instead of the current one", "[OWNER/]NAME"),
        Option(("--cloud",), "cloud", "provider or account, instead of the teamspace's", "NAME"),
        Option(("--interruptible",), "interruptible", "cheaper machines, which may be taken away"),
        Option(("--separate",), "separate", "each host is a job of its own, instead of all being one"),
    ),
)

ENGINES: Mapping[str, Engine] = {
    engine.name: engine for engine in (_LOCAL, _RAY, _SSH, _SLURM, _KUBERNETES, _LIGHTNING)
}
"""By name, in the order in which help lists them."""


def make_launcher(engine: Engine, options: Mapping[str, Any], **common: Any) -> Launcher:
    """Make a launcher.

    Args:
        engine: which one.
        options: fields of the engine's options -> values.
        common: of `COMMON`; what the launcher does not take, and what is empty, is left out.

    Raises:
        LaunchError: what it imports is not installed, which the text says how to install; or options make no sense to it.
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
    """What a launcher would ask for, in its own words if it has any."""
    plan = getattr(launcher, "plan", None)
    if plan is not None:
        return str(plan(hosts))
    given = {name: value for name, value in options.items() if value not in ("", None, False, ()) and name != "python"}
    asked = ", ".join(f"{name}={value}" for name, value in given.items())
    count = f"{hosts} host{'s' * (hosts != 1)}"
    command = " ".join(agent_command(str(options.get("python", ""))))
    return f"would ask {engine.title} for {count}{f' with {asked}' if asked else ''}, and run on each: {command}"
