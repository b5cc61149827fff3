"""Values that take long to make, kept for a while after their last use."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Kept"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_LOOK_S = 0.5


@dataclass
class _Entry(Generic[V]):
    value: V
    users: int
    used_at: float


class Kept(Generic[K, V]):
    """What several threads may use at a time. Nobody closes a value: it is let go, and sees to the rest itself.

    Args:
        name: of the thread that lets go of values, which is there as long as there are some.
        keep_s: how long after the last use.
        is_wanted: whether a value may be used again.
    """

    def __init__(self, name: str, keep_s: float, is_wanted: Callable[[K], bool] = lambda key: True) -> None:
        self._name = name
        self._keep_s = keep_s
        self._is_wanted = is_wanted
        self._entries: dict[K, _Entry[V]] = {}
        self._changed = threading.Condition()
        self._is_tidying = False

    def take(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if there is none; it stays until `give` was called as often."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is not None:
                entry.users += 1
                return entry.value
        value = make()
        with self._changed:
            entry = self._entries.setdefault(key, _Entry(value, 0, 0.0))  # another thread may have been first
            entry.users += 1
            if not self._is_tidying:
                try:
                    threading.Thread(target=self._tidy, name=self._name, daemon=True).start()
                    self._is_tidying = True
                except RuntimeError:  # no thread can be started: then it is not kept
                    del self._entries[key]
            return entry.value

    def give(self, key: K, value: V) -> None:
        """A value is not used any more by one of those who have taken it."""
        with self._changed:
            entry = self._entries.get(key)
            if entry is not None and entry.value is value:  # else it was dropped, and there is another
                entry.users -= 1
                entry.used_at = time.monotonic()

    @contextlib.contextmanager
    def held(self, key: K, make: Callable[[], V]) -> Iterator[V]:
        """Use a value."""
        value = self.take(key, make)
        try:
            yield value
        finally:
            self.give(key, value)

    def drop(self, key: K) -> None:
        """Have the next one make another value; those who have this one go on with it."""
        with self._changed:
            self._entries.pop(key, None)

    def close(self) -> None:
        """Let go of all."""
        with self._changed:
            self._entries.clear()
            self._changed.notify_all()

    def _tidy(self) -> None:
        while self._let_go() or self._goes_on():
            pass

    def _let_go(self) -> bool:
        """Let go of what is not used; to let go may take long, so nobody has to wait for it."""
        with self._changed:
            until = time.monotonic() - self._keep_s
            idle = [key for key, entry in self._entries.items() if not entry.users]
            over = [key for key in idle if self._entries[key].used_at <= until or not self._is_wanted(key)]
            gone = [self._entries.pop(key) for key in over]
        return bool(gone)

    def _goes_on(self) -> bool:
        """Wait a while; False if nothing is left."""
        with self._changed:
            if self._entries:
                self._changed.wait(_LOOK_S)
            self._is_tidying = bool(self._entries)
            return self._is_tidying
