"""The processes that ranks start: the agent ends those that a rank leaves behind, also those in a separate session.

Theory of operation
===================

A process that a rank starts may leave the rank's process group (``start_new_session=True``, ``setsid``), and it may lose its
parent (a double fork). It remains a descendant of the agent, which is a subreaper: when its parent ends, the agent becomes its
parent. The agent's children are therefore the zygote, the ranks, and processes whose parent has ended. `Descendants` tells by
three signs to which rank such a process belongs:

- **Its environment.** Each rank has its own value of `VARIABLE`, which its descendants inherit. `mark_rank` sets it in
  ``os.environ``, for programs that the rank executes, and in the memory that ``/proc/PID/environ`` shows, for forks that
  execute none. Its first part names the agent, so that ranks of other agents are never confused with the agent's own.
- **Its place.** `note` takes down the descendants of a rank before the agent stops it, for those that have got another
  environment.
- **No rank is left.** Then every process that the agent has adopted comes from one that has ended.

Processes of a rank that lives are left alone. Those of a rank that has ended receive SIGTERM, and SIGKILL after a grace period;
the agent looks for more of them until there are none. Another host agent, which a kernel on a rank has started, is left alone
with all its descendants: it ends by itself when its kernel ends, or is detached.

If the agent is killed, `kill_marked`, called by the zygote, finds the processes by their environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Iterator, Set
from typing import TYPE_CHECKING

from monarch_kernel.runtime.host.processes import children_of, group_is_alive, signal_rank, start_ticks

if TYPE_CHECKING:
    from monarch_kernel.runtime.host.rank_process import RankProcess

__all__ = ["VARIABLE", "Descendants", "kill_marked", "mark_rank", "name_agent"]

VARIABLE = "MONARCH_KERNEL_PROCESS"
"""Names the agent and the rank from which a process comes, in hexadecimal digits."""

Key = tuple[int, int]
"""Number and incarnation of a rank."""

_AGENT_NBYTES = 8
_NO_RANK = "-" * 16
_KILL_ROUNDS = 50
_AGENT_MODULE, _AGENT_ARGUMENT = b"monarch_kernel.bootstrap", b"agent"


class Descendants:
    """The processes that the ranks of an agent have left behind.

    Args:
        grace_s: how long a process has between SIGTERM and SIGKILL.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._agent = _own_agent()
        self._groups: dict[int, float] = {}  # process groups of ranks that have ended, and when to kill them
        self._noted: dict[int, tuple[int, Key]] = {}  # by pid: start time and rank
        self._deadlines: dict[int, tuple[int, float]] = {}  # by pid: start time, and when to kill the process
        self._is_searching = False
        self._search_until = 0.0

    @property
    def groups(self) -> Set[int]:
        """The process groups of ranks that have ended, as far as they have members."""
        return self._groups.keys()

    @property
    def is_ending(self) -> bool:
        """Whether processes may be left that must end (`end_left`)."""
        return self._is_searching or bool(self._groups)

    def note(self, rank: RankProcess) -> None:
        """Take down what descends from a rank, which is about to be stopped."""
        for pid in descendants_of(rank.pid):
            self._noted[pid] = (start_ticks(pid), rank.key)

    def rank_ended(self, pid: int, now: float) -> None:
        """Send SIGTERM to the rest of a rank's process group; the next `end_left` searches for its other processes."""
        if group_is_alive(pid):
            signal_rank(pid, signal.SIGTERM)
            self._groups[pid] = now + self._grace_s
        self._is_searching = True
        self._search_until = now + self._grace_s

    def end_left(self, now: float, ranks: Collection[RankProcess], zygote: int) -> bool:
        """End the processes that belong to no rank any more; return whether one of `groups` has ended.

        Args:
            now: the time, of a monotonic clock.
            ranks: the ranks that have not ended.
            zygote: pid of the process that forks them; 0 if there is none.
        """
        before = len(self._groups)
        self._end_groups(now)
        if all(rank.pid for rank in ranks):  # else a child may be a rank whose pid the zygote has not reported yet
            own = {rank.pid for rank in ranks} | {zygote}
            self._end_others(now, {rank.key for rank in ranks}, own)
        return len(self._groups) < before

    def _end_groups(self, now: float) -> None:
        for pgid, deadline in list(self._groups.items()):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-pgid, os.WNOHANG)[0]:  # they are children of the agent now
                    pass
            if not group_is_alive(pgid):
                del self._groups[pgid]
            elif now >= deadline:
                signal_rank(pgid, signal.SIGKILL)

    def _end_others(self, now: float, ranks: Collection[Key], own: Collection[int]) -> None:
        left: dict[int, int] = {}
        is_any_unknown = False
        for child in children_of(os.getpid()):
            if child in own or _collected(child) or is_agent(child):
                continue
            rank = self._rank_of(child)
            is_any_unknown |= rank is None
            if rank not in ranks if rank is not None else not ranks:
                for pid in (child, *descendants_of(child)):
                    left[pid] = start_ticks(pid)
                    if rank is not None:
                        self._noted[pid] = (left[pid], rank)  # a child of a process that ends goes to the agent
        for pid, (started, deadline) in list(self._deadlines.items()):
            if left.get(pid) != started:
                del self._deadlines[pid]
            elif now >= deadline:
                _signal(pid, signal.SIGKILL)
        for pid, started in left.items():
            if started and pid not in self._deadlines:
                if _group_of(pid) not in self._groups:  # else it has got SIGTERM; many programs hurry at a second one
                    _signal(pid, signal.SIGTERM)
                self._deadlines[pid] = (started, now + self._grace_s)
        # The environment of a process can't be read for a moment while it executes another program.
        self._is_searching = bool(self._deadlines) or (is_any_unknown and now < self._search_until)
        if not self._is_searching:
            self._noted = {pid: noted for pid, noted in self._noted.items() if noted[1] in ranks}

    def _rank_of(self, pid: int) -> Key | None:
        """Return the rank from which a process comes; None if that is unknown."""
        started, rank = self._noted.get(pid, (0, None))
        if rank is not None and started == start_ticks(pid):
            return rank
        return _key_of(_mark_of(pid), self._agent)


