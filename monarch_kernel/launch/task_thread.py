"""A thread that runs a launcher's delayed tasks one at a time, so that slow calls do not block the caller."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["DelayedTasks"]

_log = logging.getLogger(__name__)


class DelayedTasks:
    """Runs tasks on one thread when they are due; the thread starts with the first task, and ends with `close`.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def at(self, delay_s: float, do: Callable[[], object]) -> None:
        """Schedule a task after a delay; a negative delay runs it next, before all others. No effect after `close`."""
        with self._lock:
            if self._is_closed:
                return
            heapq.heappush(self._due, (time.monotonic() + delay_s if delay_s >= 0 else 0.0, next(self._count), do))
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout_s: float | None = None) -> None:
        """Drop all waiting tasks, and wait for the running one to end."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._is_closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(max(0.0, self._due[0][0] - time.monotonic()) if self._due else None)
                if self._is_closed:
                    return
                do = heapq.heappop(self._due)[2]
            try:
                do()
            except Exception:  # a bug in a task must not prevent later tasks
                _log.exception("%r failed", do)
