"""The marks that a rank sets in its streams: their numbers, which only grow, and how they are written and read."""

from __future__ import annotations

import re

__all__ = ["DIGITS", "FIRST_MARK", "MARK", "MarkReader", "is_display_mark", "switch_mark", "switched"]

MARK = b"\0monarch-kernel mark "
DIGITS = 16
_LENGTH = len(MARK) + DIGITS  # far less than what a pipe takes in one piece
_WHOLE_MARK = re.compile(MARK + rb"(\d{%d})" % DIGITS)

FIRST_MARK = 1 << 40
"""More than any stream that was never marked has bytes."""


def is_display_mark(end: int) -> bool:
    """Whether a mark stands where something was displayed, which comes by another way: such marks are odd."""
    return FIRST_MARK <= end < _FIRST_SWITCH and bool(end & 1)


_FIRST_SWITCH = 1 << 52
_MAX_FD = 100_000


def switch_mark(request: int, fd: int) -> int:
    """The mark after which a pipe belongs to what ``request`` has left running; ``fd`` of the rank reads what comes next."""
    return _FIRST_SWITCH + request * _MAX_FD + fd


def switched(mark: int) -> tuple[int, int] | None:
    """The request and the file descriptor of a `switch_mark`; None of any other."""
    return divmod(mark - _FIRST_SWITCH, _MAX_FD) if mark >= _FIRST_SWITCH else None


class MarkReader:
    """Takes the marks out of what is read.

    Attributes:
        last: number of the last mark, 0 if there was none.
    """

    def __init__(self) -> None:
        self.last = 0
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[bytes, int]]:
        """Take what was read next.

        Returns:
            Pieces, and the mark after each; 0 after the last, which is without what may be the beginning of a mark.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        start = data.rfind(b"\0")
        if start < 0:
            return [(data, 0)]
        # A mark holds no other NUL than its first byte, so only the last NUL can be of an unfinished one.
        end = data[start:]
        digits = end[len(MARK) :]
        if len(end) < _LENGTH and ((digits.isdigit() and end.startswith(MARK)) or MARK.startswith(end)):
            data, self._rest = data[:start], end
        *marked, rest = _WHOLE_MARK.split(data)
        pieces = [(piece, int(number)) for piece, number in zip(marked[::2], marked[1::2])]
        self.last = max([self.last, *(mark for _, mark in pieces if switched(mark) is None)])
        return [*pieces, (rest, 0)]
