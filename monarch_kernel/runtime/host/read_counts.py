"""What the host agent has read of the output of its ranks, in a file that both map into memory.

At the end of a cell a rank marks its output (`net.wire.stream_marks`), and the controller waits until the agent has read the
mark. If nothing was written since the last mark, that mark serves again: the agent sleeps on, and nothing is sent. The rank
can't know this by itself, since native code and child processes write, too. So the agent counts here what it has read since the
last mark. A pipe that is empty, behind a reader that has read nothing since the mark, has had no output since.

The agent counts up the turn of a stream before and after it reads. So a rank that has seen the same even turn before and after
it has looked at its pipe knows that the agent has taken nothing from the pipe meanwhile.

Each rank has a slot, chosen by its number, with a key in it: of two living ranks with the same slot, the first gets no answers.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import mmap
import os
import termios
from collections.abc import Sequence

__all__ = ["ReadCounts", "ReadFile", "ReaderOf", "path_of_counts"]

_NSLOTS = 1 << 14
_SLOT_NBYTES = 64
_NBYTES = _NSLOTS * _SLOT_NBYTES
_STREAM_WORDS = 3  # turn, last mark, bytes of text since
_KEY = 2 * _STREAM_WORDS
_WORDS = _SLOT_NBYTES // 8


def path_of_counts(directory: str) -> str:
    """Return the file of the agent whose directory this is."""
    return f"{directory}/reads"


def _key(secret: str) -> int:
    """A number of a rank that says nothing of the secret of its marks."""
    return int.from_bytes(hashlib.blake2b(secret.encode(), digest_size=7).digest(), "little")


class ReadCounts:
    """The agent's side of one stream.

    Args:
        words: the words of the stream in the slot.
    """

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def begin(self) -> None:
        """Note that the agent is about to read."""
        self._words[0] += 1

    def end(self, mark: int, nbytes: int) -> None:
        """Note that it has read everything up to a number of bytes after a mark."""
        self._words[1], self._words[2] = mark, nbytes
        self._words[0] += 1


class ReadFile:
    """The agent's side of the file; without it, if it can't be made, ranks write a mark each time.

    Args:
        directory: of the agent.
    """

    def __init__(self, directory: str) -> None:
        self._words: memoryview | None = None
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(path_of_counts(directory), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, _NBYTES)
                self._words = memoryview(mmap.mmap(fd, _NBYTES)).cast("q")
            finally:
                os.close(fd)

    def take_slot(self, proc: int, secret: str) -> tuple[ReadCounts, ReadCounts] | None:
        """Give a new rank a slot; returns the counts of its stdout and its stderr."""
        if self._words is None:
            return None
        begin = proc % _NSLOTS * _WORDS
        words = self._words[begin : begin + _WORDS]
        words[:] = memoryview(array.array("q", [0] * _WORDS))
        words[_KEY] = _key(secret)
        return ReadCounts(words[:_STREAM_WORDS]), ReadCounts(words[_STREAM_WORDS:_KEY])


class ReaderOf:
    """A rank's side.

    Args:
        directory: of the agent.
        proc: the number of the rank.
        secret: of its marks.

    Raises:
        OSError: the agent has no such file.
    """

    def __init__(self, directory: str, proc: int, secret: str) -> None:
        at = proc % _NSLOTS * _SLOT_NBYTES
        page = at - at % mmap.ALLOCATIONGRANULARITY
        fd = os.open(path_of_counts(directory), os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(fd, mmap.ALLOCATIONGRANULARITY, prot=mmap.PROT_READ, offset=page)
        except ValueError as error:  # the file is too short
            raise OSError(str(error)) from None
        finally:
            os.close(fd)
        begin = (at - page) // 8
        self._words = memoryview(mapped).cast("q")[begin : begin + _WORDS]
        self._key = _key(secret)
        self._unread = array.array("i", [0])

    def has_read_nothing_since(self, mark: int, fds: Sequence[int]) -> bool:
        """Whether nothing was written since a mark, and the agent has read the mark.

        Args:
            mark: its number, the same in both streams.
            fds: the pipes of stdout and stderr.
        """
        turn, read_to, text, other_turn, other_read_to, other_text, key, _ = self._words
        if (
            (turn | other_turn) & 1
            or text
            or other_text
            or read_to != mark
            or other_read_to != mark
            or key != self._key
        ):
            return False
        for fd in fds:
            fcntl.ioctl(fd, termios.FIONREAD, self._unread)
            if self._unread[0]:
                return False
        return bool(self._words[0] == turn and self._words[_STREAM_WORDS] == other_turn)
