"""Ends receives of gloo from any rank.

Theory of operation
===================

A receive from one rank ends with the connection to it (`gloo_waits`). A receive from any rank belongs to no connection: it
ends with a message, or at the timeout of its group, or when it is aborted (`gloo_aborts`).

gloo accepts a receive from any rank also when all connections of the group are closed, and it would never end. So an ended
group refuses further ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from monarch_kernel.train.process_group.gloo_aborts import TEXT, abort

__all__ = ["AnySource"]


class AnySource:
    """The receives from any rank of this process, once it is installed; any thread may end them."""

    def __init__(self) -> None:
        self._groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by receive
        self._ended: WeakSet[Any] = WeakSet()  # groups

    def install(self, dist: Any) -> None:
        """Wrap the method that starts receives."""
        dist.ProcessGroup.recv_anysource = self._starting(dist.ProcessGroup.recv_anysource)

    def refuse(self, dist: Any, dead: int | None) -> None:
        """Let no further receive begin in groups that are ended now: those of a rank that has died, or all groups."""
        world = dist.distributed_c10d._world
        for group in (*list(world.pg_map), *self._in_use()):
            if dead is None or dead in world.pg_group_ranks.get(group, (dead,)):  # a destroyed group ends, too
                self._ended.add(group)

    def end(self) -> None:
        """Make receives in ended groups raise an error."""
        for of in self._groups.keyrefs():
            if (work := of()) is not None and self._groups[work]() in self._ended:
                abort(work)

    def _in_use(self) -> list[Any]:
        works = [work for of in self._groups.keyrefs() if (work := of()) is not None]
        return [group for work in works if (group := self._groups[work]()) is not None]

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def recv_anysource(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group in self._ended:
                raise RuntimeError(TEXT)
            work = original(group, *args, **kwargs)
            self._groups[work] = ref(group)
            if group in self._ended:  # since then
                abort(work)
            return work

        return recv_anysource
