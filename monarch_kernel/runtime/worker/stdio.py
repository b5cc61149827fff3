"""The standard streams of a rank: line-buffered on file descriptors 1 and 2, with marks in the output.

Output and answers of a rank travel on different connections. A mark at the end of a cell tells the reader of the stream that it
has read all earlier output. This includes output of native code and of child processes, which Python cannot count, and the
output of an interrupted ``print``, of which any part may be written.

The two streams are two pipes, so the reader could not tell in which order a rank has written to them. Where Python turns from
one to the other, it sets a mark in both. Native code and child processes set none.

Child processes that a cell has left running keep its pipes. If a rank has children when a cell starts, it replaces its pipes
with new ones, and writes a mark into the old pipes that says where the new ones are; the agent opens these through ``/proc``.
From then on all output in the old pipes belongs to the children. A cell without such children costs a system call for each
stream.

A rank sets no mark if nothing was written since the last one, and the agent has read that (`runtime.host.read_counts`): a
silent cell costs the agent nothing.

Two alternatives are worse: counting bytes instead of setting marks would miss the output of native code, and sending answers
through the agent would cost each call a hop.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import io
import itertools
import os
import sys
import termios
from collections.abc import Callable
from typing import Any

from monarch_kernel.net.wire.stream_marks import (
    DISPLAY,
    END_OF_CELL,
    FIRST_MARK,
    MARK_STEP,
    ORDER,
    is_end_of_cell,
    mark_bytes,
    switch_mark,
)
from monarch_kernel.runtime.host.read_counts import ReaderOf

__all__ = ["OutputMarks", "install_streams"]


class OutputMarks:
    """Writes marks to the standard streams, even if the user's code redirects them.

    Args:
        fds: Separate file descriptors of the streams.
        secret: The secret by which the host agent recognizes this rank's marks.
        reader: Knows what the agent has read; None if that is unknown.
    """

    def __init__(self, fds: tuple[int, int], secret: str, reader: ReaderOf | None = None) -> None:
        self._fds = fds
        self._reader = reader
        self._last = 0  # the number of the last mark
        self._secret = secret
        self._pid = os.getpid()
        self._read_ends: list[int] = []  # of new pipes, which the agent may not have opened yet
        self._switched_at = 0  # the number of the last mark before the last switch
        self._former: set[tuple[int, int]] = set()  # pipes that are no longer used: device and inode
        self._numbers = itertools.count(FIRST_MARK, MARK_STEP)
        self._written = 0  # the file descriptor that was written to since the last mark; 0 for none

    def write_to(self, fd: int) -> None:
        """Write a mark to both streams if something was written to the other one since the last mark."""
        if self._written not in (0, fd):
            self._set(ORDER)
        self._written = fd

    def set(
        self, *, display: bool = False, ends_cell: bool = False, is_last: Callable[[], bool] = lambda: False
    ) -> tuple[int, int]:
        """Write a mark to both streams, when a request ends or a display is sent; the last one serves again if it can.

        Args:
            display: whether a display is sent.
            ends_cell: whether a cell ends: the report of a later death shows only what was written since then.
            is_last: called before a new mark; returns whether nothing else runs, so that the mark counts as the end of a cell.

        Returns:
            The numbers of the marks in stdout and stderr, which only grow. They are 0 in a fork, which writes no marks because
            its numbers would repeat those of the rank.
        """
        if not display and self._is_silent(ends_cell):
            return self._last, self._last
        return self._set(DISPLAY if display else END_OF_CELL if ends_cell or is_last() else 0)

    def _is_silent(self, ends_cell: bool) -> bool:
        """Whether nothing was written since the last mark, which means what is needed now."""
        last, reader = self._last, self._reader
        if reader is None or self._written or not last or (ends_cell and not is_end_of_cell(last)):
            return False
        try:
            return os.getpid() == self._pid and reader.has_read_nothing_since(last, self._fds)
        except OSError:
            return False

    def _set(self, kind: int) -> tuple[int, int]:
        if os.getpid() != self._pid:
            return 0, 0
        self._written = 0
        number = self._last = next(self._numbers) + kind
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.write(fd, mark_bytes(self._secret, number))
        return number, number

    def disown(self) -> None:
        """Forget the secret and close the pipes, in a process that the user's code has forked: it can then write no mark.

        The process keeps the file descriptors 1 and 2, so its output is shown.
        """
        self._secret = ""
        fds, self._fds = (*self._fds, *self._read_ends), (-1, -1)
        self._read_ends.clear()
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    def begin(self, left_running: int) -> None:
        """Prepare for a cell; ``left_running`` is the request that left child processes running, 0 if there is none."""
        for (
            fd
        ) in self._fds:  # a child process that shares the pipes may have made them non-blocking, and prints would fail
            with contextlib.suppress(OSError):
                if not os.get_blocking(fd):
                    os.set_blocking(fd, True)
        if self._last != self._switched_at:
            self._read_ends = [read_end for read_end in self._read_ends if not _close_if_read(read_end)]
        if left_running:
            self._switch(left_running)
        elif self._former:
            self._take_back()

    def _take_back(self) -> None:
        """Redirect a stream to its current pipe, if the user's code has restored it to a former one from a saved copy."""
        for fd, own in enumerate(self._fds, 1):
            with contextlib.suppress(OSError):
                there = os.fstat(fd)
                if (there.st_dev, there.st_ino) in self._former:
                    os.dup2(own, fd)

    def _switch(self, request: int) -> None:
        """Switch to new pipes, and leave the old ones to the child processes that ``request`` left running.

        A mark in the old pipes, which the agent reads, says where the new ones are; the agent opens them through /proc.
        """
        self._take_back()
        self._switched_at = self._last
        for fd, own in enumerate(self._fds, 1):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            self._read_ends.append(read_end)
            with contextlib.suppress(OSError):
                os.write(own, mark_bytes(self._secret, switch_mark(request, read_end)))
                left = os.fstat(own)
                self._former.add((left.st_dev, left.st_ino))
                if os.path.samestat(os.fstat(fd), left):  # otherwise the user's code has redirected the stream
                    os.dup2(write_end, fd)
                os.dup2(write_end, own, inheritable=False)
            os.close(write_end)


def _close_if_read(read_end: int) -> bool:
    """Close the read end of a pipe if the agent has opened it: the agent has then read the mark that was written since."""
    unread = array.array("i", [0])
    fcntl.ioctl(read_end, termios.FIONREAD, unread)
    if unread[0]:  # the next cell was sent before the answer to the last one had arrived
        return False
    os.close(read_end)
    return True


class _MarkedFile(io.FileIO):
    """A standard stream that sets a mark where the rank turns to it from the other one, so that their order is known."""

    def __init__(self, fd: int, marks: OutputMarks) -> None:
        super().__init__(fd, "w", closefd=False)
        self._fd = fd
        self._marks = marks

    def write(self, data: Any, /) -> int:
        self._marks.write_to(self._fd)
        return super().write(data)


def install_streams(secret: str, reader: ReaderOf | None = None) -> OutputMarks:
    """Replace `sys.stdout` and `sys.stderr`; ``secret`` is part of each mark in them, and ``reader`` knows what was read."""
    marks = OutputMarks((os.dup(1), os.dup(2)), secret, reader)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        raw: io.RawIOBase = _MarkedFile(fd, marks)
        stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.register_at_fork(after_in_child=marks.disown)
    return marks
