"""The controller's part of profiles: makes ranks record, and reads the clocks of their machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monarch_kernel.errors import Failure
from monarch_kernel.features.profiling.messages import GetTime, ReadProfile, StartProfile, StopProfile
from monarch_kernel.features.profiling.recording import Recording
from monarch_kernel.net.memory.leases import identity
from monarch_kernel.net.wire.codec import Packed, pack
from monarch_kernel.runtime.controller.host_compatibility import Clock
from monarch_kernel.runtime.controller.runtime import Runtime
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.gather import read_value

__all__ = ["ProfileControl"]

_TRIPS = 8
_TRIP_S = 1.0
_START_S = 30.0
_ANSWER_S = 60.0
"""Ranks write and send their traces for up to this long."""


class ProfileControl:
    """Records profiles of a session.

    Args:
        runtime: the controller.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def record(
        self, procs: Sequence[int], steps: int, seconds: float, *, memory: bool = False
    ) -> list[Recording | Failure]:
        """Make ranks record, and wait until all have done so; an interrupt ends the recording, and this wait.

        Args:
            procs: the processes.
            steps: the number of steps.
            seconds: the most that the recording may take.
            memory: whether to record allocations.
        """
        try:
            started = self._ask(procs, lambda id: pack(StartProfile(id, memory)), _START_S)
            ready = [proc for proc in procs if not isinstance(started[proc], Failure)]
            read = self._ask(ready, lambda id: pack(ReadProfile(id, steps, seconds)), seconds + _ANSWER_S)
        except KeyboardInterrupt:
            self._runtime.tell(procs, pack(StopProfile()))
            raise
        return [read.get(proc, started[proc]) for proc in procs]

    def _ask(self, procs: Sequence[int], make: Callable[[int], Packed], timeout_s: float) -> dict[int, Any]:
        """Ask processes, and return what each has answered, or its failure."""

        def finish(answers: Sequence[Answer]) -> dict[int, Any]:
            read = (answer if isinstance(answer, Failure) else read_value(answer) for answer in answers)
            return dict(zip(procs, read, strict=True))

        if not procs:
            return {}
        future: Future[dict[int, Any]] = self._runtime.ask(procs, make, finish)
        try:
            if not future.wait(timeout_s):
                future.cancel()  # native code holds the GIL of a rank
        except KeyboardInterrupt:
            future.cancel()
            raise
        return future.get()

    def clocks(self, recordings: Mapping[int, Recording]) -> dict[str, Clock]:
        """Return by how much the clock of each machine is ahead of the one here.

        Args:
            recordings: process -> what it has recorded.
        """
        found = {identity(): Clock(0.0, 0.0)}
        for proc, recording in recordings.items():
            if recording.machine in found:
                continue
            trips = [trip for _ in range(_TRIPS) if (trip := self._trip(proc)) is not None]
            found[recording.machine] = min(trips, key=lambda trip: trip.error_s, default=Clock(0.0, float("inf")))
        return found

    def _trip(self, proc: int) -> Clock | None:
        """Ask a process for its time."""
        received: list[float] = []
        sent = time.time()
        future: Future[Answer] = self._runtime.ask((proc,), lambda id: pack(GetTime(id)), lambda answers: answers[0])
        future.add_done_callback(lambda: received.append(time.time()))
        if not future.wait(_TRIP_S):
            future.cancel()
            return None
        answer = future.get()
        return None if isinstance(answer, Failure) else Clock.read(sent, float(read_value(answer)), received[0])
