"""Failures that no actor has handled: the program is told, on a thread of its own."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable

from monarch_kernel.errors import MeshFailure

__all__ = ["Faults", "show_fault"]

_log = logging.getLogger(__name__)

TOGETHER_S = 0.02
"""How long to wait, in seconds, for what fails at the same time; that is told as one."""


def show_fault(failure: MeshFailure) -> None:
    """Write a failure that nobody has handled to stderr."""
    sys.stderr.write(f"unhandled failure: {failure.report()}\n")
    sys.stderr.flush()


class Faults:
    """Hands failures to whoever is told of those that nobody has handled, one at a time.

    Whoever is told may do what the thread that drives the transport must not: take long, ask ranks. What it raises is logged.

    Args:
        take: gives the next failure of what the program has spawned, or None.

    Attributes:
        tell: who is told.
    """

    def __init__(self, take: Callable[[], MeshFailure | None]) -> None:
        self.tell: Callable[[MeshFailure], object] = show_fault
        self._take = take
        self._others: deque[MeshFailure] = deque()
        self._lock = threading.Lock()
        self._one_at_a_time = threading.RLock()
        self._is_due = False

    def call(self) -> None:
        """There is a failure to be taken."""
        with self._lock:
            if self._is_due:
                return
            self._is_due = True
        timer = threading.Timer(TOGETHER_S, self.tell_all)
        timer.name = "monarch-faults"
        timer.daemon = True
        timer.start()

    def add(self, failure: MeshFailure) -> None:
        """A failure of something that is not the program's own."""
        self._others.append(failure)
        self.call()

    def tell_all(self) -> None:
        """Tell what there is."""
        with self._one_at_a_time:
            with self._lock:
                self._is_due = False
            while (failure := self._next()) is not None:
                try:
                    self.tell(failure)
                except Exception:  # of the user's; it must not hide the next one
                    _log.exception("whoever is told of unhandled failures failed")

    def _next(self) -> MeshFailure | None:
        try:
            return self._others.popleft()
        except IndexError:
            return self._take()
