"""Log of all output of a rank, including output that is not shown, in two files that alternate to keep the newest part.

The agent writes the output that it has just read as one frame, and never waits for the disk. Each frame has its time, so the
start of a cell's output can be found from the time at which the cell started.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ["LogRecord", "RankLog", "log_bytes", "log_records", "read_log", "stack_path"]

FILE_NBYTES = 4 << 20
_HEAD = struct.Struct("<BdI")  # stream, time, length of what follows
_STREAMS: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")
_ATTEMPTS = 5


class LogRecord(NamedTuple):
    """Output read at once from one stream: ``at`` is in seconds since 1970; ``text`` may begin and end anywhere."""

    at: float
    stream: Literal["stdout", "stderr"]
    text: str


class RankLog:
    """Writer of a log, for the agent.

    Args:
        directory: directory of the files.
        proc: number of the rank's process.
        file_nbytes: file size at which the log switches to the other file and discards its old content.
        appends: whether to append to the log of a previous process with that number.
    """

    def __init__(self, directory: str, proc: int, file_nbytes: int = FILE_NBYTES, *, appends: bool = False) -> None:
        self._young, self._old = _paths(directory, proc)
        self._stack = stack_path(directory, proc)
        self._file_nbytes = file_nbytes
        self._fd = -1
        self._nbytes = 0
        self._appends = appends
        self._is_broken = False

    def write(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        """Append output; after a failed write (the disk is full), neither this output nor any later one is kept."""
        if self._is_broken or not data:
            return
        frame = (_HEAD.pack(stream == "stderr", time.time(), len(data)), data)
        try:
            if self._fd < 0:
                begin = os.O_APPEND if self._appends else os.O_TRUNC
                self._fd = os.open(self._young, os.O_CREAT | begin | os.O_WRONLY | os.O_CLOEXEC, 0o600)
                self._nbytes = os.fstat(self._fd).st_size
                self._appends = False
            n = os.writev(self._fd, frame)
        except OSError:
            n = 0
        self._nbytes += n
        if n < _HEAD.size + len(data):
            self._is_broken = True
            self.close()
        elif self._nbytes >= self._file_nbytes:
            self.close()
            with contextlib.suppress(OSError):
                os.replace(self._young, self._old)

    def close(self) -> None:
        """Stop writing; the files stay."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Close the log and remove its files."""
        self.close()
        for path in (self._young, self._old, self._stack):
            path.unlink(missing_ok=True)


def read_log(directory: str | Path, proc: int) -> list[LogRecord]:
    """Return the kept output of a rank, oldest first; empty if it has not written anything, or its mesh has ended."""
    return log_records(log_bytes(directory, proc))


def log_bytes(directory: str | Path, proc: int, max_nbytes: int | None = None) -> bytes:
    """Return the raw log of a rank, or about the newest ``max_nbytes`` of it."""
    young, old = _paths(directory, proc)
    data = b""
    for _ in range(_ATTEMPTS):
        inode = _inode(old)
        data = _content(old) + _content(young)
        if _inode(old) == inode:  # else the log has switched files meanwhile
            break
    start = 0
    while max_nbytes is not None and len(data) - start > max_nbytes and start + _HEAD.size <= len(data):
        start += _HEAD.size + _HEAD.unpack_from(data, start)[2]
    return data[start:]


def log_records(data: bytes) -> list[LogRecord]:
    """Decode the result of `log_bytes`."""
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in _STREAMS]
    return [
        LogRecord(at, _STREAMS[stream], text)
        for stream, at, piece in _frames(data)
        if (text := decoders[stream].decode(piece))
    ]


def _frames(data: bytes) -> Iterator[tuple[int, float, bytes]]:
    start = 0
    while start + _HEAD.size <= len(data):
        stream, at, length = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        if stream >= len(_STREAMS) or start + length > len(data):
            return  # the frame is being written
        yield stream, at, data[start : start + length]
        start += length


def stack_path(directory: str | Path, proc: int) -> Path:
    """The file of a rank for the stacks of its threads."""
    return Path(directory) / f"stack-{proc}"


def _paths(directory: str | Path, proc: int) -> tuple[Path, Path]:
    return Path(directory) / f"output-{proc}", Path(directory) / f"output-{proc}.1"


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
