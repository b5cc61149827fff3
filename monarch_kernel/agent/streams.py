"""The standard streams of a rank: line-buffered on file descriptors 1 and 2, with marks between what it writes.

What a rank writes and what it answers travel by different ways. A mark, written where a cell ends, tells whoever reads the
stream that all that came before has been read: also what native code and child processes wrote, which nobody here can
count, and what an interrupted ``print`` may or may not have written.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys

__all__ = ["MarkReader", "OutputMarks", "install_streams"]

_MARK = b"\0monarch-kernel mark "
_DIGITS = 16
_LENGTH = len(_MARK) + _DIGITS  # far less than what a pipe takes in one piece
_WHOLE_MARK = re.compile(_MARK + rb"(\d{%d})" % _DIGITS)
_FIRST = 1 << 40  # more than any stream that was never marked has bytes


class OutputMarks:
    """Writes marks to the standard streams, also where the user's code redirects them.

    Args:
        fds: file descriptors of their own.
    """

    def __init__(self, fds: tuple[int, int]) -> None:
        self._fds = fds
        self._numbers = itertools.count(_FIRST)

    def set(self) -> tuple[int, int]:
        """Mark both streams; gives the marks' numbers, which only grow."""
        number = next(self._numbers)
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.write(fd, b"%s%0*d" % (_MARK, _DIGITS, number))
        return number, number


class MarkReader:
    """Takes the marks out of what is read.

    Attributes:
        last: number of the last mark, 0 if there was none.
    """

    def __init__(self) -> None:
        self.last = 0
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Take the next piece; gives it without marks, and without an end that may be the beginning of a mark."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        start = data.rfind(b"\0")
        if start < 0:
            return data
        # A mark holds no other NUL than its first byte, so only the last NUL can be of an unfinished one.
        end = data[start:]
        digits = end[len(_MARK) :]
        if len(end) < _LENGTH and ((digits.isdigit() and end.startswith(_MARK)) or _MARK.startswith(end)):
            data, self._rest = data[:start], end
        numbers = _WHOLE_MARK.findall(data)
        if not numbers:
            return data
        self.last = max(self.last, int(numbers[-1]))
        return _WHOLE_MARK.sub(b"", data)


def install_streams() -> OutputMarks:
    """Replace `sys.stdout` and `sys.stderr`."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        raw: io.RawIOBase = io.FileIO(fd, "w", closefd=False)
        stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return OutputMarks((os.dup(1), os.dup(2)))
