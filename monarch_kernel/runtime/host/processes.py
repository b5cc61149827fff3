"""Small Linux services that the standard library lacks: parent-death signals, subreapers, values from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
from typing import NoReturn

from monarch_kernel.net.memory.processes import open_pidfd

__all__ = [
    "await_end",
    "become_subreaper",
    "children_of",
    "cpu_seconds",
    "die_with_parent",
    "end_by_sigterm",
    "group_is_alive",
    "has_children",
    "open_process",
    "raise_descriptor_limit",
    "rss_nbytes",
    "signal_rank",
    "start_ticks",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def die_with_parent(signum: int) -> None:
    """Make the Linux kernel send this process a signal when the thread that is its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def end_by_sigterm() -> NoReturn:
    """End this process by SIGTERM, which it has handled, so that its status tells what ended it. Call it in the main thread."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(128 + signal.SIGTERM)  # the first process of a container, which that signal does not end


def become_subreaper() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def raise_descriptor_limit(most: int = resource.RLIM_INFINITY) -> None:
    """Raise the soft limit of open files to the hard limit, or to ``most``, for this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if most == resource.RLIM_INFINITY else most if hard == resource.RLIM_INFINITY else min(hard, most)
    if limit == resource.RLIM_INFINITY or limit > soft != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def await_end(parent: int) -> None:
    """Wait until the parent, which must be about to end, has ended and this process has another parent."""
    with contextlib.suppress(ProcessLookupError):  # its status has been collected already
        fd = open_pidfd(parent)
        try:
            while os.getppid() == parent:  # else another process has its pid now
                select.select([fd], [], [])
                os.sched_yield()
        finally:
            os.close(fd)


def has_children() -> bool:
    """Whether this process has children, including zombies."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process, including zombies; empty if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def rss_nbytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_NBYTES
    except (OSError, IndexError):
        return 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except (OSError, IndexError):
        return 0.0


def start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError):
        return 0


def open_process(pid: int, started: int) -> int:
    """Return a pidfd of the process with this pid and start time; -1 if it has ended."""
    try:
        pidfd = open_pidfd(pid)
    except ProcessLookupError:
        return -1
    if start_ticks(pid) == started:  # read while the pidfd prevents reuse of the pid
        return pidfd
    os.close(pidfd)
    return -1


def group_is_alive(pgid: int) -> bool:
    """Whether a process group has a member that this process may signal."""
    try:
        os.killpg(pgid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_rank(pid: int, signum: int) -> None:
    """Signal a rank and the rest of its process group, unless they have ended or belong to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)  # before `os.setsid` it is in another group
