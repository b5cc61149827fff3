"""A SIGTERM from outside, such as that of a scheduler that takes the machine.

The agent ends ranks by SIGTERM, too, when their mesh is no longer needed. It sends `STOP_SIGNAL` before, which ranks block and
look for, since a handler of Python does not learn which process sent a signal (`runtime.worker.termination`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

__all__ = ["STOP_SIGNAL", "Preemption", "block_stop_signal", "note_stop"]

STOP_SIGNAL = signal.SIGRTMIN + 6
"""Tells a rank that the SIGTERM that follows is from its agent."""


def block_stop_signal() -> None:
    """Keep the signal for a thread that looks for it, in all threads that start from here on, and in forks.

    Call it before the first thread starts: a thread that does not block the signal would take it, and the process would end.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (STOP_SIGNAL,))


def note_stop(pid: int) -> None:
    """Tell a rank that the agent stops it, before the SIGTERM."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STOP_SIGNAL)


class Preemption:
    """Handles SIGTERM for a host agent.

    Args:
        end: ends the agent.

    Attributes:
        has_started: whether a SIGTERM has come.
    """

    def __init__(self, end: Callable[[], object]) -> None:
        self.has_started = False
        self._end = end
        signal.signal(signal.SIGTERM, lambda signum, frame: self._begin())

    def _begin(self) -> None:
        self.has_started = True
        self._end()
