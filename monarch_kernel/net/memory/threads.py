"""Worker threads that exist only while there is work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["IdleThreads"]


class IdleThreads:
    """Runs submitted functions in order, a few at a time; its threads end when no work is left.

    Args:
        name: of the threads.
        size: maximum number of threads.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._work: deque[Callable[[], None]] = deque()
        self._busy = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    def submit(self, work: Callable[[], None]) -> None:
        """Run a function soon; it must not raise. After `close`, it is ignored.

        Raises:
            RuntimeError: no thread is running, and none can be started.
        """
        with self._lock:
            if self._is_closed:
                return
            self._work.append(work)
            if self._busy == self._size:
                return
            self._busy += 1
        try:
            threading.Thread(target=self._do, name=self._name, daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._busy -= 1
                if self._busy:  # another thread does it
                    return
                self._work.clear()  # this function, and others whose submit() raises as well
            raise

    def close(self, timeout_s: float) -> None:
        """Drop the work that waits, and wait for the work in progress.

        Args:
            timeout_s: For how long, in seconds.
        """
        with self._lock:
            self._is_closed = True
            self._work.clear()
            self._idle.wait_for(lambda: not self._busy, timeout_s)

    def _do(self) -> None:
        while True:
            with self._lock:
                if not self._work:
                    self._busy -= 1
                    self._idle.notify_all()
                    return
                work = self._work.popleft()
            work()
