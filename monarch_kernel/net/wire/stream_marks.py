"""Marks that a rank writes into its streams: their numbers, which only grow, and how they are written and read.

A mark contains a secret that the host agent makes for each rank. So no text that a rank prints is a mark by accident, not
even the text of a mark of another rank.
"""

from __future__ import annotations

import re
import secrets

__all__ = [
    "DISPLAY",
    "END_OF_CELL",
    "FIRST_MARK",
    "MARK_STEP",
    "ORDER",
    "MarkReader",
    "is_display_mark",
    "is_end_of_cell",
    "is_order_mark",
    "mark_bytes",
    "new_secret",
    "switch_mark",
    "switched",
]

_DIGITS = 16
_SECRET_NBYTES = 16

FIRST_MARK = 1 << 40
"""Larger than the number of bytes of any stream without marks."""

MARK_STEP = 4
"""Difference of the numbers of two successive marks; the last bits of a number say what the mark is for."""

DISPLAY = 1
ORDER = 2
END_OF_CELL = 3


def new_secret() -> str:
    """Make the secret of one rank's marks: 32 random hexadecimal digits."""
    return secrets.token_hex(_SECRET_NBYTES)


def mark_bytes(secret: str, number: int) -> bytes:
    """Return the bytes of a mark: 70, which a pipe takes in one piece."""
    return b"%s%0*d" % (_prefix(secret), _DIGITS, number)


def _prefix(secret: str) -> bytes:
    return b"\0monarch-kernel mark %s " % secret.encode()


def is_display_mark(end: int) -> bool:
    """Whether a mark is at the position of displayed output, which is sent separately."""
    return _kind(end) == DISPLAY


def is_order_mark(end: int) -> bool:
    """Whether a mark says only that the rank has turned to its other stream: no message waits for it."""
    return _kind(end) == ORDER


def is_end_of_cell(end: int) -> bool:
    """Whether a mark is at the end of the output of a cell."""
    return _kind(end) == END_OF_CELL


def _kind(end: int) -> int:
    return end % MARK_STEP if FIRST_MARK <= end < _FIRST_SWITCH else 0


_FIRST_SWITCH = 1 << 52
_MAX_FD = 100_000


def switch_mark(request: int, fd: int) -> int:
    """Return the mark after which a pipe belongs to code that ``request`` left running; the rank then reads from ``fd``."""
    return _FIRST_SWITCH + request * _MAX_FD + fd


def switched(mark: int) -> tuple[int, int] | None:
    """Return the request and the file descriptor of a `switch_mark`; None for other marks."""
    return divmod(mark - _FIRST_SWITCH, _MAX_FD) if mark >= _FIRST_SWITCH else None


class MarkReader:
    """Removes the marks of one rank from its stream; everything else is text.

    Args:
        secret: of the rank's marks.

    Attributes:
        last: number of the last mark; 0 if there was none.
    """

    def __init__(self, secret: str) -> None:
        self.last = 0
        self._secret = secret
        self._prefix = _prefix(secret)
        self._whole_mark = re.compile(re.escape(self._prefix) + rb"(\d{%d})" % _DIGITS)
        self._rest = b""

    def successor(self) -> MarkReader:
        """Return a reader for the next pipe of the same rank, which continues after the last mark of this one."""
        reader = MarkReader(self._secret)
        reader.last = self.last
        return reader

    def rest(self) -> bytes:
        """Return what looked like the start of a mark; call this when no more data comes."""
        rest, self._rest = self._rest, b""
        return rest

    def feed(self, data: bytes) -> list[tuple[bytes, int]]:
        """Process the data that was read next.

        Returns:
            Pieces of text, and the mark after each; 0 after the last, which lacks what may be the start of a mark.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        start = data.rfind(b"\0")
        if start < 0:
            return [(data, 0)]
        # The first byte of a mark is its only NUL, so only the last NUL can start an unfinished mark.
        end = data[start:]
        digits = end[len(self._prefix) :]
        is_unfinished = self._prefix.startswith(end) or (end.startswith(self._prefix) and digits.isdigit())
        if is_unfinished and len(digits) < _DIGITS:
            data, self._rest = data[:start], end
        *marked, rest = self._whole_mark.split(data)
        pieces = [(piece, int(number)) for piece, number in zip(marked[::2], marked[1::2])]
        self.last = max([self.last, *(mark for _, mark in pieces if switched(mark) is None)])
        return [*pieces, (rest, 0)]
