"""Reports failures that no actor has handled to the program, on a separate thread."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable

from monarch_kernel.errors import MeshFailure

__all__ = ["FailureReporter", "show_failure"]

_log = logging.getLogger(__name__)

TOGETHER_S = 0.02
"""How long to wait, in seconds, for failures at the same time; they are reported together."""


def show_failure(failure: MeshFailure) -> None:
    """Write an unhandled failure to stderr."""
    sys.stderr.write(f"unhandled failure: {failure.report()}\n")
    sys.stderr.flush()


class FailureReporter:
    """Passes unhandled failures to a handler, one at a time.

    The handler may do what the I/O thread must not: take long, and send requests to ranks. Its exceptions are logged.

    Args:
        take: Returns the next failure of what the program has spawned, or None.

    Attributes:
        tell: The handler.
    """

    def __init__(self, take: Callable[[], MeshFailure | None]) -> None:
        self.tell: Callable[[MeshFailure], object] = show_failure
        self._take = take
        self._others: deque[MeshFailure] = deque()
        self._lock = threading.Lock()
        self._one_at_a_time = threading.RLock()
        self._is_due = False

    def call(self) -> None:
        """Schedule a report: there is a failure to take."""
        with self._lock:
            if self._is_due:
                return
            self._is_due = True
        timer = threading.Timer(TOGETHER_S, self.tell_all)
        timer.name = "monarch-faults"
        timer.daemon = True
        timer.start()

    def add(self, failure: MeshFailure) -> None:
        """Report a failure of something that the program has not spawned itself."""
        self._others.append(failure)
        self.call()

    def tell_all(self) -> None:
        """Report all failures that there are."""
        with self._one_at_a_time:
            with self._lock:
                self._is_due = False
            while (failure := self._next()) is not None:
                try:
                    self.tell(failure)
                except Exception:  # of the user's handler; it must not hide the next failure
                    _log.exception("the handler of unhandled failures failed")

    def _next(self) -> MeshFailure | None:
        try:
            return self._others.popleft()
        except IndexError:
            return self._take()
