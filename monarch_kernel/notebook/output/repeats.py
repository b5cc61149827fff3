"""Leaves out logs, warnings and bars of a rank that only repeat what a cell has shown for another rank.

Ranks import a library or reach a warning seconds apart, too late to fold their lines. A line counts as logged if a library's
logger or Python's `warnings` has written it. Errors, and what a program prints, always appear: they say which rank got how far.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from monarch_kernel.base.steady_text import is_stamped
from monarch_kernel.base.text import plural
from monarch_kernel.errors import format_ranks

__all__ = ["Repeats", "is_logged", "is_warning", "may_be_logged"]

WINDOW_S = 5.0
NOTE_AFTER_S = 30.0  # where lines are left out all the time
MAX_KEYS = 1_000  # lines that are remembered

_WARNING = re.compile(r"^[^\s:][^\n:]{0,300}:\d{1,7}: (?:\w{1,60}\.){0,9}\w{0,60}Warning: ")
_LEVEL = re.compile(r"^(?:DEBUG|INFO|WARNING):[\w.-]{1,100}:")
_NAME = re.compile(r"^\[[a-z_][\w.]{0,60}\] ")  # as transformers logs
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|^(?:\[[Rr]ank ?\d{1,9}\]:? ?)?\[?[EF]\d{4} ")
_MARKS_OF_LOGS = ("Warning: ", "DEBUG:", "INFO:", "WARNING:")


def may_be_logged(text: str) -> bool:
    """Whether a line of the text may be logged without a time stamp; much faster than to look at each line."""
    return text[:1] == "[" or "\n[" in text or any(mark in text for mark in _MARKS_OF_LOGS)


def is_warning(line: str) -> bool:
    """Whether Python's `warnings` has written the line."""
    return _WARNING.match(line) is not None


def is_logged(line: str, is_stderr: bool) -> bool:
    """Whether a logger or `warnings` has written the line, and not as an error."""
    if _ERROR.search(line):
        return False
    if is_stderr and (_LEVEL.match(line) or _NAME.match(line) or is_warning(line)):
        return True
    return is_stamped(line)


@dataclass(slots=True)
class _Shown:
    """A line that has appeared.

    Attributes:
        at: when it appeared last.
        number: how often one rank has written it, as far as that appeared.
        by_rank: how often each rank has written it.
    """

    at: float
    number: int = 0
    by_rank: dict[int, int] = field(default_factory=dict)


class Repeats:
    """Tells which lines are repeats, and counts them."""

    def __init__(self) -> None:
        self._shown: dict[str, _Shown] = {}  # in the order of their times
        self._ranks: set[int] = set()
        self._n = 0
        self._first_at = self._last_at = 0.0

    def leave_out(self, ranks: Sequence[int], key: str, now: float, *, again: bool = False) -> bool:
        """Do as `is_repeat`, and count the repeat as left out."""
        if not self.is_repeat(ranks, key, now, again=again):
            return False
        self._first_at = self._first_at if self._n else now
        self._last_at = now
        self._n += len(ranks)
        self._ranks.update(ranks)
        return True

    def is_repeat(self, ranks: Sequence[int], key: str, now: float, *, again: bool = False) -> bool:
        """Note a line that ranks have written, and tell whether it is a repeat.

        Args:
            ranks: the ranks that have written it.
            key: what is equal in such lines.
            now: the time in seconds.
            again: whether it is also a repeat if the same rank wrote it before, as for warnings, which Python shows once.
        """
        shown = self._shown.pop(key, None) or _Shown(float("-inf"))
        for rank in ranks:
            shown.by_rank[rank] = shown.by_rank.get(rank, 0) + 1
        number = max(shown.by_rank[rank] for rank in ranks)
        is_repeat = now - shown.at <= WINDOW_S and (again or number <= shown.number)
        if again or not is_repeat:
            shown.at = now
        shown.number = max(shown.number, number)
        self._shown[key] = shown
        if len(self._shown) > MAX_KEYS:
            del self._shown[next(iter(self._shown))]
        return is_repeat

    def note(self, now: float, *, last: bool = False) -> str:
        """Return a note on what was left out, once nothing more has been for `WINDOW_S`, or a ``last`` one; else nothing."""
        is_due = now - self._last_at >= WINDOW_S or now - self._first_at >= NOTE_AFTER_S
        if not self._n or not (last or is_due):
            return ""
        text = f"… {plural(self._n, 'line')} of {format_ranks(sorted(self._ranks))} left out: "
        self._n = 0
        self._ranks.clear()
        return text + "logs, warnings or bars that were shown above up to 5 s before (all: --raw)"
