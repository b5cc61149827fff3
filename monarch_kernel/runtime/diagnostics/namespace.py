"""What the controller is told of a rank's namespace: which names there are, and what kind of thing each is."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from monarch_kernel.net.wire.messages import Names
from monarch_kernel.runtime.diagnostics.inspection import kind_of

__all__ = ["NameTracker"]

_MAX_NAMES = 2_000
_MAX_LENGTH = 100


class NameTracker:
    """Finds what has changed in a namespace since it was last looked at, at little cost where nothing has.

    It keeps nothing of the user's alive: names, words and addresses are all that it remembers. So a tensor that was
    resized in place is seen only when its name is bound anew.

    Args:
        hidden: names that are not the user's.
    """

    def __init__(self, hidden: Collection[str]) -> None:
        self._hidden = frozenset(hidden)
        self._seen: list[object] = []
        self._marks: dict[str, tuple[int, int]] = {}
        self._told: dict[str, str] = {}

    def everything(self) -> Names:
        """Tell all that has been told; for a controller that has heard none of it."""
        return Names(dict(self._told))

    def news(self, namespace: Mapping[str, object]) -> Names | None:
        """Tell what has changed, or None."""
        names, values = list(namespace), list(namespace.values())
        ids, types = list(map(id, values)), list(map(id, map(type, values)))
        seen = [*names, *ids, *types]
        if seen == self._seen:
            return None
        self._seen = seen
        told, marks = self._told, self._marks
        now: dict[str, str] = {}
        for name, value, mark in zip(names, values, zip(ids, types), strict=False):
            if marks.get(name) == mark:
                now[name] = told[name]
            elif type(name) is str and name[:1] != "_" and name not in self._hidden and len(name) <= _MAX_LENGTH:
                marks[name] = mark
                now[name] = kind_of(value)
            if len(now) >= _MAX_NAMES:
                break
        changed = {name: kind for name, kind in now.items() if told.get(name) != kind}
        removed = tuple(name for name in told if name not in now)
        for name in removed:
            del marks[name]
        self._told = now
        return Names(changed, removed) if changed or removed else None
