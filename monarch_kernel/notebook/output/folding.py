"""Merges the output of many ranks into one stream: a line that several ranks wrote appears once, with its ranks.

Theory of operation
-------------------
``feed`` assembles lines and puts them in one queue per rank; ``drain`` merges the heads of the queues.

1. While all queues have the same head, it is taken immediately, with all ranks (in bulk: ranks mostly write the same).
2. Otherwise the head that was fed longest ago is due ``window_s`` after it was fed. A head that all ranks have
   somewhere in their queues is also due: no other rank can still write it.
3. A due head that is deeper in another rank's queue waits for the lines in front of it there, which are taken
   first: of ``A B C`` and ``X A B C``, ``X`` goes first and the rest is common. Where lines cross (``A B`` and
   ``B A``), the one whose partner is farthest away is given up: a greedy longest common subsequence.

Deeper means within a look-ahead. Each queue keeps the positions of these lines in a dict, and one shared dict
counts the ranks that hold a line, so no step scans a queue. Taken lines pass a ``RateLimiter``. For each rank
the lines that come out are a subsequence of those that went in. Without a flood they are all of them but for
``Repeats``: logs, warnings and bars of a rank that come too late to fold with those of another rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from monarch_kernel.base.steady_text import may_vary, rank_in_prefix, steady_line
from monarch_kernel.base.text import printable
from monarch_kernel.errors import format_ranks
from monarch_kernel.notebook.output.bars import Bar, BarBlock, BarBoard, Row, TerminalScreen, slowest
from monarch_kernel.notebook.output.rate_limit import STDERR, STDOUT, FoldedItem, FoldedLine, RateLimiter, Stream
from monarch_kernel.notebook.output.repeats import Repeats, is_logged, is_warning, may_be_logged
from monarch_kernel.notebook.output.text import Partial, close_colors, cut, last_update, rewrites_line

__all__ = ["FoldedItem", "FoldedLine", "OutputFolder", "render"]

# Marks of entries that are not lines, but have a place among lines.
_GAP = "g"  # lines left out by the rank's agent; the text is their number
_BAR = "b"  # a progress bar that ended and was not shown live; the text is its stream's mark and its fold key
_ITEM = "i"  # anything else, such as a figure; the text is its key
_VARIED = (
    "v"  # a line whose texts may differ by rank in times and the like; the text is its stream's mark and what is equal
)
_LOGGED = "l"  # such a line that a library has logged
_WARNED = "w"  # such a line of a warning
_MARKED = _GAP + _BAR + _ITEM + _VARIED + _LOGGED + _WARNED
_DIFFER = (
    "… lines of several ranks are equal but for numbers such as times, ranks or pids; those of the lowest rank are shown "
    "(all: --raw)"
)
_LOOK_AHEAD = 1_000
_LOOK_BACK = 100
_TRIM_ABOVE = 4_096
_MARKS: dict[Stream, str] = {"stdout": STDOUT, "stderr": STDERR}


class OutputFolder:
    """Folds the lines of many ranks into lines with their ranks.

    Args:
        ranks: the ranks whose output is fed; a line is complete when all of them wrote it.
        window_s: how long a line waits for other ranks to write it, too.
        raw: show every line separately, in the order of arrival, without waiting.
        repeats: show logs, warnings and bars of a rank also where they only repeat those of another rank, seconds later.
        max_lines: most lines to hold; above that, lines pass without waiting for other ranks.
        max_nbytes: most characters to hold, likewise.
        max_line_length: longer lines are cut in the middle, in characters.
        lines_per_s: lines shown per second on average.
        nbytes_per_s: bytes shown per second on average.
        burst_lines: lines that may be shown at once.
        burst_nbytes: bytes that may be shown at once.
        first_lines: how many lines pass at once before it is clear whether a flood comes.
        last_lines: how many last lines ``finish`` shows, even after a flood.
        item_window_s: how long an item waits for other ranks to display it, too.
        more: a command that shows all output, for the notes on left-out lines.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        window_s: float = 0.15,
        raw: bool = False,
        repeats: bool = False,
        max_lines: int = 200_000,
        max_nbytes: int = 32 * 1024**2,
        max_line_length: int = 10_000,
        lines_per_s: float = 400.0,
        nbytes_per_s: float = 256 * 1024.0,
        burst_lines: int = 1_000,
        burst_nbytes: int = 512 * 1024,
        first_lines: int = 100,
        last_lines: int = 100,
        item_window_s: float = 0.3,
        more: str = "",
    ) -> None:
        if not ranks:
            raise ValueError("ranks: at least one is needed")
        self._limiter = RateLimiter(
            lines_per_s=lines_per_s,
            nbytes_per_s=nbytes_per_s,
            burst_lines=burst_lines,
            burst_nbytes=burst_nbytes,
            first_lines=first_lines,
            last_lines=last_lines,
            more=more,
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
        self._partials: dict[tuple[int, Stream], Partial] = {}
        self._screens: dict[tuple[int, Stream], TerminalScreen] = {}
        self._board = BarBoard(raw, f"; all: {more}" if more else "")
        self._ended_bars: dict[str, dict[int, deque[Bar]]] = {}  # fold key -> rank -> bars
        self._varied: dict[str, dict[int, deque[str]]] = {}  # marked line -> rank -> texts
        self._texts_differ: bool | None = False  # None after the note about it
        self._repeats = None if raw or repeats else Repeats()
        self._warned: dict[tuple[int, Stream], str] = {}  # the warning whose line of code comes next
        self._item_delay_s = max(0.0, item_window_s - window_s)
        self._fed: deque[tuple[float, _Queue, int]] = deque()  # when it was fed, the queue, and the position after it
        self._n_held = 0
        self._length_held = 0
        self._n_marked_held = 0
        self._batch_ranks: tuple[int, ...] = ()
        self._batch: list[str] = []

    @property
    def left_out(self) -> Mapping[int, int]:
        """Lines left out so far, by rank."""
        return self._limiter.left_out

    @property
    def pending(self) -> bool:
        """Whether a later ``drain`` has something to show, if nothing more is fed."""
        return bool(self._n_held or self._limiter.pending)

    def feed(self, rank: int, stream: Stream, text: str, now: float, dropped_lines: int = 0) -> None:
        """Feed output of a rank, in chunks of any size.

        Args:
            rank: the rank that wrote it.
            stream: the stream that it wrote to.
            text: any number of lines; the last may be incomplete.
            now: the time in seconds, of any monotonic clock.
            dropped_lines: number of lines left out before ``text``.

        Raises:
            ValueError: ``rank`` is not one of the folder's ranks.
        """
        queue = self._queue_of(rank)
        lines: list[str] = []
        if dropped_lines > 0:
            # The left-out lines include the end of the incomplete line.
            lines += self._end_partial(rank, stream, now)
            lines.append(f"{_GAP}{dropped_lines}")
            self._n_marked_held += 1
        lines += self._assemble(rank, stream, text, now)
        if lines:
            self._enqueue(queue, lines, now)

    def feed_item(self, rank: int, key: str, now: float) -> None:
        """Feed an item with a place among the rank's lines; equal keys of several ranks make one item.

        Raises:
            ValueError: ``rank`` is not one of the folder's ranks.
        """
        queue = self._queue_of(rank)
        self._n_marked_held += 1
        self._enqueue(queue, [_ITEM + key], now, self._item_delay_s)

    def drain(self, now: float, *, waits: bool = True) -> list[FoldedLine | FoldedItem]:
        """Return the lines and items that are ready to be shown; without ``waits``, also those that wait for other ranks."""
        for (rank, stream), screen in list(self._screens.items()):
            if lines := self._left(rank, stream, screen.settle(now), now):
                self._enqueue(self._queues[rank], lines, now)
        self._merge(now - self._window_s if waits else float("inf"), now)
        shown = self._limiter.release(now)
        if self._repeats is not None and (note := self._repeats.note(now)):
            shown.append(FoldedLine((), "stdout", note, note=True))
        if shown:
            self._board.line_shown()
        return shown

    def finish(self, now: float, *, goes_on: bool = False) -> list[FoldedLine | FoldedItem]:
        """Return all remaining output, including incomplete lines (as lines), regardless of the rate.

        Args:
            now: the time in seconds.
            goes_on: whether more output may follow, so that bars stay live.
        """
        for rank, stream in [*self._partials, *([] if goes_on else self._screens)]:
            if lines := self._end_partial(rank, stream, now):
                self._enqueue(self._queues[rank], lines, now)
        self._merge(float("inf"), now)
        shown = self._limiter.finish(now)
        if self._repeats is not None and (note := self._repeats.note(now, last=True)):
            shown.append(FoldedLine((), "stdout", note, note=True))
        if self._texts_differ and not goes_on:
            self._texts_differ = None
            shown.append(FoldedLine((), "stdout", _DIFFER, note=True))
        return shown

    def bars(self, now: float, *, last: bool = False) -> list[BarBlock]:
        """Return new and changed blocks of progress bars; call it after ``drain``, or with ``last`` after ``finish``."""
        return self._board.update(
            [(rank, stream, screen) for (rank, stream), screen in self._screens.items()], now, last=last
        )

    def cleared(self) -> None:
        """Note that the output so far has been cleared."""
        self._board.forget()

    def _queue_of(self, rank: int) -> _Queue:
        queue = self._queues.get(rank)
        if queue is None:
            raise ValueError(f"rank {rank} is not one of {format_ranks(self._all_ranks)}")
        return queue

    # -- lines --

    def _assemble(self, rank: int, stream: Stream, text: str, now: float) -> list[str]:
        """Return the complete lines, each with its stream's mark; keep the incomplete one until its end arrives."""
        screen = self._screens.get((rank, stream))
        partial = self._partials.pop((rank, stream), None)
        if screen is None and _rewrites(partial, text):
            screen = self._screens[rank, stream] = TerminalScreen(partial, self._max_line_length)
        if screen is not None:
            return self._left(rank, stream, screen.write(text, now), now)
        n_cut = 0
        if partial is not None:
            text = partial.text + text
            n_cut = partial.n_cut
        lines = text.split("\n")
        rest = lines.pop()
        mark = _MARKS[stream]
        shortened: list[str] = []
        if lines and n_cut:
            shortened.append(cut(*last_update(lines.pop(0), n_cut), self._max_line_length))
            n_cut = 0
        if rewrites_line(text):
            lines = [last_update(line)[0] if rewrites_line(line) else line for line in lines]
        if len(text) > self._max_line_length:
            lines = [cut(line, 0, self._max_line_length) for line in lines]
        if rest:
            kept = self._partials[rank, stream] = Partial()
            kept.n_cut = n_cut
            kept.append(rest, self._max_line_length)
        lines = shortened + lines
        if not self._raw and (may_vary(text) or may_be_logged(text) or (rank, stream) in self._warned):
            return [self._entry(rank, stream, line) for line in lines]
        return [mark + line for line in lines]

    def _entry(self, rank: int, stream: Stream, line: str) -> str:
        """Return the entry of a line in the queue of its rank: the line, or what is equal in such lines of other ranks."""
        mark = _MARKS[stream]
        if self._raw:
            return mark + line
        named = rank_in_prefix(line)
        steady = steady_line(line, rank) if named is None else line
        kind = _VARIED if steady != line else ""
        warned = self._warned.pop((rank, stream), None)
        if self._repeats is None:
            pass
        elif warned is not None and line.startswith("  "):
            kind, steady = _WARNED, f"{steady}\n{warned}"  # the line of code repeats if the warning does
        elif is_logged(line, stream == "stderr"):
            kind = _LOGGED
            if stream == "stderr" and is_warning(line):
                kind, self._warned[rank, stream] = _WARNED, steady
        if named is not None:
            steady = self._with_prefix((kind := kind or _VARIED) + mark, line, rank, named)
        if not kind:
            return mark + line
        entry = f"{kind}{mark}{steady}"
        self._varied.setdefault(entry, {}).setdefault(rank, deque()).append(line)
        self._n_marked_held += 1
        return entry

    def _with_prefix(self, marks: str, line: str, rank: int, named: int) -> str:
        """Return what is equal in lines that begin with a rank: each rank may write its own, or all that of one rank."""
        own, foreign = steady_line(line, named), steady_line(line, None)
        if named == rank:
            return foreign if marks + foreign in self._varied else own
        return own if line in islice(self._varied.get(marks + own, {}).get(named, ()), _LOOK_BACK) else foreign

    def _end_partial(self, rank: int, stream: Stream, now: float) -> list[str]:
        screen = self._screens.get((rank, stream))
        if screen is not None:
            return self._left(rank, stream, screen.settle(0.0, everything=True), now)
        partial = self._partials.pop((rank, stream), None)
        if partial is None:
            return []
        return [self._entry(rank, stream, partial.end(self._max_line_length))]

    def _left(self, rank: int, stream: Stream, rows: list[Row], now: float) -> list[str]:
        """Return the lines of rows that left a screen, and drop the screen if it has no bar."""
        lines: list[str] = []
        for row in rows:
            if row.bar_since is None:
                lines.append(self._entry(rank, stream, row.end(self._max_line_length)))
            elif row.is_blank:
                continue  # the bar cleared itself
            elif row.shown:
                bar = row.as_bar(rank, stream)
                key = f"{_BAR}{_MARKS[stream]}{bar.fold_key}"
                if not self._joins([bar], key, now) and (
                    self._repeats is None or not self._repeats.leave_out((rank,), key, now)
                ):
                    self._board.keep(bar)
            else:
                text = row.end(self._max_line_length).rstrip()
                bar = Bar(rank, stream, text, row.measures)
                line = f"{_BAR}{_MARKS[stream]}{bar.fold_key}"
                self._ended_bars.setdefault(line, {}).setdefault(rank, deque()).append(bar)
                self._n_marked_held += 1
                lines.append(line)
        screen = self._screens[rank, stream]
        rest = screen.rest
        if rest is not None:
            del self._screens[rank, stream]
            if rest.text:
                self._partials[rank, stream] = rest
        return lines

    def _enqueue(self, queue: _Queue, lines: list[str], now: float, delay_s: float = 0.0) -> None:
        if self._raw:
            self._pass((queue.rank,), lines, now)
            return
        queue.lines += lines
        self._unindexed.add(queue)
        self._fed.append((now + delay_s, queue, queue.end))
        self._n_held += len(lines)
        self._length_held += sum(map(len, lines))
        if self._n_held > self._max_lines or self._length_held > self._max_length:
            self._merge(float("inf"), now, n_lines=self._max_lines // 2, length=self._max_length // 2)

    # -- merging --

    def _merge(self, due: float, now: float, n_lines: int = 0, length: int = 0) -> None:
        """Take lines common to all ranks and lines fed until ``due``, while more than the bounds are held."""
        while self._n_held > n_lines or self._length_held > length:
            if self._take_agreed(now):
                continue
            queue, end = self._due_queue(due)
            if queue is None:
                break
            # Only this rank has these lines: the other queues don't matter.
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
        """Take the lines with which all queues start; return whether there were any."""
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
        """Return a queue whose head is due (fed until ``due``, or held by all ranks), and the position up to which it is."""
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
                return None, 0  # a rank with an empty queue holds no line
        for queue in queues:
            if self._holders[queue.head or ""] == len(queues):
                return queue, queue.position + 1
        return None, 0

    def _take(self, queue: _Queue, now: float) -> None:
        """Take the head of ``queue``, or a line that must go before it."""
        distances: dict[str, int] = {}
        while True:
            head = queue.head
            assert head is not None, "a queue that blocks or is due has a head"
            if self._holders[head] == 1:
                takers = [queue]
                break
            if head in distances:
                # Lines cross. Give up the line in the cycle whose partner is farthest away.
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

    # -- taken lines --

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
        """Pass lines, and the marked entries among them, to the rate limiter."""
        start = 0
        if self._n_marked_held:
            for i, line in enumerate(lines):
                if line[0] in _MARKED:
                    self._limiter.accept(ranks, lines[start:i], now)
                    self._pass_marked(ranks, line, now)
                    self._n_marked_held -= len(ranks)
                    start = i + 1
        self._limiter.accept(ranks, lines[start:] if start else lines, now)

    def _pass_marked(self, ranks: tuple[int, ...], line: str, now: float) -> None:
        if line[0] == _GAP:
            for rank in ranks:
                self._limiter.leave_out(rank, int(line[1:]), now)
        elif line[0] == _ITEM:
            self._limiter.accept_item(FoldedItem(ranks, line[1:]))
        elif line[0] in _VARIED + _LOGGED + _WARNED:
            texts = [self._varied[line][rank].popleft() for rank in ranks]
            if not any(self._varied[line].values()):
                del self._varied[line]
            if (
                line[0] != _VARIED
                and self._repeats is not None
                and self._repeats.leave_out(ranks, line, now, again=line[0] == _WARNED)
            ):
                return
            if self._texts_differ is False and len(set(texts)) > 1:
                self._texts_differ = True
            self._limiter.accept(ranks, [line[1] + texts[0]], now)
        else:
            by_rank = self._ended_bars[line]
            bars = [by_rank[rank].popleft() for rank in ranks]
            bar = slowest(bars)
            if not any(by_rank.values()):
                del self._ended_bars[line]
            if self._joins(bars, line, now) or (
                self._repeats is not None and self._repeats.leave_out(ranks, line, now)
            ):
                return
            self._limiter.accept(ranks, [line[1] + bar.text], now)

    def _joins(self, bars: Sequence[Bar], key: str, now: float) -> bool:
        """Add bars that have ended to the line that the block shows for other ranks, if there is one."""
        if not all(map(self._board.joins, bars)):
            return False
        for bar in bars:
            self._board.keep(bar)
        if self._repeats is not None:
            self._repeats.is_repeat([bar.rank for bar in bars], key, now)
        return True


def _rewrites(partial: Partial | None, text: str) -> bool:
    """Whether the text rewrites a line; CR LF line ends do not count."""
    if "\r" not in text and (partial is None or "\r" not in partial.text):
        return False
    whole = text if partial is None else partial.text[-1:] + text
    return "\r" in whole.replace("\r\n", "\n").rstrip("\r")


class _Queue:
    """Lines of one rank that wait to be merged, with an index of the lines within the look-ahead.

    Positions count all lines that the rank ever wrote, so they stay valid when lines are taken.
    """

    __slots__ = ("_base", "_holders", "_indexed", "_later", "first", "lines", "position", "rank")

    def __init__(self, rank: int, holders: dict[str, int]) -> None:
        self.rank = rank
        self.lines: list[str] = []
        self.position = 0  # position of the head
        self.first: dict[str, int] = {}  # line -> its first position between the head and _indexed
        self._base = 0  # position of lines[0]; taken lines are removed in batches
        self._holders = holders
        self._later: dict[str, deque[int]] = {}  # further positions of repeated lines
        self._indexed = 0

    @property
    def end(self) -> int:
        """The position after the last line."""
        return self._base + len(self.lines)

    @property
    def head(self) -> str | None:
        """The next line, or None."""
        offset = self.position - self._base
        return self.lines[offset] if offset < len(self.lines) else None

    def peek(self, skip: int, n: int) -> list[str]:
        """Return up to ``n`` lines, starting ``skip`` lines after the head."""
        start = self.position - self._base + skip
        return self.lines[start : start + n]

    def n_alone(self, end: int) -> int:
        """Count the lines from the head, up to position ``end``, that no other rank has within its look-ahead."""
        n = 0
        for line in self.peek(0, min(end, self._indexed) - self.position):
            if self._holders[line] > 1:
                break
            n += 1
        return n

    def index(self) -> None:
        """Index the positions of lines up to the look-ahead."""
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


def render(lines: Iterable[FoldedLine], *, width_of_label: int | None = None) -> list[tuple[Stream, str]]:
    """Format lines as text, ``[0-3] text``, with consecutive lines of a stream in one chunk.

    Args:
        lines: the result of ``drain`` or ``finish``.
        width_of_label: pad labels to this width, so that texts are aligned.

    Returns:
        Streams and texts, in order.
    """
    labels: dict[tuple[int, ...], str] = {}
    chunks: list[tuple[Stream, list[str]]] = []
    for line in lines:
        text = close_colors(printable(line.text))
        if not line.note:
            label = labels.get(line.ranks)
            if label is None:
                label = labels[line.ranks] = format_ranks(line.ranks).ljust(width_of_label or 0)
            text = f"{label} {text}" if text else label.rstrip()
        if not chunks or chunks[-1][0] != line.stream:
            chunks.append((line.stream, []))
        chunks[-1][1].append(text)
    return [(stream, "\n".join(texts) + "\n") for stream, texts in chunks]
