"""Output of many ranks as one stream: lines that several ranks wrote are shown once, with their ranks.

Theory of operation
-------------------
``feed`` assembles lines and puts them in one queue per rank; ``drain`` merges the heads of the queues.

1. While all queues have the same head, it is taken at once, with all ranks (in bulk: ranks mostly write the same).
2. Otherwise the head that was fed longest ago is due ``window_s`` after it was fed, and so is a head that all ranks
   have somewhere in their queues: nobody else can still write it.
3. A due head that stands deeper in another rank's queue waits for what is in front of it there, which is taken
   first: of ``A B C`` and ``X A B C``, ``X`` goes first and the rest is common. Where lines cross (``A B`` and
   ``B A``), the one whose partner is farthest away is given up: a greedy longest common subsequence.

Deeper means within a look-ahead, for which each queue keeps the positions of its lines in a dict, and one dict for
all counts the ranks that hold a line: no step scans a queue. What is taken goes through a ``FloodGate``. For each rank
the lines that come out are a subsequence of those that went in, and without a flood they are all of them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from monarch_kernel.errors import format_ranks
from monarch_kernel.output.flood import STDERR, STDOUT, FloodGate, FoldedLine, Stream

__all__ = ["FoldedLine", "OutputFolder", "render"]

_GAP = "g"  # the mark of a line that stands for lines left out by the rank's agent; its text is how many
_LOOK_AHEAD = 1_000
_TRIM_ABOVE = 4_096
_MARKS: dict[Stream, str] = {"stdout": STDOUT, "stderr": STDERR}
_ANSI_COLOR = re.compile(r"\x1b\[([0-9;:]*)m")


class OutputFolder:
    """Folds the lines of many ranks into lines with their ranks.

    Args:
        ranks: the ranks whose output comes; a line is complete when all of them gave it.
        window_s: how long a line waits for other ranks to write it, too.
        raw: show every line for itself, in the order in which lines come, without waiting.
        max_lines: lines held at most; above that they go without waiting for other ranks.
        max_nbytes: characters held at most, likewise.
        max_line_length: characters above which a single line is cut in the middle.
        lines_per_s: lines shown per second on average.
        nbytes_per_s: bytes shown per second on average.
        burst_lines: lines that may be shown at once.
        burst_nbytes: bytes that may be shown at once.
        last_lines: how many of a rank's last lines ``finish`` shows, even after a flood.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        window_s: float = 0.05,
        raw: bool = False,
        max_lines: int = 200_000,
        max_nbytes: int = 32 * 1024**2,
        max_line_length: int = 10_000,
        lines_per_s: float = 400.0,
        nbytes_per_s: float = 256 * 1024.0,
        burst_lines: int = 1_000,
        burst_nbytes: int = 512 * 1024,
        last_lines: int = 50,
    ) -> None:
        if not ranks:
            raise ValueError("ranks: at least one is needed")
        self._gate = FloodGate(
            lines_per_s=lines_per_s,
            nbytes_per_s=nbytes_per_s,
            burst_lines=burst_lines,
            burst_nbytes=burst_nbytes,
            last_lines=last_lines,
        )
        self._holders: dict[str, int] = {}  # line -> how many ranks have it within their look-ahead
        self._queues = {rank: _Queue(rank, self._holders) for rank in sorted(set(ranks))}
        self._all_ranks = tuple(self._queues)
        self._first_queue, *self._other_queues = self._queues.values()
        self._unindexed: set[_Queue] = set()
        self._window_s = window_s
        self._raw = raw
        self._max_lines = max_lines
        self._max_length = max_nbytes
        self._max_line_length = max_line_length
        self._partials: dict[tuple[int, Stream], _Partial] = {}
        self._fed: deque[tuple[float, _Queue, int]] = deque()  # when, where, and the position after what was fed
        self._n_held = 0
        self._length_held = 0
        self._n_gaps_held = 0
        self._batch_ranks: tuple[int, ...] = ()
        self._batch: list[str] = []

    @property
    def left_out(self) -> Mapping[int, int]:
        """Lines left out so far, by rank."""
        return self._gate.left_out

    @property
    def pending(self) -> bool:
        """Whether a later ``drain`` has something to show, if nothing more is fed."""
        return bool(self._n_held or self._gate.pending)

    def feed(self, rank: int, stream: Stream, text: str, now: float, dropped_lines: int = 0) -> None:
        """Take what a rank wrote, in any chunking.

        Args:
            rank: who wrote it.
            stream: where.
            text: any number of lines, perhaps not ending in one.
            now: the time in seconds, of any clock that only goes forward.
            dropped_lines: lines that were left out before ``text``.

        Raises:
            ValueError: ``rank`` is not one of the folder's ranks.
        """
        queue = self._queues.get(rank)
        if queue is None:
            raise ValueError(f"rank {rank} is not one of {format_ranks(self._all_ranks)}")
        lines: list[str] = []
        if dropped_lines > 0:
            # The end of a line that had begun is among what was left out.
            lines += self._end_partial(rank, stream)
            lines.append(f"{_GAP}{dropped_lines}")
            self._n_gaps_held += 1
        lines += self._assemble(rank, stream, text)
        if lines:
            self._enqueue(queue, lines, now)

    def drain(self, now: float) -> list[FoldedLine]:
        """Lines that are ready to be shown."""
        self._merge(now - self._window_s, now)
        return self._gate.release(now)

    def finish(self, now: float) -> list[FoldedLine]:
        """All lines that are left, unterminated ones too (as lines), whatever the rate."""
        for rank, stream in list(self._partials):
            if lines := self._end_partial(rank, stream):
                self._enqueue(self._queues[rank], lines, now)
        self._merge(float("inf"), now)
        return self._gate.finish(now)

    # -- lines --

    def _assemble(self, rank: int, stream: Stream, text: str) -> list[str]:
        """Complete lines, each with its stream's mark; the rest is kept until its end comes."""
        partial = self._partials.pop((rank, stream), None)
        n_cut = 0
        if partial is not None:
            text = partial.text + text
            n_cut = partial.n_cut
        lines = text.split("\n")
        rest = lines.pop()
        mark = _MARKS[stream]
        shortened: list[str] = []
        if lines and n_cut:
            shortened.append(_cut(*_last_update(lines.pop(0), n_cut), self._max_line_length))
            n_cut = 0
        if "\r" in text:
            lines = [_last_update(line)[0] if "\r" in line else line for line in lines]
        if len(text) > self._max_line_length:
            lines = [_cut(line, 0, self._max_line_length) for line in lines]
        if rest:
            self._partials[rank, stream] = _Partial.of(rest, n_cut, self._max_line_length)
        return [mark + line for line in shortened + lines]

    def _end_partial(self, rank: int, stream: Stream) -> list[str]:
        partial = self._partials.pop((rank, stream), None)
        if partial is None:
            return []
        text, n_cut = _last_update(partial.text, partial.n_cut)
        if "\r" in partial.text and not text.strip():
            return []  # a progress bar that has wiped itself
        return [_MARKS[stream] + _cut(text, n_cut, self._max_line_length)]

    def _enqueue(self, queue: _Queue, lines: list[str], now: float) -> None:
        if self._raw:
            self._pass((queue.rank,), lines, now)
            return
        queue.lines += lines
        self._unindexed.add(queue)
        self._fed.append((now, queue, queue.end))
        self._n_held += len(lines)
        self._length_held += sum(map(len, lines))
        if self._n_held > self._max_lines or self._length_held > self._max_length:
            self._merge(float("inf"), now, n_lines=self._max_lines // 2, length=self._max_length // 2)

    # -- merging --

    def _merge(self, due: float, now: float, n_lines: int = 0, length: int = 0) -> None:
        """Take what all ranks agree on and what was fed until ``due``, as long as more than the bounds is held."""
        while self._n_held > n_lines or self._length_held > length:
            if self._take_agreed(now):
                continue
            queue, end = self._due_queue(due)
            if queue is None:
                break
            # Alone with its lines: no need to look at the other queues.
            if n_alone := queue.n_alone(end):
                self._emit((queue.rank,), queue.peek(0, n_alone), now)
                queue.skip(n_alone)
                queue.index()
                continue
            position = queue.position
            while queue.position == position:
                self._take(queue, now)
        self._flush(now)

    def _take_agreed(self, now: float) -> bool:
        """Take the lines with which all queues begin; whether there were any."""
        first = self._first_queue
        head = first.head
        if head is None:
            return False
        for other in self._other_queues:
            if other.head != head:
                return False
        n_agreed, size = 0, 1
        growing = True
        while size:
            chunk = first.peek(n_agreed, size)
            if len(chunk) == size and all(other.peek(n_agreed, size) == chunk for other in self._other_queues):
                n_agreed += size
            else:
                growing = False
            size = size * 2 if growing else size // 2
        self._emit(self._all_ranks, first.peek(0, n_agreed), now)
        for queue in self._queues.values():
            queue.skip(n_agreed)
        self._unindexed.update(self._queues.values())
        return True

    def _due_queue(self, due: float) -> tuple[_Queue | None, int]:
        """A queue whose head need not wait any longer (fed until ``due``, or held by all ranks), and up to where."""
        for queue in self._unindexed:
            queue.index()
        self._unindexed.clear()
        while self._fed:
            fed_at, queue, end = self._fed[0]
            if queue.position < end:
                if fed_at <= due:
                    return queue, end
                break
            self._fed.popleft()
        queues = self._queues.values()
        for queue in queues:
            if queue.head is None:
                return None, 0  # what a rank has not written can't be held by all
        for queue in queues:
            if self._holders[queue.head or ""] == len(queues):
                return queue, queue.position + 1
        return None, 0

    def _take(self, queue: _Queue, now: float) -> None:
        """Take the head of ``queue``, or what has to go before it."""
        distances: dict[str, int] = {}
        while True:
            head = queue.head
            assert head is not None, "a queue that blocks or is due has a head"
            if self._holders[head] == 1:
                takers = [queue]
                break
            if head in distances:
                # Lines cross. Give up the one in the circle whose partner is farthest away.
                circle = list(distances)
                head = max(circle[circle.index(head) :], key=distances.__getitem__)
                takers = [each for each in self._queues.values() if each.head == head]
                break
            takers = []
            for each in self._queues.values():
                position = each.first.get(head)
                if position is not None:
                    if position > each.position:
                        distances[head] = position - each.position
                        queue = each
                        break
                    takers.append(each)
            else:
                break
        self._emit(tuple([each.rank for each in takers]), [head], now)
        for each in takers:
            each.pop()

    # -- what is taken --

    def _emit(self, ranks: tuple[int, ...], lines: list[str], now: float) -> None:
        self._n_held -= len(lines) * len(ranks)
        self._length_held -= sum(map(len, lines)) * len(ranks)
        if ranks != self._batch_ranks:
            self._flush(now)
            self._batch_ranks = ranks
        self._batch += lines

    def _flush(self, now: float) -> None:
        if self._batch:
            batch, self._batch = self._batch, []
            self._pass(self._batch_ranks, batch, now)

    def _pass(self, ranks: tuple[int, ...], lines: list[str], now: float) -> None:
        """Hand lines to the gate, and the gaps between them."""
        start = 0
        if self._n_gaps_held:
            for i, line in enumerate(lines):
                if line[0] == _GAP:
                    self._gate.accept(ranks, lines[start:i], now)
                    for rank in ranks:
                        self._gate.leave_out(rank, int(line[1:]))
                    self._n_gaps_held -= len(ranks)
                    start = i + 1
        self._gate.accept(ranks, lines[start:] if start else lines, now)


class _Queue:
    """Lines of one rank that wait to be merged, and where they are within the look-ahead.

    Positions count all lines that the rank ever wrote, so they stay true when lines are taken.
    """

    __slots__ = ("_base", "_holders", "_indexed", "_later", "first", "lines", "position", "rank")

    def __init__(self, rank: int, holders: dict[str, int]) -> None:
        self.rank = rank
        self.lines: list[str] = []
        self.position = 0  # of the head
        self.first: dict[str, int] = {}  # line -> its first position, from the head to _indexed
        self._base = 0  # position of lines[0]; taken lines are removed now and then, not one by one
        self._holders = holders
        self._later: dict[str, deque[int]] = {}  # further positions of lines that come more than once
        self._indexed = 0

    @property
    def end(self) -> int:
        """The position after the last line."""
        return self._base + len(self.lines)

    @property
    def head(self) -> str | None:
        """The next line, None if there is none."""
        offset = self.position - self._base
        return self.lines[offset] if offset < len(self.lines) else None

    def peek(self, skip: int, n: int) -> list[str]:
        """Up to ``n`` lines, from ``skip`` lines behind the head."""
        start = self.position - self._base + skip
        return self.lines[start : start + n]

    def n_alone(self, end: int) -> int:
        """How many lines from the head on, up to position ``end``, no other rank has within its look-ahead."""
        n = 0
        for line in self.peek(0, min(end, self._indexed) - self.position):
            if self._holders[line] > 1:
                break
            n += 1
        return n

    def index(self) -> None:
        """Note the positions of lines up to the look-ahead."""
        stop = min(self.position + _LOOK_AHEAD, self.end)
        start = self._indexed
        if start >= stop:
            return
        first, holders = self.first, self._holders
        for position, line in enumerate(self.lines[start - self._base : stop - self._base], start):
            if line not in first:
                first[line] = position
                holders[line] = holders.get(line, 0) + 1
            else:
                self._later.setdefault(line, deque()).append(position)
        self._indexed = stop

    def pop(self) -> None:
        """Remove the head and keep the look-ahead indexed: ``skip(1)`` and ``index()``, at half the cost."""
        line = self.lines[self.position - self._base]
        self._forget(line)
        self.position += 1
        offset = self._indexed - self._base
        if offset < len(self.lines):
            line = self.lines[offset]
            if line not in self.first:
                self.first[line] = self._indexed
                self._holders[line] = self._holders.get(line, 0) + 1
            else:
                self._later.setdefault(line, deque()).append(self._indexed)
            self._indexed += 1
        self._trim()

    def skip(self, n: int) -> None:
        """Remove the first ``n`` lines."""
        stop = self.position + n
        for line in self.peek(0, min(stop, self._indexed) - self.position):
            self._forget(line)
        self.position = stop
        self._indexed = max(self._indexed, stop)
        self._trim()

    def _forget(self, line: str) -> None:
        """Drop the first position of ``line``."""
        if line in self._later:
            positions = self._later[line]
            self.first[line] = positions.popleft()
            if not positions:
                del self._later[line]
        else:
            del self.first[line]
            n_holders = self._holders.pop(line)
            if n_holders > 1:
                self._holders[line] = n_holders - 1

    def _trim(self) -> None:
        offset = self.position - self._base
        if offset == len(self.lines) or (offset > _TRIM_ABOVE and 2 * offset > len(self.lines)):
            del self.lines[:offset]
            self._base = self.position


class _Partial:
    """The beginning of a line whose end has not come: bounded, however long it grows."""

    __slots__ = ("n_cut", "text")

    def __init__(self, text: str, n_cut: int) -> None:
        self.text = text
        self.n_cut = n_cut

    @classmethod
    def of(cls, text: str, n_cut: int, max_length: int) -> _Partial:
        """Keep what can still be seen of ``text``, from the middle of which ``n_cut`` characters were cut before."""
        if "\r" in text:
            visible, n_cut = _last_update(text, n_cut)
            # The next character overwrites, unless it is the newline of a CR LF.
            text = f"{visible}\r" if text.endswith("\r") else visible
        half = max_length // 2
        if len(text) > 4 * half:
            n_cut += len(text) - 2 * half
            text = text[:half] + text[-half:]
        return cls(text, n_cut)


def _last_update(line: str, n_cut: int = 0) -> tuple[str, int]:
    """What is seen at the end of a line that overwrote itself with carriage returns, and what was cut from that."""
    _, cr, last = line.rstrip("\r").rpartition("\r")
    return (last, 0) if cr else (last, n_cut)


def _cut(line: str, n_cut: int, max_length: int) -> str:
    """Shorten a line in the middle, from which ``n_cut`` characters were cut before."""
    if not n_cut and len(line) <= max_length:
        return line
    half = max_length // 2
    n_cut += max(0, len(line) - 2 * half)
    return f"{line[:half]} … {n_cut:,} characters left out here … {line[-half:]}"


def render(lines: Iterable[FoldedLine], *, width_of_label: int | None = None) -> list[tuple[Stream, str]]:
    """Text to write: ``[0-3] text``, lines of the same stream in one chunk.

    Args:
        lines: what ``drain`` or ``finish`` gave.
        width_of_label: pad labels to this width, so that texts of different ranks line up.

    Returns:
        Stream and text, in order.
    """
    labels: dict[tuple[int, ...], str] = {}
    chunks: list[tuple[Stream, list[str]]] = []
    for line in lines:
        text = line.text
        if "\x1b" in text:
            colors = _ANSI_COLOR.findall(text)
            if colors and colors[-1].strip("0;"):
                text += "\x1b[0m"
        if not line.note:
            label = labels.get(line.ranks)
            if label is None:
                label = labels[line.ranks] = format_ranks(line.ranks).ljust(width_of_label or 0)
            text = f"{label} {text}" if text else label.rstrip()
        if not chunks or chunks[-1][0] != line.stream:
            chunks.append((line.stream, []))
        chunks[-1][1].append(text)
    return [(stream, "\n".join(texts) + "\n") for stream, texts in chunks]
