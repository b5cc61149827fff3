"""In which order what comes from a rank is taken: what it writes, and what it says and displays in between. No I/O, no clock.

Theory of operation
===================

Output comes from the host agent, results and displays come from the rank, on different connections. An answer or a display
therefore says which marks its rank has set in its streams (`net.wire.marks`). If the agent has not come to them yet it waits,
and what was written after a display waits for that; each at most `OUTPUT_GRACE_S`, for a mark may be lost with what was
written.

The methods are generators: who takes an item may say more by it, before the next is looked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.marks import is_display_mark
from monarch_kernel.net.wire.messages import OutputChunk, Rich

__all__ = ["OUTPUT_GRACE_S", "OutputOrder", "Said", "Spoken"]

OUTPUT_GRACE_S = 0.5


class Spoken(Protocol):
    """A message of a rank that may have written something before.

    Attributes:
        written: The marks in its stdout and stderr up to which that went.
    """

    @property
    def written(self) -> tuple[int, int]: ...


class Said(NamedTuple):
    """What a rank has said, and until when it may wait for what was written before."""

    message: Spoken
    frames: Sequence[Frame]
    until: float


class OutputOrder:
    """What has come from one process, and what waits for it."""

    __slots__ = ("_read_to", "_said", "_shown_to", "_withheld")

    def __init__(self) -> None:
        self._read_to = [0, 0]  # the last marks in its streams that have come
        self._shown_to = 0  # the mark of its last display
        self._said: list[Said] = []
        self._withheld: deque[tuple[OutputChunk, float]] = deque()  # written after a display that has not come

    def is_early(self, written: tuple[int, int]) -> bool:
        """Whether something was written before these marks that has not come."""
        return written[0] > self._read_to[0] or written[1] > self._read_to[1]

    @property
    def is_settled(self) -> bool:
        """Whether nothing that was written waits."""
        return not self._withheld

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, so that no time need be told (`due`)."""
        return not self._said and not self._withheld

    def hold(self, message: Spoken, frames: Sequence[Frame], now: float) -> None:
        """Keep what is early."""
        self._said.append(Said(message, frames, now + OUTPUT_GRACE_S))

    def shown(self, display: Rich) -> None:
        """A display is taken: what was written after it may follow."""
        self._shown_to = max(self._shown_to, display.written[0])

    def caught_up(self, chunk: OutputChunk) -> None:
        """What a process has written for another controller was read up to here."""
        stream = chunk.stream == "stderr"
        self._read_to[stream] = max(chunk.end, self._read_to[stream])

    def wrote(self, chunk: OutputChunk, now: float) -> Iterator[Said | OutputChunk]:
        """It has written something: give what can be taken now."""
        if not chunk.request and self._waits(chunk):
            self._withheld.append((chunk, now + OUTPUT_GRACE_S))
            return
        yield self._pass(chunk)
        if self._said:
            yield from self.settle()

    def settle(self) -> Iterator[Said | OutputChunk]:
        """Give what waited for what has come: answers and displays for output, and output for displays."""
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

    def due(self, now: float) -> Iterator[Said | OutputChunk]:
        """Give what has waited for long enough."""
        if self._said:
            late = [said for said in self._said if said.until <= now]
            if late:
                self._said = [said for said in self._said if said.until > now]
                for said in late:
                    yield said
                    yield from self.settle()
        if self._withheld and self._withheld[0][1] <= now:
            yield from self._give_up_displays()

    def end(self) -> Iterator[Said | OutputChunk]:
        """Give all that waits: the process has ended, and no more will come."""
        yield from self._give_up_displays()
        said, self._said = self._said, []
        yield from said

    def _waits(self, chunk: OutputChunk) -> bool:
        """Whether this was written after something was displayed that has not been taken yet."""
        end = self._read_to[chunk.stream == "stderr"]
        return end > self._shown_to and is_display_mark(end)

    def _pass(self, chunk: OutputChunk) -> OutputChunk:
        if not chunk.request:
            self._read_to[chunk.stream == "stderr"] = chunk.end
        return chunk

    def _give_up_displays(self) -> Iterator[Said | OutputChunk]:
        while self._withheld:
            self._shown_to = max(self._read_to)
            yield from self.settle()
