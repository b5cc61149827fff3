"""Cache of values that are slow to create, which keeps each for a while after its last use."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["IdleCache"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_LOOK_S = 0.5


@dataclass
class _Entry(Generic[V]):
    value: V
    users: int
    used_at: float


class IdleCache(Generic[K, V]):
    """Cache whose values several threads may use at a time. It closes no value: it drops it, and the finalizer does the rest.

    Args:
        name: name of the thread that drops idle values, which runs as long as the cache holds some.
        keep_s: how long a value is kept after its last use.
        is_wanted: whether a value may be used again.
    """

    def __init__(self, name: str, keep_s: float, is_wanted: Callable[[K], bool] = lambda key: True) -> None:
        self._name = name
        self._keep_s = keep_s
        self._is_wanted = is_wanted
        self._entries: dict[K, _Entry[V]] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_tidying = False

    def take(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, creating it if there is none; it stays until `give` was called as often as this."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.users += 1
                return entry.value
        value = make()
        with self._lock:
            entry = self._entries.setdefault(key, _Entry(value, 0, 0.0))  # another thread may have been first
            entry.users += 1
            if not self._is_tidying:
                try:
                    threading.Thread(target=self._tidy, name=self._name, daemon=True).start()
                    self._is_tidying = True
                except RuntimeError:  # no thread can be started: then the value is not cached
                    del self._entries[key]
            return entry.value

    def give(self, key: K, value: V) -> None:
        """Give back a value; call this once for each `take`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.value is value:  # else it was dropped, and the key has another value
                entry.users -= 1
                entry.used_at = time.monotonic()

    @contextlib.contextmanager
    def held(self, key: K, make: Callable[[], V]) -> Iterator[V]:
        """Use a value within a ``with`` block."""
        value = self.take(key, make)
        try:
            yield value
        finally:
            self.give(key, value)

    def drop(self, key: K) -> None:
        """Make the next `take` create a new value; threads that hold the current one keep using it."""
        with self._lock:
            self._entries.pop(key, None)

    def close(self) -> None:
        """Drop all values."""
        with self._lock:
            self._entries.clear()
            self._changed.notify_all()

    def _tidy(self) -> None:
        while self._let_go() or self._goes_on():
            pass

    def _let_go(self) -> bool:
        """Drop values that are not in use; their finalizers may be slow, so they run without the lock."""
        with self._lock:
            until = time.monotonic() - self._keep_s
            idle = [key for key, entry in self._entries.items() if not entry.users]
            over = [key for key in idle if self._entries[key].used_at <= until or not self._is_wanted(key)]
            gone = [self._entries.pop(key) for key in over]
        return bool(gone)

    def _goes_on(self) -> bool:
        """Wait for a while; return False if no value is left."""
        with self._lock:
            if self._entries:
                self._changed.wait(_LOOK_S)
            self._is_tidying = bool(self._entries)
            return self._is_tidying
