"""A SIGTERM from outside, such as that of a scheduler that takes the machine, at ranks and at their agent.

The agent ends ranks by SIGTERM, too, when their mesh is no longer needed. It sends `STOP_SIGNAL` before, which ranks block and
look for, since a handler of Python does not learn which process sent a signal (`runtime.worker.termination`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Protocol

__all__ = [
    "ENDING",
    "INTERRUPT_SIGNAL",
    "MOST_S",
    "STOP_SIGNAL",
    "Preemption",
    "block_stop_signal",
    "note_stop",
    "nudge",
]

ENDING = (
    "something has asked the host agent to end (SIGTERM), likely a scheduler that preempts the job or its machine; it starts "
    "no more ranks; request them again, and another agent starts them"
)
"""Why an agent that ends does not start a rank."""

MOST_S = 600.0
"""How long an agent waits for ranks that save their work: longer than schedulers do, so that only hung ranks are cut off."""

STOP_SIGNAL = signal.SIGRTMIN + 6
"""Tells a rank that the SIGTERM that follows is from its agent."""

INTERRUPT_SIGNAL = signal.SIGRTMIN + 7
"""Interrupts what the main thread of a rank waits for; user code has no handler for it."""


def block_stop_signal() -> None:
    """Keep the signal for a thread that looks for it, in all threads that start from here on, and in forks.

    Call it before the first thread starts: a thread that does not block the signal would take it, and the process would end.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (STOP_SIGNAL,))


def note_stop(pid: int) -> None:
    """Tell a rank that the agent stops it, before the SIGTERM."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STOP_SIGNAL)


def nudge(pid: int) -> None:
    """Make a rank that the agent stops handle the SIGTERM that it has got.

    A signal just before a system call does not interrupt the call: Python would handle it when the call ends, which may take
    for ever. The exception of its handler can also be lost, in code where Python ignores exceptions.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, INTERRUPT_SIGNAL)


class _Rank(Protocol):
    """What is needed of a rank (`runtime.host.rank_process`)."""

    pid: int
    stopping: float | None

    @property
    def key(self) -> tuple[int, int]:
        """Number and incarnation."""
        ...


class Preemption:
    """Handles SIGTERM for a host agent: passes it to the ranks, which may save their work, and ends the agent after them.

    A scheduler signals only the agent where it is the first process of a container, and each process in other places: a rank
    acts at the first signal only. The scheduler's SIGKILL bounds the time.

    Args:
        ranks: the ranks of the host.
        tell: tells the controller that the agent starts no more ranks.
        end: ends the agent.

    Attributes:
        has_started: whether a SIGTERM has come.
    """

    def __init__(self, ranks: Mapping[int, _Rank], tell: Callable[[], object], end: Callable[[], object]) -> None:
        self.has_started = False
        self._has_reported = False
        self._ranks = ranks
        self._tell = tell
        self._end = end
        self._saving: set[tuple[int, int]] = set()
        self._until = 0.0
        signal.signal(signal.SIGTERM, lambda signum, frame: self._begin())

    def _begin(self) -> None:
        if self.has_started:
            return
        self.has_started = True
        self._until = time.monotonic() + MOST_S
        for rank in list(self._ranks.values()):
            if rank.pid and rank.stopping is None:
                self._saving.add(rank.key)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.pid, signal.SIGTERM)  # not its group: workers of a loader are needed until the end

    def do_what_is_due(self, now: float) -> None:
        """Tell the controller; end the agent once the ranks that got the signal have ended, or have had `MOST_S`."""
        if self.has_started and not self._has_reported:
            self._has_reported = True
            self._tell()
        if self.has_started and (now >= self._until or self._saving.isdisjoint(self._keys())):
            self._end()

    def _keys(self) -> set[tuple[int, int]]:
        return {rank.key for rank in self._ranks.values()}