def name_agent() -> None:
    """Give this process, a host agent, a name that its zygotes inherit; call it before the first zygote is started."""
    os.environ[VARIABLE] = os.urandom(_AGENT_NBYTES).hex() + _NO_RANK


def mark_rank(proc: int, incarnation: int) -> None:
    """Mark this process, which was forked from the zygote, as a rank."""
    agent = _own_agent()
    if not agent:
        return
    mark = f"{agent}{proc:08x}{incarnation:08x}"
    os.environ[VARIABLE] = mark
    with contextlib.suppress(OSError, ValueError, IndexError):  # some kernels hide where the environment is
        with open("/proc/self/stat", "rb") as file:
            first = int(file.read().rpartition(b")")[2].split()[47])
        with open("/proc/self/environ", "rb") as file:
            environment = file.read()
        assignment = f"{VARIABLE}=".encode()
        at = 0 if environment.startswith(assignment) else environment.index(b"\0" + assignment) + 1
        end = environment.index(b"\0", at)
        if first and end - at - len(assignment) == len(mark):
            ctypes.memmove(first + at + len(assignment), mark.encode(), len(mark))


def kill_marked() -> None:
    """Kill all processes of the ranks of an agent that has ended; this process is its zygote."""
    agent = _own_agent()
    for _ in range(_KILL_ROUNDS if agent else 0):  # a process may start another one before it is killed
        marked = [
            pid
            for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
            if _key_of(_mark_of(pid), agent) is not None and start_ticks(pid) and not is_agent(pid)
        ]
        if not marked:
            return
        for pid in marked:
            _signal(pid, signal.SIGKILL)


def descendants_of(pid: int) -> Iterator[int]:
    """Yield the children of a process and theirs, without other host agents and their descendants."""
    for child in children_of(pid):
        if not is_agent(child):
            yield child
            yield from descendants_of(child)


def is_agent(pid: int) -> bool:
    """Whether a process is a host agent."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0").split(b"\0")
    except OSError:
        return False
    return len(words) > 1 and words[-1] == _AGENT_ARGUMENT and _AGENT_MODULE in words[-2]  # by "-m" or by "-c"


def _own_agent() -> str:
    """Return the name of the agent that this process is, or belongs to; empty if it has none."""
    return os.environ.get(VARIABLE, "")[: 2 * _AGENT_NBYTES]


def _key_of(mark: str, agent: str) -> Key | None:
    """Return the rank that a mark names; None if it names no rank of this agent."""
    own, rank = mark[: 2 * _AGENT_NBYTES], mark[2 * _AGENT_NBYTES :]
    if not agent or own != agent or len(rank) != len(_NO_RANK):
        return None
    try:
        return int(rank[:8], 16), int(rank[8:], 16)
    except ValueError:  # the zygote, or a rank that has not marked itself yet
        return None


def _mark_of(pid: int) -> str:
    """Return the mark in the environment of a process; empty if it has none, or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return ""
    assignment = f"{VARIABLE}=".encode()
    for each in environment.split(b"\0"):
        if each.startswith(assignment):
            return each[len(assignment) :].decode(errors="replace")
    return ""


def _collected(pid: int) -> bool:
    """Collect the status of a child of this process if it has ended; return whether it had."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)
