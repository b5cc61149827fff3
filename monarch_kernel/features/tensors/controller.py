"""The controller's part of distributed tensors: reports of ranks, and their ends, go to the stream of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from monarch_kernel.base.events import MeshView, TensorsView
from monarch_kernel.errors import Failure
from monarch_kernel.features.tensors.messages import FunctionInterrupted, InterruptFunction, OpsDone
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.runtime.controller.effects import Effect
from monarch_kernel.runtime.controller.extensions import Core, Extension, register
from monarch_kernel.runtime.controller.process_records import RankRecord

__all__ = ["StreamListener", "TensorExtension"]


class StreamListener(Protocol):
    """The stream of operations of a session. Its methods run on the I/O thread, so they are quick."""

    def ops_done(self, proc: int, target: int, count: int) -> None:
        """Handle a report of a rank."""

    def rank_lost(self, proc: int, death: Failure) -> None:
        """Handle the end of a rank, and with it of all tensors that it has held."""

    def neighbours_of(self, proc: int) -> set[int]:
        """Return the other ranks that have got the same operations as a rank."""

    def tick(self, now: float) -> list[Effect]:
        """Called a few times a second."""

    def shown(self, procs: Sequence[int], now: float) -> TensorsView | None:
        """Return the tensors on processes, for display; None if there are none. On any thread."""


@register
class TensorExtension(Extension):
    """Passes what happens on ranks to the stream of operations.

    Attributes:
        listener: The stream; None until the session has distributed tensors.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.listener: StreamListener | None = None
        self.handlers = {OpsDone: self._done, FunctionInterrupted: self._interrupted}

    def process_lost(self, proc: int) -> list[Effect]:
        death = self.core.ranks[proc].death
        if self.listener is not None:
            self.listener.rank_lost(proc, death or Failure("lost", "RankDied", "it has ended"))
        return []

    def tick(self, now: float) -> list[Effect]:
        return self.listener.tick(now) if self.listener is not None else []

    def shown(self, view: MeshView, procs: Sequence[int], now: float) -> MeshView:
        tensors = self.listener.shown(procs, now) if self.listener is not None else None
        return view if tensors is None else replace(view, tensors=tensors)

    def _done(self, record: RankRecord, message: OpsDone, now: float) -> list[Effect]:
        if self.listener is not None:
            self.listener.ops_done(record.spec.proc, message.target, message.count)
        return []

    def _interrupted(self, record: RankRecord, message: FunctionInterrupted, now: float) -> list[Effect]:
        packed = pack(InterruptFunction(message.op, message.abort))
        others = self.listener.neighbours_of(record.spec.proc) if self.listener is not None else set()
        living = (proc for proc in sorted(others) if self.core.ranks[proc].death is None)
        return [effect for proc in living for effect in self.core.to_rank(proc, packed)]
