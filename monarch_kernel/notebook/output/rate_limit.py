"""Limits the rate of shown output: moderate output passes whole; of a flood, the first and the last lines are shown.

``jupyter_server`` drops messages above about 1 MB/s or 1,000 messages/s, whatever they contain. This module instead
chooses which lines to leave out, counts them by rank, and notes the loss in the stream at the place where it occurs.

Theory of operation
-------------------
The first lines of a burst pass at once, while a small token bucket lasts. Those that follow wait for `HOLD_S`, as what comes
then may be a flood; then they pass while a large token bucket (lines and bytes) lasts, and as it refills. When too many lines
wait, they are a *flood*: from then on no line is shown, until fewer lines come than could be shown. The last lines of every
rank are kept, and all others of the flood become one gap, which appears as a note before the last lines. While a flood goes on,
the note and the last lines appear after `FLOOD_NOTE_S`, and then at intervals that double. Hence, at any time:

- for each rank, shown lines + lines in gaps + waiting lines = accepted lines, in the order in which the rank wrote them;
- the last lines of every rank are shown or waiting, so ``finish`` can show them;
- a gap may appear earlier than its lines were relative to lines of *other* ranks, but never relative to lines of its ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from monarch_kernel.base.text import logs_command, plural
from monarch_kernel.errors import format_ranks

__all__ = ["STDERR", "STDOUT", "UNLIMITED", "FoldedItem", "FoldedLine", "RateLimiter"]

Stream = Literal["stdout", "stderr"]

# Internally a line is one string, the mark of its stream and then its text, so equality takes one hash and one comparison.
STDOUT = "o"
STDERR = "e"

UNLIMITED = 10**12
"""More lines, and bytes, than anything writes."""

HOLD_S = 0.25
FLOOD_NOTE_S = 4.0

_MAX_FLOOD_NOTE_S = 60.0
_CALM_S = 1.0
_NOTE_EVERY_S = 1.0
_MAX_GAPS = 8
_MIN_STRETCH = 10
_MIN_LAST_LINES = 25
_MAX_LAST_LINES = 4_000
_MIN_LAST_NBYTES = 16 * 1024
_MAX_RANKS_IN_NOTE = 8
_SHOWN_LINES = 200


@dataclass(frozen=True, slots=True)
class FoldedLine:
    """One line to show, with the ranks that wrote it.

    Attributes:
        ranks: the ranks that wrote it, sorted; for a note, the ranks that it describes.
        stream: the stream that they wrote it to.
        text: the line, without its newline.
        note: whether this is a note about lines left out here, rather than output.
    """

    ranks: tuple[int, ...]
    stream: Stream
    text: str
    note: bool = False


@dataclass(frozen=True, slots=True)
class FoldedItem:
    """Output other than a line, at its place among the lines, with the ranks that displayed it."""

    ranks: tuple[int, ...]
    key: str


@dataclass(slots=True)
class _Run:
    """Consecutive lines of the same ranks."""

    ranks: tuple[int, ...]
    lines: list[str]


@dataclass(slots=True)
class _Gap:
    """Lines that are left out, counted by rank."""

    counts: Counter[int]


class RateLimiter:
    """Passes lines at a bounded rate; counts the lines that it leaves out, and notes them.

    Args:
        lines_per_s: lines shown per second on average.
        nbytes_per_s: bytes shown per second on average, labels included.
        burst_lines: lines that may pass at once.
        burst_nbytes: bytes that may pass at once.
        first_lines: lines that pass without a wait; so many are shown of the beginning of a flood.
        last_lines: number of last lines that ``finish`` always shows. Ranks that write different lines share them, with at
            least 25 lines each; fewer if very many ranks or very long lines would themselves make a flood, or if the agent
            of the rank left out lines among them.
        more: the ``%mesh logs`` command of the ranks, which shows lines that are left out.
    """

    def __init__(
        self,
        *,
        lines_per_s: float = 400.0,
        nbytes_per_s: float = 256 * 1024.0,
        burst_lines: int = 1_000,
        burst_nbytes: int = 512 * 1024,
        first_lines: int = 100,
        last_lines: int = 100,
        more: str = "",
    ) -> None:
        self._more = more
        self.left_out: Counter[int] = Counter()
        self._lines_per_s = lines_per_s
        self._nbytes_per_s = nbytes_per_s
        self._burst_lines = burst_lines
        self._burst_nbytes = burst_nbytes
        self._last_lines = last_lines
        self._lines_left = float(burst_lines)
        self._nbytes_left = float(burst_nbytes)
        self._first_lines = min(first_lines, burst_lines)
        self._first_left = float(self._first_lines)
        self._refilled_at: float | None = None
        self._held_until = float("-inf")
        self._next_note_at = float("-inf")
        self._shown: list[FoldedLine | FoldedItem] = []
        self._waiting: deque[_Run | _Gap | FoldedItem] = deque()
        self._n_waiting = 0
        self._squeeze_above = 2 * burst_lines
        self._is_flood = False
        self._flood_note_s = FLOOD_NOTE_S
        self._n_arrived = 0  # lines since the time below
        self._counted_from = 0.0

    @property
    def pending(self) -> bool:
        """Whether a later ``release`` has something to show."""
        return bool(self._waiting or self._shown)

    def accept(self, ranks: tuple[int, ...], lines: Sequence[str], now: float) -> None:
        """Accept lines (mark and text) that all of ``ranks`` wrote; keeps no reference to ``lines``."""
        n_shown = 0
        if not self._waiting and not self._is_flood:
            self._refill(now)
            n_shown = self._show(ranks, lines, int(self._first_left))
            self._first_left -= n_shown
        if n_shown < len(lines):
            if not self._waiting:
                self._held_until = now + HOLD_S
            self._waiting.append(_Run(ranks, list(lines[n_shown:])))
            self._n_waiting += len(lines) - n_shown
            if self._n_waiting > self._squeeze_above:
                self._squeeze_flood(now)
        self._note_arrival(len(lines), now)

    def accept_item(self, item: FoldedItem) -> None:
        """Accept an item, which is shown at its place, or before the last lines of a flood."""
        if self._waiting and not self._is_flood:
            self._waiting.append(item)
        else:
            self._shown.append(item)

    def leave_out(self, rank: int, n_lines: int, now: float) -> None:
        """Count lines that ``rank`` wrote next and that were left out before they arrived."""
        self.left_out[rank] += n_lines
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, _Gap):
            last.counts[rank] += n_lines
        else:
            self._waiting.append(_Gap(Counter({rank: n_lines})))
            self._n_waiting += 1
        self._note_arrival(n_lines, now)
        if self._n_arrived > 2 * self._burst_lines and not self._is_flood:
            self._squeeze_flood(now)

    def release(self, now: float) -> list[FoldedLine | FoldedItem]:
        """Return the lines and items that may be shown now."""
        self._refill(now)
        if self._is_flood:
            self._release_in_flood(now)
        elif now >= self._held_until:
            self._release_waiting(now)
        shown, self._shown = self._shown, []
        return shown

    def finish(self, now: float) -> list[FoldedLine | FoldedItem]:
        """Return all that waits if it may be shown now, else the last lines of every rank, regardless of the rate."""
        self._refill(now)
        runs = [item for item in self._waiting if isinstance(item, _Run)]
        fits = not self._is_flood and self._n_waiting <= self._lines_left
        if not fits or sum(_nbytes(run.ranks, line) for run in runs for line in run.lines) > self._nbytes_left:
            self._squeeze()
        self._show_all_waiting()
        self._is_flood = False
        shown, self._shown = self._shown, []
        return shown

    def _release_waiting(self, now: float) -> None:
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, FoldedItem):
                self._shown.append(item)
            elif isinstance(item, _Gap):
                # Gaps of the next second join this one, rather than each make a note.
                if now < self._next_note_at or self._lines_left < 1:
                    break
                self._next_note_at = now + _NOTE_EVERY_S
                if sum(isinstance(each, _Gap) for each in self._waiting) > _MAX_GAPS:
                    # At one note per second, these gaps would delay the lines behind them.
                    self._squeeze()
                    item = self._waiting[0]
                    assert isinstance(item, _Gap), "each gap is merged into the gaps before it"
                self._lines_left -= 1
                self._shown.append(_note(item.counts, self._more))
                self._n_waiting -= 1
            else:
                n_shown = self._show(item.ranks, item.lines, len(item.lines))
                self._n_waiting -= n_shown
                if n_shown < len(item.lines):
                    del item.lines[:n_shown]
                    break
            self._waiting.popleft()

    def _release_in_flood(self, now: float) -> None:
        """Show the gap and the last lines if the flood is over, or has gone on for long."""
        counted_s = now - self._counted_from
        is_calm = counted_s >= _CALM_S and self._n_arrived <= self._lines_per_s * counted_s
        self._note_arrival(0, now)
        if is_calm:
            self._is_flood = False
        elif now < self._next_note_at:
            return
        else:
            self._flood_note_s = min(2 * self._flood_note_s, _MAX_FLOOD_NOTE_S)
            self._next_note_at = now + self._flood_note_s
        self._squeeze()
        self._show_all_waiting()

    def _show_all_waiting(self) -> None:
        for item in self._waiting:
            if isinstance(item, FoldedItem):
                self._shown.append(item)
            elif isinstance(item, _Gap):
                self._shown.append(_note(item.counts, self._more))
            else:
                self._shown.extend(_folded(item.ranks, line) for line in item.lines)
                self._lines_left = max(0.0, self._lines_left - len(item.lines))
        self._waiting.clear()
        self._n_waiting = 0
        self._first_left = min(self._first_left, self._lines_left)
        self._squeeze_above = 2 * self._burst_lines

    def _note_arrival(self, n_lines: int, now: float) -> None:
        """Count the lines of this second."""
        if now >= self._counted_from + _CALM_S:
            self._n_arrived = 0
            self._counted_from = now
        self._n_arrived += n_lines

    def _refill(self, now: float) -> None:
        elapsed = 0.0 if self._refilled_at is None else max(0.0, now - self._refilled_at)
        self._refilled_at = now
        self._lines_left = min(self._burst_lines, self._lines_left + elapsed * self._lines_per_s)
        self._nbytes_left = min(self._burst_nbytes, self._nbytes_left + elapsed * self._nbytes_per_s)
        self._first_left = min(self._first_lines, self._first_left + elapsed * self._lines_per_s)

    def _show(self, ranks: tuple[int, ...], lines: Sequence[str], most: int) -> int:
        """Show up to ``most`` lines while tokens last, and return their number. The last line may overdraw the bytes."""
        n_shown = 0
        for line in lines:
            if n_shown == most or self._lines_left < 1 or self._nbytes_left <= 0:
                break
            self._lines_left -= 1
            self._nbytes_left -= _nbytes(ranks, line)
            self._shown.append(_folded(ranks, line))
            n_shown += 1
        return n_shown

    def _squeeze_flood(self, now: float) -> None:
        """Note that the waiting lines are a flood, and squeeze them."""
        if not self._is_flood:
            self._is_flood = True
            self._flood_note_s = FLOOD_NOTE_S
            self._next_note_at = now + FLOOD_NOTE_S
        self._squeeze()
        # In proportion to what still waits, so that each line is examined a bounded number of times.
        self._squeeze_above = max(2 * self._burst_lines, 2 * self._n_waiting)

    def _squeeze(self) -> None:
        """Keep the last lines of every rank; leave out the rest."""
        self._shown += [item for item in self._waiting if isinstance(item, FoldedItem)]
        kept = _join_gaps(reversed(list(self._last_of_each_rank())))
        self._waiting.clear()
        self._waiting.extend(kept)
        self._n_waiting = sum(1 if isinstance(item, _Gap) else len(item.lines) for item in kept)

    def _last_of_each_rank(self) -> Iterator[_Run | _Gap]:
        """Yield the waiting items from the end, with gaps in place of all but the last lines of each rank."""
        # Groups of ranks share the total. Ranks that write the same lines count as one group, so 64 ranks in step lose nothing.
        n_groups = max(1, len({item.ranks for item in self._waiting if isinstance(item, _Run)}))
        lines_each = max(self._last_lines // n_groups, min(self._last_lines, _MIN_LAST_LINES))
        lines_each = max(1, min(lines_each, _MAX_LAST_LINES // n_groups))
        nbytes_each = max(_MIN_LAST_NBYTES, self._burst_nbytes // n_groups)
        n_kept: Counter[int] = Counter()
        nbytes_kept: Counter[int] = Counter()
        left_out: Counter[tuple[int, ...]] = Counter()  # since the last kept line, by the ranks that wrote it
        hidden: set[int] = set()  # ranks of which lines are left out since their last kept line
        resumed: set[int] = set()  # ranks that have a kept line in front of such lines
        for item in reversed(self._waiting):
            if isinstance(item, FoldedItem):
                continue
            if isinstance(item, _Gap):
                for rank in item.counts:
                    # Before a stretch that is long enough to read, keep nothing more: there may be a gap every few lines.
                    if n_kept[rank] >= _MIN_STRETCH:
                        n_kept[rank] = max(n_kept[rank], lines_each)
                yield from self._gap_of(left_out)
                yield item
                continue
            end = len(item.lines)
            while end and (
                with_room := [r for r in item.ranks if n_kept[r] < lines_each and nbytes_kept[r] < nbytes_each]
            ):
                # A common line that is kept for one rank is shown for the others, too, unless that makes another gap.
                again = hidden.intersection(resumed).difference(with_room)
                ranks = tuple(rank for rank in item.ranks if rank not in again)
                n_room = lines_each - max(n_kept[rank] for rank in with_room)
                nbytes_room = nbytes_each - max(nbytes_kept[rank] for rank in with_room)
                nbytes = n = 0
                for line in reversed(item.lines[:end]):
                    if n >= n_room or nbytes >= nbytes_room:
                        break
                    n += 1
                    nbytes += _nbytes(ranks, line)
                n_kept.update(dict.fromkeys(ranks, n))
                nbytes_kept.update(dict.fromkeys(ranks, nbytes))
                resumed |= hidden.intersection(ranks)
                hidden.difference_update(ranks)
                yield from self._gap_of(left_out)
                yield _Run(ranks, item.lines[end - n : end])
                if rest := tuple(rank for rank in item.ranks if rank not in ranks):
                    left_out[rest] += n
                end -= n
            if end:
                left_out[item.ranks] += end
                hidden.update(item.ranks)
        yield from self._gap_of(left_out)

    def _gap_of(self, left_out: Counter[tuple[int, ...]]) -> Iterator[_Gap]:
        """Yield a gap for the lines that are left out, if any, and clear the counter."""
        if left_out:
            counts: Counter[int] = Counter()
            for ranks, n_lines in left_out.items():
                counts.update(dict.fromkeys(ranks, n_lines))
            left_out.clear()
            self.left_out.update(counts)
            yield _Gap(counts)


def _join_gaps(items: Iterator[_Run | _Gap]) -> list[_Run | _Gap]:
    """Merge each gap into the previous one, for the ranks that have no line between the two."""
    joined: list[_Run | _Gap] = []
    gap: _Gap | None = None
    ranks_since: set[int] = set()
    for item in items:
        if isinstance(item, _Run):
            ranks_since.update(item.ranks)
            joined.append(item)
            continue
        rest: Counter[int] = Counter()
        for rank, n_lines in item.counts.items():
            if gap is None or rank in ranks_since:
                rest[rank] = n_lines
            else:
                gap.counts[rank] += n_lines
        if rest:
            gap = _Gap(rest)
            ranks_since.clear()
            joined.append(gap)
    return joined


def _folded(ranks: tuple[int, ...], line: str) -> FoldedLine:
    return FoldedLine(ranks, "stdout" if line[0] == STDOUT else "stderr", line[1:])


def _nbytes(ranks: tuple[int, ...], line: str) -> int:
    """Return the size of the line as shown, with its label."""
    return _label_length(ranks) + 1 + (len(line) if line.isascii() else len(line.encode("utf-8", "replace")))


@lru_cache(maxsize=256)
def _label_length(ranks: tuple[int, ...]) -> int:
    return len(format_ranks(ranks))


def _note(counts: Counter[int], command: str) -> FoldedLine:
    """Make a note of how many lines are left out, by rank, with ranks of equal counts together."""
    total = sum(counts.values())
    # What is shown before and after the gap is in the logs, too.
    more = f"; more: {logs_command(command, max(counts.values()) + _SHOWN_LINES)}" if command else ""
    by_count: dict[int, list[int]] = {}
    for rank in sorted(counts):
        by_count.setdefault(counts[rank], []).append(rank)
    parts = [
        f"rank {ranks[0]}: {n:,}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)[1:-1]}: {n:,} each"
        for n, ranks in by_count.items()
    ]
    if len(parts) > _MAX_RANKS_IN_NOTE:
        n_named = sum(len(ranks) for ranks in list(by_count.values())[:_MAX_RANKS_IN_NOTE])
        parts[_MAX_RANKS_IN_NOTE:] = [f"and {plural(len(counts) - n_named, 'more rank')}"]
    text = f"… {plural(total, 'line')} left out here ({', '.join(parts)}; shown: the first and the last{more})"
    return FoldedLine(tuple(sorted(counts)), "stdout", text, note=True)
