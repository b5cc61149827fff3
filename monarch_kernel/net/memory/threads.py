"""Threads that are there as long as there is work for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Crew"]


class Crew:
    """Does what it is given, in order, a few at a time; its threads end when nothing is left to do.

    Args:
        name: of the threads.
        size: how many there are at most.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._work: deque[Callable[[], None]] = deque()
        self._busy = 0
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], None]) -> None:
        """Have something done soon; it must not raise.

        Raises:
            RuntimeError: no thread can be started, and none is there.
        """
        with self._lock:
            self._work.append(work)
            if self._busy == self._size:
                return
            self._busy += 1
        try:
            threading.Thread(target=self._do, name=self._name, daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._busy -= 1
                if self._busy:  # another does it
                    return
                self._work.clear()  # of that one, or of others to whom the same was said
            raise

    def _do(self) -> None:
        while True:
            with self._lock:
                if not self._work:
                    self._busy -= 1
                    return
                work = self._work.popleft()
            work()
