"""Free resources of the machine, within the limits of control groups, which containers set.

The resources are memory, processor cores and processes.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Room", "cores", "largest_file", "oom_kills", "processes", "room"]

_UNLIMITED = 1 << 60
"""Version 1 of control groups represents "no limit" by a number a little below the largest number of pages."""


class Room(NamedTuple):
    """A number of free bytes, and words that say of what, to follow the number."""

    nbytes: int
    of: str


def room(root: Path = Path("/")) -> Room:
    """Return the memory that this process can use without taking it from others.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    return min(_limits(root), default=Room(_UNLIMITED, "memory"))


def oom_kills(root: Path = Path("/")) -> dict[str, int]:
    """Return how many processes the out-of-memory killer has ended, by the counters of control groups and of the machine."""
    found = {}
    for group in _groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):  # of version 2, of version 1
            if (count := _fields(group / name, 1).get("oom_kill")) is not None:
                found[str(Path("/") / (group / name).relative_to(root))] = count
    if (count := _fields(root / "proc/vmstat", 1).get("oom_kill")) is not None:
        found["/proc/vmstat"] = count
    return found


def largest_file() -> int:
    """Return the maximum size of a file of this process, including memory files; in bytes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def cores(root: Path = Path("/")) -> float:
    """Return how many cores this process may use: those of its affinity, or fewer by the quotas of control groups."""
    found = [float(len(os.sched_getaffinity(0)))]
    for group in _groups(root, "cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if (words := _words(group / "cpu.max")) and words[0] != "max":
            quota, period = int(words[0]), int(words[1])
        if quota is not None and period and quota > 0:
            found.append(quota / period)
    return min(found)


def processes(root: Path = Path("/")) -> int | None:
    """Return how many more processes and threads the control groups allow; None if they set no limit."""
    found = []
    for group in _groups(root, "pids"):
        limit, taken = _number(group / "pids.max"), _number(group / "pids.current")
        if limit is not None and taken is not None:
            found.append(max(0, limit - taken))
    return min(found, default=None)


def _limits(root: Path) -> Iterator[Room]:
    machine = _fields(root / "proc/meminfo", 1024)
    if "MemAvailable" in machine:
        yield Room(machine["MemAvailable"], "free memory")
    if _number(root / "proc/sys/vm/overcommit_memory") == 2 and "CommitLimit" in machine:
        yield Room(machine["CommitLimit"] - machine.get("Committed_AS", 0), "memory that may still be committed")
    for group in _groups(root, "memory"):
        yield from _limits_of(group)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the control groups that this process is in, of either version, inner ones first.

    In a container the path may be that of the outside. Then the group is found below the end of the path that exists here.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            tops = [root / "sys/fs/cgroup" / controller]
        else:
            continue
        for top in tops:
            inner = top / path.lstrip("/")
            yield from (each for each in (inner, *inner.parents) if each.is_relative_to(top) and each.is_dir())


def _limits_of(group: Path) -> Iterator[Room]:
    for used, inactive, limits in (
        ("memory.current", "inactive_file", ("memory.max", "memory.high")),
        ("memory.usage_in_bytes", "total_inactive_file", ("memory.limit_in_bytes",)),
    ):
        taken = _number(group / used)
        if taken is None:
            continue
        taken -= _fields(group / "memory.stat", 1).get(inactive, 0)  # files in the cache give way
        for name in limits:
            limit = _number(group / name)
            if limit is not None and limit < _UNLIMITED:
                yield Room(
                    max(0, limit - taken), f"free memory within {name} ({limit / 2**30:.1f} GiB) of the control group"
                )


def _fields(path: Path, unit: int) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {each[0].rstrip(":"): int(each[1]) * unit for each in words if len(each) > 1 and each[1].isdigit()}


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Read a number from a file; None if it says "max", or does not exist."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
