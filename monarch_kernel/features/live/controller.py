"""The controller's part of live loops: keeps the loops of a session, and applies the program's changes to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from monarch_kernel.base.events import LoopView, MeshView
from monarch_kernel.features.live.loops import AddressedGrant, Journal, LoopBook, LoopListener, LoopRecord
from monarch_kernel.features.live.pace import Grant
from monarch_kernel.features.live.trajectories import TrajectoryBook
from monarch_kernel.features.watch.findings import Trouble
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.net.wire.messages import (
    LoopLeft,
    LoopPreempted,
    LoopReport,
    LoopStarted,
    LoopStep,
    Preload,
    Trajectories,
)
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.extensions import Core, Extension, register
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.controller.runtime import Runtime

__all__ = ["FOR_TRAINING", "LoopControl", "LoopExtension"]

FOR_TRAINING = ("monarch_kernel.train.snapshots.capture", "monarch_kernel.train.parallel")
"""What a rank imports to train and to return to a snapshot: with torch's FSDP and DTensor, some 500 modules."""

T = TypeVar("T")


@register
class LoopExtension(Extension):
    """Grants steps to the loops of ranks.

    Attributes:
        book: all loops of the session.
        trajectories: the samples that ranks have shown.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.book = LoopBook()
        self.trajectories = TrajectoryBook()
        self.handlers = {
            LoopStarted: self._started,
            LoopReport: self._reported,
            LoopStep: self._in_step,
            LoopLeft: self._left,
            LoopPreempted: self._preempted,
            Trajectories: self._sampled,
        }
        self._ready_to_train: set[int] = set()  # hosts whose zygote has preloaded `FOR_TRAINING`

    def send(self, grants: Iterable[AddressedGrant]) -> list[Effect]:
        """Send grants to ranks."""
        return [effect for proc, message in grants for effect in self.core.to_rank(proc, pack(message))]

    def request_ended(self, procs: Sequence[int], id: int) -> list[Effect]:
        return self.send(self.book.request_over(procs, id))

    def process_lost(self, proc: int) -> list[Effect]:
        return self.send(self.book.gone(proc))

    def shown(self, view: MeshView, procs: Sequence[int], now: float) -> MeshView:
        samples, count = self.trajectories.of(view.name, procs)
        loops = tuple(loop.view(now, points=False) for loop in self.book.shown(procs))
        return replace(view, loops=loops, trajectories=samples, trajectory_count=count)

    def closed(self) -> None:
        for journal in self.book.journals.values():
            journal.close()

    def _started(self, record: RankRecord, message: LoopStarted, now: float) -> list[Effect]:
        where = record.open_requests.get(message.request, "")
        effects = self.send(self.book.started(record.spec, where, message, now, self.core.owing(message.request)))
        if message.recovers and record.host not in self._ready_to_train:  # so that a replacement starts quickly
            self._ready_to_train.add(record.host)
            effects += self.core.to_host(record.host, pack(Preload(FOR_TRAINING)))
        return effects

    def _reported(self, record: RankRecord, message: LoopReport, now: float) -> list[Effect]:
        return self.send(self.book.reported(record.spec.proc, message, now))

    def _in_step(self, record: RankRecord, message: LoopStep, now: float) -> list[Effect]:
        return self.send(self.book.in_step(record.spec.proc, message))

    def _preempted(self, record: RankRecord, message: LoopPreempted, now: float) -> list[Effect]:
        return self.send(self.book.preempted(record.spec.proc, message))

    def _sampled(self, record: RankRecord, message: Trajectories, now: float) -> list[Effect]:
        self.trajectories.add(record.spec.mesh, record.spec.proc, record.spec.rank, message)
        return []

    def _left(self, record: RankRecord, message: LoopLeft, now: float) -> list[Effect]:
        return self.send(self.book.left(record.spec.proc, message, now))


class LoopControl:
    """Changes the loops of a session while they run. Thread-safe.

    Args:
        runtime: the controller.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._loops = runtime.extension(LoopExtension)

    def keys(self, procs: Sequence[int]) -> list[tuple[int, int]]:
        """Keys of the loops that any of these processes is or was in, in the order in which they started."""
        return [(loop.request, loop.number) for loop in self._loops.book.of(procs)]

    def view(self, key: tuple[int, int]) -> LoopView:
        """The current state of a loop.

        Raises:
            LookupError: the loop ended long ago, and its record was dropped.
        """
        return self._loop(key).view(time.monotonic())

    def is_stopping(self, key: tuple[int, int]) -> bool:
        """Whether a loop has been stopped, and ranks still have steps to do; False for a loop whose record was dropped."""
        try:
            return self._loop(key).pace.is_stopping
        except LookupError:
            return False

    def change(self, key: tuple[int, int], do: Callable[[LoopRecord], tuple[T, Grant | None]]) -> T:
        """Apply a change to a loop, and send the resulting grant to its ranks.

        Args:
            key: request and number of the loop.
            do: called with the I/O lock held; returns the result of the change, and the grant for the ranks in the loop.

        Raises:
            LookupError: the loop ended long ago, and its record was dropped.
            MeshDownError: the session was shut down.
        """

        def apply() -> T:
            loop = self._loop(key)
            value, grant = do(loop)
            self._runtime.perform(self._loops.send(loop.address(grant)))
            return value

        return self._runtime.run_on_io_thread(apply)

    def write(self, mesh: str, journal: Journal | None) -> None:
        """Write what the loops of a mesh log to this journal from now on, in place of the previous one; None: to no journal."""
        journals = self._loops.book.journals

        def change() -> Journal | None:
            before = journals.pop(mesh, None)
            if journal is not None:
                journals[mesh] = journal
            return before

        before = self._runtime.run_on_io_thread(change)
        if before is not None:
            before.close()

    def listen(self, listener: LoopListener, *, is_on: bool = True) -> None:
        """Tell a listener of the loops of all meshes from now on; or no longer."""

        def change() -> None:
            listeners = self._loops.book.listeners
            if listener in listeners:
                listeners.remove(listener)
            if is_on:
                listeners.append(listener)

        self._runtime.run_on_io_thread(change)

    def trouble(self, request: int) -> dict[int, Trouble]:
        """What the watch has found in the loops of a request, by number of the loop."""
        return {number: loop.trouble for number, loop in self._loops.book.of_request(request)}

    def recovers(self, request: int) -> bool:
        """Whether a request has a loop that resumes automatically if a rank dies."""
        return self._loops.book.recovers(request)

    def _loop(self, key: tuple[int, int]) -> LoopRecord:
        loop = self._loops.book.get(key)
        if loop is None:
            raise LookupError("the loop is over, and the controller no longer keeps its log")
        return loop
