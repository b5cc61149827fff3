"""Collects evidence that the out-of-memory killer ended a process: its counters, and the memory that was free before."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.net.memory.limits import Room, oom_kills, room

__all__ = ["OomWatch"]

_REACH_S = 5.0  # the agent may learn of a death some seconds after the counter rose
_LOW_NBYTES = 256 << 20


class OomWatch:
    """Reads counters and free memory again and again, and compares when a process was killed.

    Args:
        root: where ``proc`` and ``sys`` are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._counts: deque[tuple[float, dict[str, int]]] = deque([(float("-inf"), oom_kills(root))])
        self._room: Room | None = None

    def read(self, now: float) -> None:
        """Take a reading."""
        self._counts.append((now, oom_kills(self._root)))
        while len(self._counts) > 1 and self._counts[1][0] <= now - _REACH_S:
            self._counts.popleft()
        self._room = room(self._root)

    def kills(self) -> str:
        """Name the counter that rose within the last seconds; empty if none did."""
        before = self._counts[0][1]
        for name, count in oom_kills(self._root).items():
            if name in before and count > before[name]:
                return f"oom_kill in {name} rose from {before[name]} to {count}"
        return ""

    def low_memory(self) -> str:
        """Describe the free memory at the last reading if it was little; empty otherwise."""
        if self._room is None or self._room.nbytes > _LOW_NBYTES:
            return ""
        return f"at the last reading there were {format_nbytes(self._room.nbytes)} of {self._room.of}"
