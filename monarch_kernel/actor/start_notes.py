"""What a user should know of processes that were just started, as lines of text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.text import format_nbytes
from monarch_kernel.runtime.controller.environment import read_at_start
from monarch_kernel.runtime.host.gpus import VISIBLE, gpus_named

__all__ = ["environment_notes", "gpu_notes", "shadow_notes", "shared_memory_notes"]

_LEAST_SHARED = 16 << 20
_LIBRARIES = (
    *("torch", "numpy", "cloudpickle", "msgspec", "zmq", "IPython", "anywidget", "ipywidgets", "psutil"),
    *("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing_extensions"),  # torch imports these
)


def gpu_notes(
    devices: Sequence[str], wanted: str, per_host: int, env: Mapping[str, str], visible_here: str | None
) -> list[str]:
    """Return a line if processes have no GPU though CUDA_VISIBLE_DEVICES names some, or if several have the same.

    Args:
        devices: the devices of the processes, such as ``cuda:0``.
        wanted: the device that the user has asked for.
        per_host: the number of processes of each host.
        env: the variables that the user has given for them.
        visible_here: CUDA_VISIBLE_DEVICES of this process; None for processes on other machines.
    """
    visible = env.get(VISIBLE, visible_here or "")
    has_gpus = any(device.startswith("cuda") for device in devices)
    if gpus_named(visible) and not has_gpus and wanted == "auto":
        what = "names no GPU that torch can use"
        if visible_here is None:
            what = "does not name a GPU that torch can use for each rank"
        return [f"{VISIBLE}={visible} {what}: ranks use CPUs"]
    of_ranks = gpus_named(env.get(VISIBLE, ""))[:per_host]
    shared = [name for name in dict.fromkeys(of_ranks) if of_ranks.count(name) > 1]
    if has_gpus and shared:
        return [
            f"several ranks share GPU {_listed(shared)}: NCCL refuses two ranks on one GPU, so collectives of cuda tensors "
            "fail; those of cpu tensors use gloo, and work"
        ]
    return []


def environment_notes(mesh: ProcMesh, env: Mapping[str, str]) -> list[str]:
    """Return a line for each kind of variable that does not have its effect in the processes of a mesh on this machine.

    Args:
        mesh: the processes.
        env: the variables that the user has given for them.
    """
    session = mesh._session
    if session is None:
        return []
    changed = session.environment_changes()
    lines = []
    names = [*dict.fromkeys([*changed.values, *changed.removed, *env])]
    if late := read_at_start(name for name in names if name not in env):  # for those in ``env``, processes are new ones
        lines.append(
            f"{_listed(late)}: read when a process starts, but ranks are forked from one that had started before; only child "
            "processes of ranks see the change. For ranks, change it with %env, then %mesh down --all and %mesh up"
        )
    if "PYTHONPATH" in names:
        lines.append(
            "PYTHONPATH: only child processes of ranks see the change; ranks import from sys.path of the notebook"
        )
    if changed.left_out:
        lines.append(f"{_listed(changed.left_out)}: not passed on to ranks: too long, or not text in UTF-8")
    return lines


def shadow_notes() -> list[str]:
    """Return a line for each file in the working directory that hides a library that the kernel and ranks use."""
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:
        return []
    lines = []
    for name in _LIBRARIES:
        found = PathFinder.find_spec(name)
        origin = os.path.realpath(found.origin) if found is not None and found.origin else ""
        if origin in (f"{here}/{name}.py", f"{here}/{name}/__init__.py"):
            file = origin.removeprefix(f"{here}/")
            lines.append(f"{file} in the working directory is imported in place of the library: rename it")
    return lines


def shared_memory_notes(directory: str = "/dev/shm") -> list[str]:
    """Return a line if the directory for shared memory takes nothing; ranks do not need it, but libraries in them do."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        trouble = f"can't be used ({error.strerror})"
    else:
        free = found.f_bavail * found.f_frsize
        if found.f_flag & os.ST_RDONLY or not os.access(directory, os.W_OK | os.X_OK):
            trouble = "can't be written"
        elif free < _LEAST_SHARED:
            trouble = f"has only {format_nbytes(free)} free"
        else:
            return []
    return [
        f"{directory} {trouble}, and workers of DataLoader and NCCL need it: delete leftover files there, or give the "
        "container more (docker run --shm-size 8g)"
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
