"""Output of ranks to file descriptors 1 and 2: the host agent reads, coalesces and bounds it.

The agent reads the pipes rather than the rank, because a rank whose native code writes while it holds the GIL could not read
its own pipe, and because the last output of a killed rank is still in the pipe.
"""

from __future__ import annotations

import codecs
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from monarch_kernel.net.wire.messages import OutputChunk
from monarch_kernel.net.wire.stream_marks import FIRST_MARK, MarkReader, is_end_of_cell, is_order_mark, switched
from monarch_kernel.runtime.host.crash_output import CrashFilter
from monarch_kernel.runtime.host.last_lines import LastLines
from monarch_kernel.runtime.host.logs import RankLog
from monarch_kernel.runtime.host.read_counts import ReadCounts

__all__ = ["OutputStream", "fold"]

BURST_CHARS = 1 << 20
CHARS_PER_S = 512 * 1024
TAIL_LINES = 64
TAIL_LINE_CHARS = 1000
TAIL_EVERY_S = 0.1
ORDER_GRACE_S = 0.2
"""How long output waits for earlier output of the other stream: a mark can be lost in a pipe that is full."""

_READ_NBYTES = 1 << 16
_READS_PER_TURN = 16


def fold(of_ranks: Iterable[Sequence[OutputChunk]]) -> Iterator[OutputChunk]:
    """Merge the chunks of ranks that have written the same; ``of_ranks`` has the chunks of each rank, in order.

    Only ranks whose chunks are all equal are merged, so that the order of each rank's chunks is preserved.
    """
    alike: dict[tuple[tuple[object, ...], ...], list[Sequence[OutputChunk]]] = {}
    for chunks in of_ranks:
        key = tuple((chunk.stream, chunk.text, chunk.dropped_lines, chunk.request) for chunk in chunks)
        alike.setdefault(key, []).append(chunks)
    for first, *others in alike.values():
        for i, chunk in enumerate(first):
            also = tuple((chunks[i].proc, chunks[i].end) for chunks in others)
            if also:
                chunk = OutputChunk(
                    chunk.proc, chunk.stream, chunk.text, chunk.end, chunk.dropped_lines, chunk.request, also
                )
            yield chunk


