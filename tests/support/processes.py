"""Processes in tests: list them, check whether they have ended, and end them.

A process may end between the moment when it is listed and the moment when a test asks about it. Each function here treats such
a process as gone, and raises nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from monarch_kernel.actor import ProcMesh

__all__ = [
    "assert_gone",
    "children",
    "command_of",
    "descendants",
    "drop_root",
    "has_ended",
    "is_alive",
    "is_gone",
    "kill_ranks",
    "marked",
    "tree",
    "wait_gone",
]

GONE = FileNotFoundError, ProcessLookupError
"""Errors of ``/proc`` for a process that has ended: the first at the opening of a file, the second also when it is read."""

NOBODY = 65534


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a process that has ended and that its parent has not collected yet (a zombie) does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not collected it yet: some init processes are slow to do so."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_gone(pid: int) -> bool:
    """Whether no process has this pid any more, since it has ended and its parent has collected it."""
    return not psutil.pid_exists(pid)  # /proc/PID also exists for a thread with this number


def wait_gone(*pids: int) -> None:
    """Wait until no process has any of these pids."""
    wait_until(lambda: all(map(is_gone, pids)), f"processes {', '.join(map(str, pids))} to be gone")


def assert_gone(processes: Iterable[psutil.Process]) -> None:
    """Wait until none of these processes is alive."""
    waited = list(processes)
    wait_until(lambda: not any(map(is_alive, waited)), "these processes to end")


def children(pid: int) -> dict[int, bytes]:
    """Pid -> command line of each child, in the format of ``/proc``: ended by zero bytes, empty for a zombie."""
    found = {}
    for child in _children(pid):
        with suppress(*GONE):
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes()
    return found


def descendants(pid: int) -> list[int]:
    """Pids of all descendants of a process, including zombies; parents come first."""
    found = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(*GONE):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(*GONE):  # one of its threads has ended
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def tree(top: psutil.Process | int) -> list[psutil.Process]:
    """A process, which may be given by its pid, and all its descendants; empty if it has ended."""
    try:
        process = psutil.Process(top) if isinstance(top, int) else top
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def command_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def marked(mark: str) -> set[int]:
    """Pids of processes with ``mark`` in their environment, such as ``NAME=value``, which child processes inherit.

    The environment of a process can't be read for a moment while it executes another program, nor once it is ending.
    """
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(*GONE, PermissionError):  # the process belongs to another user, or is ending
                if mark.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.add(int(name))
    return found


def kill_ranks(procs: ProcMesh, *ranks: int) -> None:
    """Kill the processes of ranks, and wait until the controller knows of their deaths."""
    pids = {rank.rank: rank.pid for rank in procs.view().ranks}
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: set(ranks) <= set(procs.deaths()), "the news of the deaths")


def drop_root() -> None:
    """Drop root's capabilities in this process, if it has them, so that Linux enforces its permissions here, too."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
