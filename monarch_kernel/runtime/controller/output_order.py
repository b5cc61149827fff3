"""The order in which output, answers and displays of one rank are handled. No I/O, no clock.

Theory of operation
===================

Output comes from the host agent; answers and displays come from the rank, on another connection. An answer or a display
therefore contains the marks that its rank has set in its streams (`net.wire.stream_marks`). If output up to these marks has not
arrived, the message waits, and output written after a display waits for the display. Each waits at most `OUTPUT_GRACE_S`,
because a mark can be lost together with output. An answer waits longer while output of its rank still arrives, as in a flood
that is shown completely: up to `MAX_OUTPUT_GRACE_S`.

The methods are generators: handling one item can change the state before the next item is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.messages import OutputChunk, Rich
from monarch_kernel.net.wire.stream_marks import is_display_mark

__all__ = ["MAX_OUTPUT_GRACE_S", "OUTPUT_GRACE_S", "HeldMessage", "OutputOrder", "Spoken"]

OUTPUT_GRACE_S = 0.5
MAX_OUTPUT_GRACE_S = 600.0


class Spoken(Protocol):
    """A message of a rank that may have written output before it.

    Attributes:
        written: The marks in the rank's stdout and stderr up to which it had written.
    """

    @property
    def written(self) -> tuple[int, int]: ...


class HeldMessage(NamedTuple):
    """A message of a rank, and until when it may wait for output that was written before it."""

    message: Spoken
    frames: Sequence[Frame]
    until: float


class OutputOrder:
    """Output and messages of one process that have arrived, and those that wait."""

    __slots__ = ("_read_to", "_said", "_shown_to", "_withheld", "_wrote_at")

    def __init__(self) -> None:
        self._read_to = [0, 0]  # the last marks in its streams that have arrived
        self._shown_to = 0  # the mark of its last display
        self._wrote_at = float("-inf")
        self._said: list[HeldMessage] = []
        self._withheld: list[tuple[OutputChunk, float]] = []  # written after a display that has not arrived

    def is_early(self, written: tuple[int, int]) -> bool:
        """Whether output that was written before these marks has not arrived."""
        return written[0] > self._read_to[0] or written[1] > self._read_to[1]

    def is_ready(self, written: tuple[int, int]) -> bool:
        """Whether a message with these marks can be handled at once, and nothing else follows from it."""
        read_to = self._read_to
        return written[0] <= read_to[0] and written[1] <= read_to[1] and not self._withheld

    @property
    def is_settled(self) -> bool:
        """Whether no output waits."""
        return not self._withheld

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, so that `due` need not be called."""
        return not self._said and not self._withheld

    def hold(self, message: Spoken, frames: Sequence[Frame], now: float) -> None:
        """Keep a message that is early."""
        self._said.append(HeldMessage(message, frames, now + OUTPUT_GRACE_S))

    def shown(self, display: Rich) -> None:
        """Note that a display was handled: output written after it may follow."""
        self._shown_to = max(self._shown_to, display.written[0])

    def caught_up(self, chunk: OutputChunk) -> None:
        """Note that output for an earlier controller was read up to here."""
        stream = chunk.stream == "stderr"
        self._read_to[stream] = max(chunk.end, self._read_to[stream])

    def wrote(self, chunk: OutputChunk, now: float) -> Iterator[HeldMessage | OutputChunk]:
        """Take new output of the process; yields the items that can be handled now."""
        if not chunk.request:
            self._wrote_at = now
        if not chunk.request and self._waits(chunk):
            self._withheld.append((chunk, now + OUTPUT_GRACE_S))
            return
        yield self._pass(chunk)
        if self._said:
            yield from self.settle()

    def settle(self) -> Iterator[HeldMessage | OutputChunk]:
        """Yield items that no longer wait: messages whose output has arrived, and output whose display has."""
        while True:
            still, self._said = self._said, []
            for said in still:
                if self.is_early(said.message.written):
                    self._said.append(said)
                else:
                    yield said
            ready = next((item for item in self._withheld if not self._waits(item[0])), None)
            if ready is None:
                return
            self._withheld.remove(ready)
            yield self._pass(ready[0])

    def due(self, now: float) -> Iterator[HeldMessage | OutputChunk]:
        """Yield items that have waited long enough."""
        if self._said:
            goes_on = now < self._wrote_at + OUTPUT_GRACE_S
            due = now - MAX_OUTPUT_GRACE_S if goes_on else now
            late = [said for said in self._said if said.until <= due]
            if late:
                self._said = [said for said in self._said if said.until > due]
                for said in late:
                    yield said
                    yield from self.settle()
        if self._withheld and self._withheld[0][1] <= now:
            yield from self._give_up_displays()

    def end(self) -> Iterator[HeldMessage | OutputChunk]:
        """Yield all items that wait: the process has ended, and nothing more will arrive."""
        yield from self._give_up_displays()
        said, self._said = self._said, []
        yield from said

    def _waits(self, chunk: OutputChunk) -> bool:
        """Whether this was written after a display that was not handled yet."""
        end = self._read_to[chunk.stream == "stderr"]
        return end > self._shown_to and is_display_mark(end)

    def _pass(self, chunk: OutputChunk) -> OutputChunk:
        if not chunk.request:
            self._read_to[chunk.stream == "stderr"] = chunk.end
        return chunk

    def _give_up_displays(self) -> Iterator[HeldMessage | OutputChunk]:
        while self._withheld:
            self._shown_to = max(self._read_to)
            yield from self.settle()
