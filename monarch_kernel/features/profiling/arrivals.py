"""The times at which this process has started its last collectives, so that ranks can be compared at any time.

Ranks must keep the times of the same collectives, although each keeps few. So a collective is kept or not by its number in its
group. Where they follow each other fast, only some blocks of successive numbers are kept, since a rank that is late is so at
the first collective of a step. Which blocks these are looks random, so that they are not always at the same place in a step.
All that a rank keeps, another one keeps, too, if it keeps twice as many.

This takes one to three microseconds for a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["ARRIVALS", "Arrivals", "GroupArrivals", "is_kept"]

_BLOCK = 4
"""A block has 2 to the power of this many numbers."""

_KEPT = 64
"""Arrivals in a group between two reports."""

_MAX_GROUPS = 16
_MAX_MASK = (1 << 12) - 1
_SPREAD = 0x9E3779B1


class GroupArrivals(NamedTuple):
    """Arrivals of one process in one group.

    Attributes:
        group: torch's name of the group.
        members: the ranks in the group.
        numbers: numbers of collectives, ascending.
        times: when they were started, in seconds since 1970.
    """

    group: str
    members: tuple[int, ...]
    numbers: tuple[int, ...]
    times: tuple[float, ...]


def is_kept(number: int, mask: int) -> bool:
    """Whether a collective is kept, by its number; a ``mask`` of 0 keeps all, and one bit more keeps half of them."""
    return not ((number >> _BLOCK) * _SPREAD >> 16) & mask


class _Group:
    __slots__ = ("last", "mask", "members", "times")

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.mask = 0
        self.last = 0
        self.times: list[tuple[int, float]] = []


class Arrivals:
    """Keeps arrivals until they are taken.

    Attributes:
        on_news: called when there are arrivals again, after it was found that there are none.
    """

    def __init__(self) -> None:
        self.on_news: Callable[[], object] = lambda: None
        self._groups: dict[str, _Group] = {}
        self._is_asleep = True

    def note(self, name: str, members: tuple[int, ...], number: int, at: float) -> None:
        """Note a collective.

        Args:
            name: torch's name of the group.
            members: the ranks in the group; the same object for each of its collectives.
            number: of the collective in the group.
            at: when it was started, by `time.perf_counter`.
        """
        group = self._groups.get(name)
        if group is None or number <= group.last or group.members is not members:  # a new group with this name
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            group = self._groups[name] = _Group(members)
        group.last = number
        if not is_kept(number, group.mask):
            return
        group.times.append((number, at))
        if len(group.times) > _KEPT:
            if group.mask < _MAX_MASK:
                group.mask = group.mask << 1 | 1
            group.times = [each for each in group.times if is_kept(each[0], group.mask)][-_KEPT:]
        if self._is_asleep:
            self._is_asleep = False
            self.on_news()

    def take(self) -> list[GroupArrivals]:
        """Return what was noted since the last call. If that is nothing, the next arrival calls ``on_news``."""
        since_1970 = time.time() - time.perf_counter()
        found = []
        for name, group in list(self._groups.items()):
            times, group.times = group.times, []
            if len(times) < _KEPT // 4:
                group.mask >>= 1
            if times:
                numbers, starts = zip(*times)
                found.append(GroupArrivals(name, group.members, numbers, tuple(at + since_1970 for at in starts)))
        if not found:
            self._is_asleep = True
        return found


ARRIVALS = Arrivals()
"""Those of this process."""
