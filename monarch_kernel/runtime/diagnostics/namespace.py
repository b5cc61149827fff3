"""Reports a rank's namespace to the controller: the names, and the kind of each value.

Before it answers a cell or a push, a rank sends `Names`: the names and kinds that have changed, and nothing if none has.
The controller keeps them, bounded, until the rank ends. So completion needs no question to a rank, and a `NameError` can
say where the name is. `Complete` and `Inspect` are questions, not work: a rank that answers one is not *running*, keeps its
last error, and later requests do not wait for it. The thread that drives the socket answers them, and looks into
dictionaries only (`runtime.diagnostics.inspection`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from monarch_kernel.net.wire.messages import Names
from monarch_kernel.runtime.diagnostics.inspection import kind_of

__all__ = ["NameTracker"]

_MAX_NAMES = 2_000
_MAX_LENGTH = 100


class NameTracker:
    """Finds the changes in a namespace since the last call, at little cost if there are none.

    It keeps no object of the user alive: it remembers only names, kinds and addresses. It therefore notices that a tensor was
    resized in place only when the name is assigned again.

    Args:
        hidden: names that are not the user's.
    """

    def __init__(self, hidden: Collection[str]) -> None:
        self._hidden = frozenset(hidden)
        self._seen: list[object] = []
        self._marks: dict[str, tuple[int, int]] = {}
        self._reported: dict[str, str] = {}

    def everything(self) -> Names:
        """Return everything reported so far, for a controller that has not received it."""
        return Names(dict(self._reported))

    def news(self, namespace: Mapping[str, object]) -> Names | None:
        """Return the changes, or None if there are none."""
        names, values = list(namespace), list(namespace.values())
        ids, types = list(map(id, values)), list(map(id, map(type, values)))
        seen = [*names, *ids, *types]
        if seen == self._seen:
            return None
        self._seen = seen
        reported, marks = self._reported, self._marks
        now: dict[str, str] = {}
        for name, value, mark in zip(names, values, zip(ids, types), strict=False):
            if marks.get(name) == mark:
                now[name] = reported[name]
            elif type(name) is str and name[:1] != "_" and name not in self._hidden and len(name) <= _MAX_LENGTH:
                marks[name] = mark
                now[name] = kind_of(value)
            if len(now) >= _MAX_NAMES:
                break
        changed = {name: kind for name, kind in now.items() if reported.get(name) != kind}
        removed = tuple(name for name in reported if name not in now)
        for name in removed:
            del marks[name]
        self._reported = now
        return Names(changed, removed) if changed or removed else None
