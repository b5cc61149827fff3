"""Adds what texts of torch leave out: which worker of a loader ended and how, names of parameters, what to do about a group.

DeepSpeed's error about ninja is one of torch's, as torch compiles its operators.

It reads only what loaders, modules and processes store, calls no code of the user, and does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from monarch_kernel.runtime.diagnostics.memory_notes import memory_held

__all__ = ["OLD_GROUP", "torch_notes"]

OLD_GROUP = "was made before the mesh formed its process group again"
"""Is in the first of two notes if an error comes from a process group that the mesh has replaced since."""


_LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) ")
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_NO_GROUP = "Default process group has not been initialized"
_OLD_GROUP = re.compile(
    r"Process group .{0,400}? is not initialized in the world group map|Invalid process group specified"
    r"|Could not resolve the process group registered under the name"  # of a device mesh
)
_NINJA = re.compile(r"\bninja not being installed\b|\bNinja is required to load C\+\+ extensions\b")
_CLOSED = re.compile(r"Connection closed by peer|pair closure|Connection reset by peer|Broken pipe")
_MAX_NAMES = 10
_MAX_DEPTH = 60


def torch_notes(error: BaseException) -> tuple[str, ...]:
    """Return lines that complete the text of an error of torch; empty for all others.

    Raises:
        Exception: of the error's own ``__str__``.
    """
    if isinstance(error, (EOFError, ConnectionError)):  # in place of torch's own text, if it reads while a worker ends
        return tuple(_about_workers(error.__traceback__))
    if not isinstance(error, (RuntimeError, ValueError)):
        return ()
    text = str(error)
    if _LOADER.match(text):
        return tuple(_about_workers(error.__traceback__))
    if found := _INDICES.search(text):
        return tuple(_about_parameters(error.__traceback__, [int(index) for index in found[1].split()]))
    if _NO_GROUP in text:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # set when the mesh forms its group
            return (
                "dist.destroy_process_group() has run on this rank: leave it out, or call dist.init_process_group() again",
            )
        return ("the first cell on all ranks of the mesh forms its process group: run one, such as %remote t rank",)
    if _NINJA.search(text):
        return _about_ninja()
    if _OLD_GROUP.search(text):
        return (
            f"this group {OLD_GROUP} (after an interrupt, a failure in a collective",
            "or a restart): make it again, and all that holds it: device meshes, DDP and FSDP wrappers",
        )
    if _CLOSED.search(text) and (names := _with_old_groups(error.__traceback__)):
        return (
            f"the group of {', '.join(names)} {OLD_GROUP} (after an interrupt,",
            "a failure in a collective or a restart): wrap the model again",
        )
    return ()


def _about_ninja() -> tuple[str, ...]:
    folder = os.path.dirname(
        sys.executable
    )  # where pip puts commands; a kernel that was started by its path lacks it in PATH
    if os.access(os.path.join(folder, "ninja"), os.X_OK):
        return (
            f'ninja is in {folder}, which is not in PATH: run os.environ["PATH"] += ":{folder}" in a cell on the ranks',
        )
    return ("run `pip install ninja` with the Python of the ranks, and this cell again",)


def _with_old_groups(trace: TracebackType | None) -> list[str]:
    """Name the variables, in the frames of an error, that are models of DDP whose process group is no longer one of torch's."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    groups: Any = getattr(getattr(c10d, "_world", None), "pg_map", None)
    names: dict[str, None] = {}
    for _ in range(_MAX_DEPTH if groups is not None else 0):
        if trace is None:
            break
        frame = trace.tb_frame
        for name in (*frame.f_code.co_varnames, *frame.f_code.co_names):
            value = frame.f_locals.get(name, frame.f_globals.get(name))
            if type(value).__name__ == "DistributedDataParallel":
                group = vars(value).get("process_group")
                if group is not None and group not in groups and name != "self":
                    names[name] = None
        trace = trace.tb_next
    return list(names)[:_MAX_NAMES]


def _about_workers(trace: TracebackType | None) -> Iterator[str]:
    workers = next((found for each in _owners(trace) if isinstance(found := vars(each).get("_workers"), list)), [])
    codes = [(i, worker.pid, worker.exitcode) for i, worker in enumerate(workers) if worker.exitcode not in (0, None)]
    for i, pid, code in codes:
        yield f"worker {i} of {len(workers)} (pid {pid}) {_ended(code)}"
    if any(code < 0 for _, _, code in codes) and (held := memory_held()):
        yield held
    if any(code == -signal.SIGBUS for _, _, code in codes):
        yield "/dev/shm may be full: make it larger, or use torch.multiprocessing.set_sharing_strategy('file_system')"
    if any(code > 0 for _, _, code in codes):
        yield "its last output lines say why; with num_workers=0 the rank itself raises the error"


def _ended(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _about_parameters(trace: TracebackType | None, indices: list[int]) -> Iterator[str]:
    for owner in _owners(trace):
        if type(owner).__name__ != "DistributedDataParallel":
            continue
        ignored = vars(owner).get("parameters_to_ignore") or ()
        module = (vars(owner).get("_modules") or {}).get("module")
        named = () if module is None else type(module).named_parameters(module)
        names = [name for name, parameter in named if parameter.requires_grad and name not in ignored]
        without = [names[index] for index in indices if index < len(names)]
        more = f" and {len(without) - _MAX_NAMES} more" if len(without) > _MAX_NAMES else ""
        if without:
            yield f"parameters without a gradient on this rank: {', '.join(without[:_MAX_NAMES])}{more}"
        return


def _owners(trace: TracebackType | None) -> Iterator[Any]:
    """Yield the objects whose methods are in a traceback, outermost first."""
    for _ in range(_MAX_DEPTH):
        if trace is None:
            return
        owner = trace.tb_frame.f_locals.get("self")
        with contextlib.suppress(Exception):  # a class without a dict, or one whose attributes raise
            vars(owner)
            yield owner
        trace = trace.tb_next
