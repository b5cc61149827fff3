"""Output of ranks without a controller, kept for the next controller up to a size limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from monarch_kernel.net.wire.messages import OutputChunk

__all__ = ["BACKLOG_CHARS", "OutputBacklog"]

BACKLOG_CHARS = 1 << 20
"""Limit for each rank; the last part of its output is kept."""

_BLOCK_CHARS = BACKLOG_CHARS // 64

Stream = Literal["stdout", "stderr"]


class _Kept:
    """Output of one rank: blocks of text in the order in which they were written, each from one stream."""

    def __init__(self) -> None:
        self.blocks: deque[tuple[Stream, str, int]] = deque()  # stream, text, number of lines dropped before the text
        self.nchars = 0

    def add(self, stream: Stream, text: str, dropped: int) -> None:
        last = self.blocks[-1] if self.blocks else None
        if last is not None and last[0] == stream and not dropped and len(last[1]) < _BLOCK_CHARS:
            self.blocks[-1] = (stream, last[1] + text, last[2])
        else:
            self.blocks.append((stream, text, dropped))
        self.nchars += len(text)
        surplus = 0
        while self.nchars > BACKLOG_CHARS and len(self.blocks) > 1:
            _, lost, before = self.blocks.popleft()
            self.nchars -= len(lost)
            surplus += before + lost.count("\n")
        if surplus:
            first = self.blocks[0]
            self.blocks[0] = (first[0], first[1], first[2] + surplus)


class OutputBacklog:
    """Output of the ranks of a host since the controller ended."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def add(self, chunks: Iterable[OutputChunk]) -> None:
        """Keep chunks that can't be sent."""
        for chunk in chunks:
            if chunk.text or chunk.dropped_lines:
                self._kept.setdefault(chunk.proc, _Kept()).add(chunk.stream, chunk.text, chunk.dropped_lines)

    def take(self) -> list[OutputChunk]:
        """Return and clear the kept chunks, by rank; their ``end`` is 0, because the agent sends the ends separately."""
        kept, self._kept = self._kept, {}
        return [
            OutputChunk(proc, stream, text, 0, dropped)
            for proc, rank in sorted(kept.items())
            for stream, text, dropped in rank.blocks
        ]
