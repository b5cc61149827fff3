"""Sets up the process of a new rank, before any user code runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from monarch_kernel.net.wire.messages import RankSpec

__all__ = ["path_here", "settle"]

PROGRAM = "remote_cell"
"""The name of the program, which parsers of arguments show; some fail if it is empty."""

_INTERPRETERS = re.compile(r"(?:^|/)(?:(?:site|dist)-packages|lib(?:32|64)?/python\d[^/]*|python\d+\.zip)(?:/|$)")
"""Matches paths that belong to an interpreter: its library, and packages installed for it."""

_KEPT_COLLECTIVES = "500"
"""How many collectives torch's flight recorder keeps. An interrupt reads them some times; 2,000 take 24 ms of CPU time."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def settle(spec: RankSpec) -> None:
    """Set up the environment, directory, threads and random seeds of this process, a fork of the zygote."""
    sys.argv[:] = [PROGRAM]  # a script in a cell would parse the zygote's arguments
    for name in spec.unset:
        os.environ.pop(name, None)
    os.environ.update(spec.env)
    tempfile.tempdir = None  # the zygote may have looked up TMPDIR
    time.tzset()
    _keep_freed_memory()
    is_elsewhere = not spec.threads
    share = spec.threads or max(1, len(os.sched_getaffinity(0)) // spec.local_world_size)
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(share)).partition(",")[0]
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its earlier name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _KEPT_COLLECTIVES)
    if is_elsewhere:
        with contextlib.suppress(OSError):  # then it stays in the directory where the engine has started the agent
            os.chdir(spec.cwd)
        sys.path[:] = path_here(spec.sys_path, sys.path, os.path.exists)
    else:
        try:
            os.chdir(spec.cwd)
        except FileNotFoundError as error:
            why = "the directory in which the mesh was brought up was deleted; create it again, and replace the rank"
            raise FileNotFoundError(error.errno, why, spec.cwd) from None
        sys.path[:] = spec.sys_path
    torch = sys.modules.get("torch")
    if torch is not None:  # its thread pool read OMP_NUM_THREADS in the zygote
        torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else share)
        if "TORCH_DISTRIBUTED_DEBUG" in (*spec.env, *spec.unset):  # read when torch.distributed was imported
            torch.distributed.set_debug_level_from_env()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # as Python does for `random`; else all ranks continue the zygote's stream


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations, unless the user has configured this (mallopt(3)).

    By default it gives the tensors of a training step back to the kernel, which has to clear memory for those of the next step.
    """
    told = [*os.environ, *os.environ.get("GLIBC_TUNABLES", "").split(":")]
    if any(name.startswith(("MALLOC_", "glibc.malloc.")) for name in told):
        return
    with contextlib.suppress(AttributeError):  # a libc without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the maximum; larger blocks are still given back at once
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)


def path_here(theirs: Sequence[str], ours: Sequence[str], exists: Callable[[str], bool]) -> list[str]:
    """The import path of a rank on a host that may have another interpreter than the controller, and other files.

    It is the host's own path, with folders of the controller's path before and behind it: those that belong to no interpreter
    and exist here, too, because the machines share a file system.

    Args:
        theirs: ``sys.path`` of the controller.
        ours: ``sys.path`` of this process.
        exists: Whether a file or folder exists here.
    """
    first: list[str] = []
    last: list[str] = []
    is_before = True
    for entry in theirs:
        if _INTERPRETERS.search(entry):
            is_before = False
        elif entry not in ours and (not entry or exists(entry)):
            (first if is_before else last).append(entry)
    return [*first, *ours, *last]
