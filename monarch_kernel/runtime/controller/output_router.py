"""Brings messages and output of ranks into order, and makes events for listeners of them: no I/O, no clock.

`output_order` keeps the order of one rank. Here each message waits for its turn, and text gets the request that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.base.text import last_line
from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.messages import Backlog, Failed, Output, OutputChunk, Result
from monarch_kernel.runtime.controller.effects import BacklogEvent, Effect, Tell
from monarch_kernel.runtime.controller.output_order import HeldMessage, Spoken
from monarch_kernel.runtime.controller.process_records import RankRecord
from monarch_kernel.runtime.rpc.requests import Requests

__all__ = ["OutputRouter"]


class OutputRouter:
    """Takes output from host agents, and messages of ranks that may follow output.

    Args:
        ranks: By number of the process; owned by the caller.
        requests: The requests of the controller.
        accept: Handles a message of a rank whose turn has come.
        accept_answers: Handles an answer of ranks whose turn has come.
    """

    def __init__(
        self,
        ranks: Mapping[int, RankRecord],
        requests: Requests,
        accept: Callable[[RankRecord, Spoken, Sequence[Frame], float], list[Effect]],
        accept_answers: Callable[[Sequence[RankRecord], Result | Failed, Sequence[Frame], float], list[Effect]],
    ) -> None:
        self._ranks = ranks
        self._requests = requests
        self._accept = accept
        self._accept_answers = accept_answers
        self._unsettled: set[int] = set()  # processes whose messages or text wait

    @property
    def is_settled(self) -> bool:
        """Whether no message or text waits."""
        return not self._unsettled

    def say(self, record: RankRecord, message: Spoken, frames: Sequence[Frame], now: float) -> list[Effect]:
        """Accept a message of a rank now, or when the output that the rank wrote before has arrived."""
        order = record.order
        if record.death is None and order.is_early(message.written):
            order.hold(message, frames, now)
            self._unsettled.add(record.spec.proc)
            return []
        effects = self._accept(record, message, frames, now)
        return effects if order.is_settled else effects + self._take(record, order.settle(), now)

    def answered(
        self, records: Sequence[RankRecord], message: Result | Failed, frames: Sequence[Frame], now: float
    ) -> list[Effect]:
        """Accept an answer that these ranks have given, of each as `say` does."""
        ready: list[RankRecord] = []
        others: list[RankRecord] = []
        for record in records:
            (ready if record.order.is_ready(message.written) else others).append(record)
        effects = self._accept_answers(ready, message, frames, now) if ready else []
        for record in others:
            effects += self.say(record, message, frames, now)
        return effects

    def write(self, message: Output, now: float) -> list[Effect]:
        """Take what ranks have written."""
        effects: list[Effect] = []
        for chunk in (chunk for folded in message.chunks for chunk in folded.of_each()):
            record = self._ranks[chunk.proc]
            if record.former is not None:  # the new process has not been started
                effects += self._tell(record.former, chunk)
                continue
            effects += self._take(record, record.order.wrote(chunk, now), now)
            if not record.order.is_empty:
                self._unsettled.add(chunk.proc)
        return effects

    def catch_up(self, message: Backlog) -> list[Effect]:
        """Take what ranks wrote before this controller attached."""
        for chunk in message.chunks:
            self._ranks[chunk.proc].order.caught_up(chunk)
        ranks = {chunk.proc: self._ranks[chunk.proc].spec.rank for chunk in message.chunks}
        return [Tell(BacklogEvent(tuple(chunk for chunk in message.chunks if chunk.text), ranks))]

    def tick(self, now: float) -> list[Effect]:
        """Take what has waited for too long; call this a few times a second."""
        effects: list[Effect] = []
        for proc in list(self._unsettled):
            record = self._ranks[proc]
            effects += self._take(record, record.order.due(now), now)
            if record.order.is_empty:
                self._unsettled.discard(proc)
        return effects

    def end(self, record: RankRecord, now: float) -> list[Effect]:
        """Take all that waits: the process has ended."""
        return self._take(record, record.order.end(), now)

    def _take(self, record: RankRecord, items: Iterable[HeldMessage | OutputChunk], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for item in items:
            if isinstance(item, HeldMessage):
                effects += self._accept(record, item.message, item.frames, now)
            else:
                effects += self._tell(record, item)
        return effects

    def _tell(self, record: RankRecord, chunk: OutputChunk) -> list[Effect]:
        if not chunk.text and not chunk.dropped_lines:  # only a mark
            return []
        request = chunk.request or self._writer(record)
        record.last_line = last_line(chunk.text) or record.last_line
        spec = record.spec
        return [Tell(OutputEvent(request, spec.rank, chunk.stream, chunk.text, chunk.dropped_lines, spec.mesh))]

    def _writer(self, record: RankRecord) -> int:
        """Find the request that text of a rank belongs to: its cell, even if actors work beside it; else the oldest."""
        open_requests = [id for id in record.open_requests if not self._requests.is_quiet(id)]
        return next(
            (id for id in open_requests if self._requests.is_cell(id)),
            open_requests[0] if open_requests else record.last_request,
        )
