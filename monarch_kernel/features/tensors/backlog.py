"""Limits how many bytes the program has sent to ranks that have not taken them yet.

A rank takes values in the order of all operations, so a program that is far ahead would fill the memory of the rank's host with
batches of data. After each quarter of the limit the ranks are asked to answer when they get there. The program waits for the
oldest answer when it reaches the limit, so ranks always have something to do meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from monarch_kernel.errors import RanksError
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["MAX_SENT_NBYTES", "Backlog"]

MAX_SENT_NBYTES = 1 << 30
"""Bytes that may be on their way to a rank."""


class Backlog:
    """The bytes that were sent to the ranks of a target, and have not arrived.

    Args:
        limit: The largest number before the program waits.
    """

    def __init__(self, limit: int = MAX_SENT_NBYTES) -> None:
        self.nbytes = 0
        self._limit = limit
        self._since_mark = 0
        self._marks: deque[tuple[Future[Any], int]] = deque()
        self._lock = threading.Lock()

    def add(self, nbytes: int, ask: Callable[[], Future[Any]]) -> None:
        """Note that bytes were sent, and wait if there are too many.

        Args:
            nbytes: Their number.
            ask: Asks the ranks for an answer after all that was sent.
        """
        with self._lock:
            self.nbytes += nbytes
            self._since_mark += nbytes
            if self._since_mark * 4 >= self._limit:
                since, self._since_mark = self._since_mark, 0
                self._marks.append((ask(), since))
        while self.nbytes > self._limit:
            with self._lock:
                if not self._marks:
                    return
                future, arrived = self._marks.popleft()
            try:
                future.get()
            except RanksError:  # a rank is dead: the next operation says so
                pass
            finally:
                with self._lock:
                    self.nbytes -= arrived
