"""Shows progress bars, lines that rewrite themselves, live in one block instead of one line per state.

Theory of operation
-------------------
A `TerminalScreen` emulates a terminal for one stream of one rank, as far as progress bars need it: carriage returns rewrite
a row, newlines and cursor-up (nested bars) change the row. A row is a *bar* once text follows a carriage return. Rows leave
the screen at its top, in order, when an ordinary line follows them, or when the cursor has stayed below them for `SETTLED_S`.

A bar that is live for `LIVE_AFTER_S` appears in a *block*: text that is updated in place, at most every `EVERY_S`. It
stays there in its last state. A shorter bar becomes an ordinary line when it ends. Either way it appears once. Bars of
several ranks with the same title, the text before the percentage, share one line, which shows the slowest rank. A bar without
a total has a count (``20it``) in place of the percentage. Titles whose decimal numbers change while the bar runs, as
``set_description(f"loss {loss:.4f}")`` makes them, are equal if they are equal without these numbers.

Blocks are displays that are updated, not carriage returns in the stream: frontends agree on displays, several bars and
lines between them work, and a saved notebook holds the last state instead of all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from monarch_kernel.base.text import printable
from monarch_kernel.errors import format_ranks
from monarch_kernel.notebook.output.rate_limit import Stream
from monarch_kernel.notebook.output.text import Partial, close_colors

__all__ = ["Bar", "BarBlock", "BarBoard", "TerminalScreen", "slowest"]

LIVE_AFTER_S = 0.15
EVERY_S = 0.2
SETTLED_S = 0.1
MAX_ROWS = 100  # on a screen
MAX_LINES = 32  # in a block
MAX_LINE_LENGTH = 300
# Longer numbers are text: Python refuses to convert very long ones, and a search for their end would start at each digit.
_UP = re.compile(r"\x1b\[(\d{0,9})A")
_PERCENT = re.compile(r"(?<!\d)(\d{1,9}(?:\.\d{1,20})?) ?%")
_ELAPSED = re.compile(r"\[((?:\d{1,9}:){1,2}\d{1,9})[<,]")
_OF_TOTAL = re.compile(r"(?<!\d)(\d{1,18}) ?/ ?(\d{1,18})(?!\d)")
# What tqdm writes without a total, "20it [00:03, " or "1.2kB [00:03, ".
_COUNT = re.compile(
    r"(?<![\d./])(?<!/ )(?P<count>(\d{1,18}(?:\.\d{1,20})?)([kMGTPEZ]?)(?: ?[^\W\d_][^\W\d]{0,40})?)"
    r" \[(?:\d{1,9}:){1,2}\d{1,9}, "
)
_THOUSANDS = ("", "k", "M", "G", "T", "P", "E", "Z")
_MEASURE = re.compile(r"(?<![\w.])[-+]?(?:\d{1,20}\.\d{1,20}(?:e[-+]?\d{1,3})?|\d{1,20}e[-+]?\d{1,3}|nan|inf)(?![\w.])")


class Row(Partial):
    """A line that may be rewritten.

    Attributes:
        bar_since: when it became a bar.
        shown: whether a block shows it.
        measures: whether decimal numbers in its title have changed.
    """

    __slots__ = ("_title", "bar_since", "measures", "shown")

    def __init__(self) -> None:
        super().__init__()
        self.bar_since: float | None = None
        self.shown = False
        self.measures = False
        self._title = ""

    def note_title(self) -> None:
        """Compare the title with the one before."""
        if self.is_blank:  # the bar cleared itself, and another may follow in its place
            self.measures, self._title = False, ""
        elif not self.measures and (title := _title(self.visible)):
            self.measures = title != self._title and _steady(title) == _steady(self._title)
            self._title = title

    def as_bar(self, rank: int, stream: Stream) -> Bar:
        """Return the state of the bar."""
        return Bar(rank, stream, self.visible, self.measures)

    @property
    def is_blank(self) -> bool:
        """Whether the row has no visible text."""
        return not self.visible.strip()


class TerminalScreen:
    """The rows of a terminal with what one rank wrote to one stream since its first progress bar.

    Args:
        partial: the start of the line that holds the bar.
        max_length: longer rows are cut in the middle, in characters.
    """

    def __init__(self, partial: Partial | None, max_length: int) -> None:
        self.rows = [Row()]
        if partial is not None:
            self.rows[0].text, self.rows[0].n_cut = partial.text, partial.n_cut
        self._cursor = 0
        self._moved_at = 0.0
        self._max_length = max_length

    def write(self, text: str, now: float) -> list[Row]:
        """Write text to the screen, and return the rows that leave it."""
        left: list[Row] = []
        for i, line in enumerate(text.split("\n")):
            if i:
                left += self._newline(now)
            if "\x1b[" not in line:
                self._put(line, now)
                continue
            start = 0
            for up in _UP.finditer(line):
                self._put(line[start : up.start()], now)
                self._cursor = max(0, self._cursor - int(up[1] or 1))
                self._moved_at = now
                start = up.end()
            self._put(line[start:], now)
        return left

    def settle(self, now: float, *, everything: bool = False) -> list[Row]:
        """Remove and return the rows above a cursor that has not moved for `SETTLED_S`; all rows if ``everything``."""
        if everything:
            left, self.rows, self._cursor = self.rows, [Row()], 0
            return left if left[-1].text else left[:-1]
        if self._cursor == len(self.rows) - 1 and now >= self._moved_at + SETTLED_S:
            return self._leave(self._cursor)
        return []

    @property
    def rest(self) -> Partial | None:
        """The only row, if it is not a bar: the incomplete line after all bars ended."""
        return self.rows[0] if len(self.rows) == 1 and self.rows[0].bar_since is None else None

    def _put(self, text: str, now: float) -> None:
        if not text:
            return
        row = self.rows[self._cursor]
        if row.bar_since is None and "\r" in (row.text + text).rstrip("\r"):
            row.bar_since = now
        row.append(text, self._max_length)
        if row.bar_since is not None:
            row.note_title()

    def _newline(self, now: float) -> list[Row]:
        row = self.rows[self._cursor]
        self._cursor += 1
        self._moved_at = now
        if self._cursor < len(self.rows):
            return []
        self.rows.append(Row())
        if (row.bar_since is None and not row.is_blank) or self._cursor > MAX_ROWS:
            return self._leave(self._cursor)
        return []

    def _leave(self, n: int) -> list[Row]:
        left, self.rows = self.rows[:n], self.rows[n:]
        self._cursor = max(0, self._cursor - n)
        return left


@dataclass(frozen=True, slots=True)
class Bar:
    """The state of a progress bar on one rank.

    Attributes:
        rank: the rank.
        stream: where the rank writes it.
        text: what the bar shows.
        measures: whether decimal numbers in its title are measures, which change.
    """

    rank: int
    stream: Stream
    text: str
    measures: bool = False

    @property
    def kind(self) -> tuple[object, ...]:
        """What bars of several ranks that share a line have in common: the title, or a text without progress."""
        title = _title(self.text)
        if title is None:
            return (self.stream, self.text)
        return (self.stream, (_steady(title) if self.measures else title, self.count is None))

    @property
    def fold_key(self) -> str:
        """The text, up to the percentage, that ended bars must share to appear as one line."""
        text = self.text.rstrip()
        match = _find_progress(text)
        if match is None:
            return text
        title = text[: match.start()]
        return (_steady(title) if self.measures else title) + match[0].partition(" [")[0]

    @property
    def count(self) -> str | None:
        """The count with its unit, if the bar has no total."""
        match = _COUNT.search(self.text)
        return None if match is None else match["count"]

    @property
    def progress(self) -> float:
        """The progress in percent, or the count without a total."""
        if match := _COUNT.search(self.text):
            return float(match[2]) * 1000.0 ** _THOUSANDS.index(match[3])
        if match := _PERCENT.search(self.text):
            return float(match[1])
        match = _OF_TOTAL.search(self.text)
        return 0.0 if match is None or match[2] == "0" else 100.0 * int(match[1]) / int(match[2])

    @property
    def elapsed(self) -> tuple[int, ...]:
        """The elapsed hours, minutes and seconds, read from ``[00:05<00:07``; zero if the bar shows none."""
        match = _ELAPSED.search(self.text)
        parts = [int(part) for part in match[1].split(":")] if match else []
        return (*[0] * (3 - len(parts)), *parts)


def _find_progress(text: str) -> re.Match[str] | None:
    """Find the count, the percentage, or a fraction such as ``3/10``."""
    return _COUNT.search(text) or _PERCENT.search(text) or _OF_TOTAL.search(text)


def _title(text: str) -> str | None:
    """Return the text before the progress; None where there is no progress."""
    match = _find_progress(text)
    return None if match is None else text[: match.start()].strip()


def _steady(title: str) -> str:
    """Return the title without its decimal numbers."""
    return _MEASURE.sub("…", title)


def slowest(bars: Sequence[Bar]) -> Bar:
    """Choose the bar with the least progress; among equals the longest elapsed time, then the lowest rank."""
    return min(bars, key=lambda bar: (bar.progress, [-part for part in bar.elapsed], bar.rank))


@dataclass(frozen=True, slots=True)
class BarBlock:
    """A block to show; it replaces an earlier block with the same ``number``."""

    number: int
    text: str


@dataclass
class BarBoard:
    """Decides which bars each block shows.

    Attributes:
        raw: show one line for each rank, even if lines are equal.
        more: text that says how to see bars that a block leaves out.
    """

    raw: bool = False
    more: str = ""
    _number: int = 0
    _ended: dict[int, list[Bar]] = field(default_factory=dict)  # rank -> ended bars that this block showed
    _is_over: bool = True
    _text: str = ""
    _at: float = float("-inf")

    def keep(self, bar: Bar) -> None:
        """Keep a bar that has ended in the block that showed it."""
        self._ended.setdefault(bar.rank, []).append(bar)

    def joins(self, bar: Bar) -> bool:
        """Whether the block shows a bar of another rank that has ended, and that an ended bar belongs to."""
        if self.raw:
            return False
        n_own = sum(each.kind == bar.kind for each in self._ended.get(bar.rank, ()))
        return any(
            sum(each.kind == bar.kind for each in bars) > n_own
            for rank, bars in self._ended.items()
            if rank != bar.rank
        )

    def line_shown(self) -> None:
        """Note that other output appeared below the block, so that new bars go to a new block."""
        self._is_over = True

    def forget(self) -> None:
        """Leave the block as it is, so that live bars go to a new block."""
        self._is_over, self._text = True, ""
        self._ended.clear()

    def update(
        self, screens: Sequence[tuple[int, Stream, TerminalScreen]], now: float, *, last: bool = False
    ) -> list[BarBlock]:
        """Return the blocks that must be shown again, with the live bars of the screens."""
        if not (last or now >= self._at + EVERY_S):
            return []
        live: dict[int, list[Bar]] = {}
        fresh: list[Row] = []
        is_live = False
        for rank, stream, screen in screens:
            for row in screen.rows:
                if row.bar_since is not None and (row.shown or now >= row.bar_since + LIVE_AFTER_S):
                    is_live |= row.shown
                    fresh += [] if row.shown else [row]
                    live.setdefault(rank, []).append(row.as_bar(rank, stream))
        blocks: list[BarBlock] = []
        if fresh and self._is_over and not is_live:
            blocks += self._changed({})
            self._number += 1
            self.forget()
        if fresh:
            self._is_over = False
            for row in fresh:
                row.shown = True
        blocks += self._changed(live)
        if blocks:
            self._at = now
        return blocks

    def _changed(self, live: dict[int, list[Bar]]) -> list[BarBlock]:
        text = "\n".join(self._lines(live))
        if text == self._text:
            return []
        self._text = text
        return [BarBlock(self._number, text)]

    def _lines(self, live: dict[int, list[Bar]]) -> list[str]:
        groups: dict[tuple[object, ...], list[Bar]] = {}
        for rank in sorted({*self._ended, *live}):
            seen: dict[object, int] = {}
            for bar in (*self._ended.get(rank, ()), *live.get(rank, ())):
                if bar.text.strip():
                    kind = (bar.rank if self.raw else None, *bar.kind)
                    seen[kind] = seen.get(kind, 0) + 1
                    groups.setdefault((*kind, seen[kind]), []).append(bar)
        lines = [self._line(bars) for bars in groups.values()]
        if len(lines) > MAX_LINES:
            n_out = len(lines) - MAX_LINES
            lines[: n_out + 1] = [f"… {n_out + 1:,} progress bars left out here{self.more}"]
        return lines

    @staticmethod
    def _line(bars: Sequence[Bar]) -> str:
        first = slowest(bars)
        text = printable(first.text.rstrip())
        if len(text) > MAX_LINE_LENGTH:
            text = text[:MAX_LINE_LENGTH] + "…"
        line = f"{format_ranks([bar.rank for bar in bars])} {close_colors(text)}"
        ahead = max(bars, key=lambda bar: (bar.progress, -bar.rank))
        if ahead.progress > first.progress and ahead.count is not None:
            line += f"  (fewest: [{first.rank}], most: [{ahead.rank}] {ahead.count})"
        elif ahead.progress > first.progress:
            line += f"  (slowest: [{first.rank}], fastest: [{ahead.rank}] {ahead.progress:.0f}%)"
        return line
