"""The marks that a rank sets in its streams: their numbers, which only grow, and how they are written and read.

A mark holds a secret that the host agent makes for each rank. So no text that a rank prints is a mark by accident, not
even the text of a mark that another rank has written.
"""

from __future__ import annotations

import re
import secrets

__all__ = ["FIRST_MARK", "MarkReader", "is_display_mark", "mark_bytes", "new_secret", "switch_mark", "switched"]

_DIGITS = 16
_SECRET_NBYTES = 16

FIRST_MARK = 1 << 40
"""More than any stream that was never marked has bytes."""


def new_secret() -> str:
    """Make the secret of one rank's marks: 32 random hexadecimal digits."""
    return secrets.token_hex(_SECRET_NBYTES)


def mark_bytes(secret: str, number: int) -> bytes:
    """A mark as it is written: 70 bytes, which a pipe takes in one piece."""
    return b"%s%0*d" % (_prefix(secret), _DIGITS, number)


def _prefix(secret: str) -> bytes:
    return b"\0monarch-kernel mark %s " % secret.encode()


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
    """Takes the marks of one rank out of what is read; all else is text.

    Args:
        secret: of the rank's marks.

    Attributes:
        last: number of the last mark, 0 if there was none.
    """

    def __init__(self, secret: str) -> None:
        self.last = 0
        self._secret = secret
        self._prefix = _prefix(secret)
        self._whole_mark = re.compile(re.escape(self._prefix) + rb"(\d{%d})" % _DIGITS)
        self._rest = b""

    def successor(self) -> MarkReader:
        """A reader for the next pipe of the same rank, which starts after the last mark of this one."""
        reader = MarkReader(self._secret)
        reader.last = self.last
        return reader

    def rest(self) -> bytes:
        """Give what looked like the beginning of a mark; the caller knows that no more of it comes."""
        rest, self._rest = self._rest, b""
        return rest

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
        digits = end[len(self._prefix) :]
        is_begun = self._prefix.startswith(end) or (end.startswith(self._prefix) and digits.isdigit())
        if is_begun and len(digits) < _DIGITS:
            data, self._rest = data[:start], end
        *marked, rest = self._whole_mark.split(data)
        pieces = [(piece, int(number)) for piece, number in zip(marked[::2], marked[1::2])]
        self.last = max([self.last, *(mark for _, mark in pieces if switched(mark) is None)])
        return [*pieces, (rest, 0)]
