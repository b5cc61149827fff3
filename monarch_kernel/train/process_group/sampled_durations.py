"""Measures the duration of some of the collectives that C++ code starts: of those for which Python does not wait.

A thread waits for one such collective at a time. A callback of torch's futures would measure each one, but could block for
ever: it runs on a thread of gloo, which needs the interpreter for it, and the destructor of a process group, which holds the
interpreter, waits for that thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from monarch_kernel.net.memory.counters import CollectiveKind, Meters

__all__ = ["SampledDurations"]

_EVERY_S = 0.1
_IDLE_S = 5.0
"""The thread ends after this long without a collective."""


class _Sample(NamedTuple):
    kind: CollectiveKind
    size: int
    started: float
    work: Any


class SampledDurations:
    """Measures at most ten durations per second.

    Args:
        meters: receive the durations.
    """

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._wait: Callable[[Any], object] = lambda work: None
        self._next = 0.0
        self._is_busy = False
        self._samples: SimpleQueue[_Sample] = SimpleQueue()
        self._has_thread = False
        self._lock = threading.Lock()

    def install(self, wait: Callable[[Any], object]) -> None:
        """Use this function, torch's own ``Work.wait``, to wait for collectives."""
        self._wait = wait

    def is_due(self, started: float) -> bool:
        """Whether a collective that was started at this time may be measured."""
        return not self._is_busy and started >= self._next

    def offer(self, kind: CollectiveKind, size: int, started: float, work: Callable[[], Any]) -> None:
        """Measure a collective, or do nothing if another one was measured just now.

        Args:
            kind: what it is counted with.
            size: its size.
            started: when it was started, by `time.perf_counter`.
            work: returns torch's object for it.
        """
        if not self.is_due(started) or not size:
            return
        self._is_busy, self._next = True, started + _EVERY_S
        with self._lock:
            self._samples.put(_Sample(kind, size, started, work()))
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="monarch-durations", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                sample = self._samples.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._samples.empty():
                        self._has_thread = False
                        return
                continue
            self._measure(sample)
            del sample  # it keeps tensors alive
            self._is_busy = False

    def _measure(self, sample: _Sample) -> None:
        try:
            if sample.work.is_completed():  # when it ended is unknown
                return
            self._wait(sample.work)
        except RuntimeError:  # it has failed, which its user learns
            return
        seconds = time.perf_counter() - sample.started
        self._meters.collect(sample.kind, operations=0, timed_nbytes=sample.size, timed_s=seconds)
