"""Keeps groups of gloo for a while after they are destroyed, because torch can deadlock in their destructor.

The destructor waits for gloo's threads, and holds the GIL. A thread that has just completed an operation of
DistributedDataParallel needs the GIL to drop it. So a program that trains, drops its model and destroys the group could wait
forever, and no other thread of the process would run. The threads are idle a moment later.

Only gloo's part of a group is kept. The store of the group ends with the group, so that another one can have its port.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from monarch_kernel.runtime.worker.timers import later
from monarch_kernel.train.process_group.gloo_waits import gloo_of

__all__ = ["DestroyedGroups"]

_KEEP_S = 2.0
_MOST = 2
"""So many times the groups that were destroyed last are kept, if a program destroys groups again and again."""


class DestroyedGroups:
    """The groups that this process has destroyed, until their threads are idle."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Any]] = {}
        self._n_times = 0

    def __len__(self) -> int:
        return len(self.all())

    def keep(self, dist: Any, groups: Iterable[Any]) -> None:
        """Keep what is part of gloo in groups that are about to be destroyed."""
        kept = gloo_of(dist, groups)
        if not kept:
            return
        self._n_times += 1
        self._kept[self._n_times] = kept
        self._kept.pop(self._n_times - _MOST, None)
        later(_KEEP_S, self._kept.pop, self._n_times, None)

    def all(self) -> list[Any]:
        """What is kept now."""
        return [backend for kept in list(self._kept.values()) for backend in kept]

    def drop(self) -> None:
        """Drop all of them; call this when a new group has been formed, which takes long enough."""
        self._kept.clear()
