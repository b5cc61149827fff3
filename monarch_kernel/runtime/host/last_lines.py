"""The last lines of a stream, as a terminal would show them, for the report of a death."""

from __future__ import annotations

import re
from collections import deque

__all__ = ["LastLines"]

_KEPT = 60
_MAX_LENGTH = 1000
_MAX_TEXT = 8192
_UP = re.compile(r"\x1b\[(\d{0,4})A")
_CUT_OFF = re.compile(r"\x1b(?:\[\d{0,4})?$")
"""The start of a control sequence at the end of a text."""


class LastLines:
    """Keeps the last lines. A line that a progress bar rewrites counts once, also where bars are nested."""

    def __init__(self) -> None:
        self._rows: deque[str] = deque(maxlen=_KEPT)
        self._last = ""  # the row after these
        self._up = 0  # how many rows the cursor is above the last one

    def add(self, text: str) -> None:
        """Add text that was written."""
        if not self._up and "\x1b" not in text and "\x1b" not in self._last:
            rows = (self._last + text[-_MAX_TEXT:]).split("\n")
            self._last = rows.pop()[-_MAX_LENGTH:]
            self._rows.extend(map(_as_seen, rows[-_KEPT:]))
        else:
            self._rewrite(text)

    def clear(self) -> None:
        """Forget all lines."""
        self._rows.clear()
        self._last, self._up = "", 0

    def lines(self) -> tuple[str, ...]:
        """Return the lines, without an empty last one."""
        last = _as_seen(self._last)
        rows = tuple(map(_as_seen, self._rows))
        return (*rows, last) if last else rows

    def _rewrite(self, text: str) -> None:
        """Add text that moves the cursor up, as nested bars do, or that follows such a text."""
        rows = [*self._rows, self._last]
        at = max(0, len(rows) - 1 - self._up)
        if cut_off := _CUT_OFF.search(rows[at]):
            rows[at], text = rows[at][: cut_off.start()], cut_off[0] + text
        for i, line in enumerate(text.split("\n")):
            if i:
                at += 1
                rows += [""] * (at == len(rows))
            start = 0
            for up in _UP.finditer(line):
                rows[at] = _bounded(rows[at] + line[start : up.start()])
                at = max(0, at - int(up[1] or 1))
                start = up.end()
            rows[at] = _bounded(rows[at] + line[start:])
        self._up = len(rows) - 1 - at
        self._last = rows.pop()
        self._rows = deque(rows, maxlen=_KEPT)


def _as_seen(row: str) -> str:
    """Return what a terminal shows of a row that a progress bar has rewritten: its last version."""
    return row.rstrip("\r").rpartition("\r")[2]


def _bounded(row: str) -> str:
    """Return the part of a row that may still be seen."""
    return row[row.rstrip("\r").rfind("\r") + 1 :][-_MAX_LENGTH:]
