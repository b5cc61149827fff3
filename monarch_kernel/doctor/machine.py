"""Checks of the resources of this machine: cores, memory, shared memory, files, processes."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator

from monarch_kernel.base.directories import is_replaceable, session_roots, temporary_directory
from monarch_kernel.base.text import format_nbytes, plural
from monarch_kernel.doctor.report import Finding, Sign
from monarch_kernel.net.memory.limits import cores, largest_file, processes, room

__all__ = ["descriptors", "memory", "processors", "shared_memory", "tasks", "temporary_files"]

_GIB = 1 << 30
_LEAST_MEMORY = _GIB
_LEAST_SHARED = 256 << 20
_LEAST_TEMPORARY = 100 << 20
_LEAST_DESCRIPTORS = 4096
_LEAST_TASKS = 512
_SHARED_MEMORY = "/dev/shm"


def processors() -> Iterator[Finding]:
    """Check how many cores this process may use, and how many a control group limits it to."""
    allowed, usable = len(os.sched_getaffinity(0)), cores()
    found = f"{allowed} of {os.cpu_count()} may be used"
    if usable < allowed:
        found += f", but a control group limits CPU time to {usable:g} core{'s' * (usable != 1)}"
        remedy = (
            f"ranks divide {plural(allowed, 'thread')}: give each fewer, for example "
            "%mesh up t -n 4 --env OMP_NUM_THREADS=1"
        )
        yield Finding("cores", Sign.WARNING, found, remedy)
    else:
        yield Finding("cores", Sign.OK, found)


def memory() -> Iterator[Finding]:
    """Check the free memory, by the tightest limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = room()
    found = f"{format_nbytes(free.nbytes)} of {free.of}; the machine has {format_nbytes(total)}"
    if free.nbytes < _LEAST_MEMORY:
        remedy = "each rank imports torch: close other programs, or give the container more memory"
        yield Finding("memory", Sign.WARNING, found, remedy)
    else:
        yield Finding("memory", Sign.OK, found)


def shared_memory() -> Iterator[Finding]:
    """Check memory files (memfd), through which ranks pass large values, and ``/dev/shm``, which other libraries use."""
    from monarch_kernel.net.memory.shared_blocks import STORED_NBYTES, Blocks

    try:
        stored = Blocks().store([bytes(STORED_NBYTES)])
    except MemoryError as error:
        remedy = (
            "ranks pass large values in memory files (memfd): check the memory limit of the container, and ulimit -f"
        )
        yield Finding("shared memory", Sign.PROBLEM, f"a block of {format_nbytes(STORED_NBYTES)}: {error}", remedy)
        return
    del stored
    found = "memory files (memfd) work"
    if largest_file() < _GIB:
        found += f", up to {format_nbytes(largest_file())}"
        remedy = "larger values can't be sent: run ulimit -f unlimited before you start Jupyter"
        yield Finding("shared memory", Sign.WARNING, found, remedy)
        return
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError as error:
        remedy = "DataLoader workers and NCCL need it: mount a tmpfs there"
        yield Finding("shared memory", Sign.WARNING, f"{found}; {_SHARED_MEMORY}: {error.strerror}", remedy)
        return
    found += f"; {_SHARED_MEMORY} has {format_nbytes(usage.total)}, {format_nbytes(usage.free)} free"
    remedy = ""
    if usage.free < _LEAST_SHARED:
        remedy = (
            "the kernel does not use it, but DataLoader workers and NCCL do: delete leftover files there, or give the "
            "container more (docker run --shm-size 8g; in Kubernetes an emptyDir with medium: Memory)"
        )
    yield _rated("shared memory", found, remedy)


def temporary_files() -> Iterator[Finding]:
    """Check the directory in which sessions have theirs: its free space, and whether other users can replace files there."""
    directory = next((root for root in session_roots() if os.access(root, os.W_OK)), temporary_directory())
    free = shutil.disk_usage(directory).free
    found = f"{directory} has {format_nbytes(free)} free"
    remedy = ""
    if is_replaceable(directory):
        remedy = "other users can replace your files and sockets there: set TMPDIR to a directory of yours, or chmod +t"
    elif free < _LEAST_TEMPORARY:
        remedy = "the output of ranks is stored there, up to 8 MiB per rank: free some space, or set TMPDIR"
    yield _rated("temporary files", found, remedy)


def descriptors() -> Iterator[Finding]:
    """Check how many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _LEAST_DESCRIPTORS or soft == resource.RLIM_INFINITY:
        yield Finding("open files", Sign.OK, f"{_limit(soft)} per process (ulimit -n)")
        return
    found = f"{_limit(soft)} per process (ulimit -n), with a hard limit of {_limit(hard)}"
    if hard >= _LEAST_DESCRIPTORS or hard == resource.RLIM_INFINITY:
        remedy = (
            f"enough for a few ranks; for hundreds, run ulimit -n {_LEAST_DESCRIPTORS} in the shell that starts Jupyter"
        )
    else:
        remedy = (
            f"for hundreds of ranks, raise the hard limit to {_LEAST_DESCRIPTORS}: nofile in /etc/security/limits.conf, "
            "LimitNOFILE= of a systemd service, docker run --ulimit nofile"
        )
    yield Finding("open files", Sign.WARNING, found, remedy)


def tasks() -> Iterator[Finding]:
    """Check how many processes and threads the user may start."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    left = processes()
    found = f"{_limit(soft)} per user (ulimit -u)"
    if left is not None:
        found += f"; a control group allows {left:,} more"
    remedy = ""
    if (soft != resource.RLIM_INFINITY and soft < _LEAST_TASKS) or (left is not None and left < _LEAST_TASKS):
        remedy = (
            "each rank is a process with several threads; raise the limit: ulimit -u, nproc in /etc/security/limits.conf, "
            "TasksMax= of a systemd service, docker run --pids-limit"
        )
    yield _rated("processes", found, remedy)


def _rated(item: str, found: str, remedy: str) -> Finding:
    """A finding that is a warning if there is something to do."""
    return Finding(item, Sign.WARNING if remedy else Sign.OK, found, remedy)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else f"{value:,}"