class OutputStream:
    """One stream of one rank.

    Up to `BURST_CHARS` at once and `CHARS_PER_S` on average pass unchanged. Output above that is dropped and counted in lines,
    except for the last `TAIL_LINES`, which follow every `TAIL_EVERY_S`, so that the end is always shown. The log, which the
    rank's two streams share, gets everything. If the controller shows all output, nothing is dropped: the agent stops reading
    while the controller is slower (`RankOutput`), and the rank waits.

    Args:
        proc: number of the rank's process.
        name: which of its streams this is.
        fd: the read end of the pipe.
        marks: removes the rank's marks from the output.
        log: the log of the rank; None for no log.
        counts: where the rank sees what was read; None for nowhere.
        is_whole: whether nothing is dropped.
    """

    def __init__(
        self,
        proc: int,
        name: Literal["stdout", "stderr"],
        fd: int,
        marks: MarkReader,
        log: RankLog | None = None,
        counts: ReadCounts | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        self.is_whole = is_whole
        self._log = log
        self._counts = counts
        self._unmarked = 0  # of text since the last mark
        self.request = 0  # the request whose child processes still have this pipe
        self.successor = -1  # the rank's file descriptor of the pipe that replaces this one, until the agent reads it
        self.proc = proc
        self.name = name
        self.fd = fd
        self._last_lines = LastLines()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._crashes = CrashFilter() if name == "stderr" else None
        self._marks = marks
        self._read_to = 0  # a number of bytes until the first mark, then the last mark
        self._reported_to = 0
        self._early_since = float("inf")
        self._awaited = 0  # the last mark for which a message may wait
        self._pending: list[str] = []
        self._marked: deque[tuple[str, int, int]] = (
            deque()
        )  # text, the mark after it, and the last mark before more text
        self._allowance = float(BURST_CHARS)
        self._allowance_at = 0.0
        self._tail: deque[str] = deque()
        self._dropped = 0
        self._tail_at = 0.0
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Read the available output; return False once the rank and all its children have closed the stream."""
        counts = self._counts
        if counts is None:
            return self._read()
        counts.begin()
        try:
            return self._read()
        finally:
            counts.end(self._marks.last, self._unmarked)

    def _read(self) -> bool:
        for _ in range(_READS_PER_TURN):
            try:
                data = os.read(self.fd, _READ_NBYTES)
            except BlockingIOError:
                self._take_in(self._marks.rest(), 0)
                return True
            for piece, mark in self._marks.feed(data):
                self._take_in(piece, mark)
            if len(data) < _READ_NBYTES:  # the pipe is empty; it never has a part of a mark
                self._take_in(self._marks.rest(), 0)
            if not data:
                if self._crashes is not None:
                    self._show(self._crashes.end())
                return False
            if len(data) < _READ_NBYTES // 2:
                return True
        return True

    def _take_in(self, data: bytes, mark: int) -> None:
        self._unmarked = 0 if mark else self._unmarked + len(data)
        if mark and (switch := switched(mark)) is not None:
            self.request, self.successor = switch
        elif mark:
            self._read_to = max(self._read_to, mark)
            if not is_order_mark(mark):
                self._awaited = self._read_to
        elif not self._marks.last:
            self._read_to += len(data)
        if self._log is not None:
            self._log.write(self.name, data)
        text = self._decoder.decode(data)
        if self._crashes is not None:
            text = self._crashes.feed(text) + (self._crashes.end() if mark else "")
        self._show(text)
        if is_end_of_cell(mark):
            self._last_lines.clear()
        if mark and (self._pending or not self._marked):
            self._marked.append(("".join(self._pending), self._read_to, self._read_to))
            self._pending.clear()
        elif mark:
            self._marked[-1] = (*self._marked[-1][:2], self._read_to)

    def _show(self, text: str) -> None:
        if text:
            self._pending.append(text)
            self._last_lines.add(text)

    @property
    def reported_to(self) -> int:
        """The ``end`` of the last chunk from `take`."""
        return self._reported_to

    @property
    def is_marked(self) -> bool:
        """Whether a mark was read for which a message may wait, and `take` has not returned it yet."""
        return self._awaited > self._reported_to

    @property
    def waiting(self) -> bool:
        """Whether `take` may have a chunk to return."""
        return self._reported_to != self._read_to or bool(self._pending or self._marked or self._tail)

    @property
    def next_mark(self) -> float:
        """The mark after the text of the next chunk from `take`; infinity if no mark was read."""
        return self._marked[0][1] if self._marked else float("inf")

    def must_wait(self, others: Iterable[OutputStream], now: float) -> bool:
        """Whether the next chunk follows output that was not read yet from another stream of the rank.

        A rank sets each mark in all its streams, so a mark that was read here is in the other pipe, too, unless that was full.
        """
        is_early = self._reported_to >= FIRST_MARK and any(
            other.fd >= 0 and not other.request and other._marks.last < self._reported_to
            for other in others
            if other is not self and not self.request
        )
        if not is_early:
            self._early_since = float("inf")
            return False
        self._early_since = min(self._early_since, now)
        return now < self._early_since + ORDER_GRACE_S

    def take(self, now: float, *, last: bool = False) -> OutputChunk | None:
        """Return the output that may be shown now, up to the next mark; with ``last`` everything that is left."""
        if self.is_whole:
            self._allowance = float("inf")
        else:
            self._allowance = min(BURST_CHARS, self._allowance + (now - self._allowance_at) * CHARS_PER_S)
        self._allowance_at = now
        if self._marked and not self._tail and len(self._marked[0][0]) <= self._allowance:
            text, _, end = self._marked.popleft()
            request = 0
        else:
            request = self.request
            text, end = "".join([*(text for text, *_ in self._marked), *self._pending]), self._read_to
            self._marked.clear()
            self._pending.clear()
        if not self._tail and len(text) <= self._allowance:
            self._allowance -= len(text)
            return self._chunk(text, 0, end, request)
        shown = ""
        if not self._tail and self._allowance > 0:
            cut = text.rfind("\n", 0, int(self._allowance)) + 1
            shown, text = text[:cut], text[cut:]
            self._allowance -= cut
        self._hold(text)
        if not shown and (last or now >= self._tail_at + TAIL_EVERY_S):
            self._tail_at = now
            shown, dropped = "".join(self._tail), self._dropped
            self._tail.clear()
            self._dropped = 0
            return self._chunk(shown, dropped, self._read_to, request)
        if shown:
            self._tail_at = now
            return OutputChunk(self.proc, self.name, shown, self._reported_to, 0, request)
        return None

    def succeed(self, fd: int) -> OutputStream:
        """Return the stream that continues the rank's output in another pipe from the position of this one."""
        marks = self._marks.successor()
        stream = OutputStream(self.proc, self.name, fd, marks, self._log, self._counts, is_whole=self.is_whole)
        self._counts = None  # what child processes write from now on is not the rank's
        stream._unmarked = self._unmarked
        stream._read_to = stream._reported_to = self._read_to
        return stream

    def _chunk(self, text: str, dropped: int, end: int, request: int) -> OutputChunk | None:
        if not text and self._reported_to == end:
            return None
        self._reported_to = end
        return OutputChunk(self.proc, self.name, text, self._reported_to, dropped, request)

    def _hold(self, text: str) -> None:
        lines = text.splitlines(keepends=True)
        if self._tail and lines and not self._tail[-1].endswith("\n"):
            lines[0] = self._tail.pop() + lines[0]
        surplus = len(self._tail) + len(lines) - TAIL_LINES
        if surplus > 0:
            self._dropped += surplus
            for _ in range(min(surplus, len(self._tail))):
                self._tail.popleft()
            lines = lines[-TAIL_LINES:]
        self._tail.extend(
            line if len(line) <= TAIL_LINE_CHARS else line[:TAIL_LINE_CHARS] + "…\n" * line.endswith("\n")
            for line in lines
        )

    def tail(self) -> tuple[str, ...]:
        """Return the last lines since the last cell ended, for the report of a death, without empty lines."""
        return tuple(line for line in self._last_lines.lines() if line.strip())
