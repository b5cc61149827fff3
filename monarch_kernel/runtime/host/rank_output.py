"""The output of the ranks of a host: read from their pipes, folded, and sent at most every 10 ms.

If the controller shows all output (`RankSpec.all_output`), the agent reads no faster than the controller takes it: while output
waits here for the controller, it does not read the pipes of such ranks. Their writes then block, as with any slow reader.
"""

from __future__ import annotations

import errno
import os
import selectors
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

from monarch_kernel.net.wire.messages import Output, OutputChunk
from monarch_kernel.net.wire.stream_marks import MarkReader
from monarch_kernel.runtime.host.logs import RankLog
from monarch_kernel.runtime.host.output import OutputStream, fold
from monarch_kernel.runtime.host.rank_process import RankProcess
from monarch_kernel.runtime.host.read_counts import ReadFile

__all__ = ["RankOutput", "take_output"]

OUTPUT_EVERY_S = 0.01
FEW_RANKS = 8
FOLD_S = 0.0002
"""How long output waits for other ranks to write the same, times the number of ranks; not up to `FEW_RANKS` ranks."""

_STREAMS: Sequence[Literal["stdout", "stderr"]] = ("stdout", "stderr")

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
"""Errors of opening or watching a file that may be temporary: no descriptor, no memory or no epoll watch is left."""


class RankOutput:
    """Reads the pipes of ranks.

    Args:
        ranks: By number of the process; owned by the caller.
        selector: Watches the pipes.
        send: Sends output to the controller.
        directory: Where ranks see what was read.
        is_slow: Whether the controller takes less than this host sends.
    """

    def __init__(
        self,
        ranks: Mapping[int, RankProcess],
        selector: selectors.BaseSelector,
        send: Callable[[Output], None],
        directory: str,
        is_slow: Callable[[], bool],
    ) -> None:
        self._is_slow = is_slow
        self._unread: list[OutputStream] = []  # streams that are not read while the controller is slow
        self._reads = ReadFile(directory)
        self._ranks = ranks
        self._selector = selector
        self._send = send
        self._late: list[OutputStream] = []  # streams whose successors can't be opened yet
        self._sent_at = 0.0
        self._due: float | None = None  # when to send the output that was read, at the latest
        self._holds = False  # whether streams have output that was read but not sent

    @property
    def is_late(self) -> bool:
        """Whether pipes wait for a descriptor (`follow_late`)."""
        return bool(self._late)

    def open(
        self, proc: int, secret: str, log: RankLog, *, is_whole: bool
    ) -> tuple[list[OutputStream], tuple[int, int]]:
        """Make the pipes of a new rank, and read them from now on; returns their streams and write ends."""
        streams, ends = [], []
        for name, counts in zip(_STREAMS, self._reads.take_slot(proc, secret) or (None, None), strict=True):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            streams.append(OutputStream(proc, name, read_end, MarkReader(secret), log, counts, is_whole=is_whole))
            ends.append(write_end)
            self.watch(streams[-1])
        return streams, (ends[0], ends[1])

    def watch(self, stream: OutputStream) -> None:
        """Read a pipe from now on."""
        self._selector.register(stream.fd, selectors.EVENT_READ, partial(self._read, stream))

    def close(self, streams: Sequence[OutputStream]) -> None:
        """Stop reading the pipes of a rank."""
        for stream in streams:
            if stream.fd >= 0:
                self._close(stream)

    def due_in(self, now: float) -> float | None:
        """Return after how many seconds `tick` has something to do; None if it has nothing.

        No event tells that the controller has caught up, so `tick` looks for that again and again while pipes wait for it.
        """
        if self._unread and not self._is_slow():
            return 0.0
        if self._due is not None:
            return max(0.0, self._due - now)
        return OUTPUT_EVERY_S if self._holds or self._unread else None

    def tick(self, now: float) -> None:
        """Send the output that is due, and read pipes again when the controller has caught up."""
        if self._unread and not self._is_slow():
            unread, self._unread = self._unread, []
            for stream in unread:
                self.watch(stream)
        if self._due is not None:
            if now >= self._due:
                self.flush(now)
        elif self._holds and now >= self._sent_at + OUTPUT_EVERY_S:
            self.flush(now)

    def flush(self, now: float) -> None:
        """Send the output that was read."""
        self._due = None
        written = [chunks for rank in self._ranks.values() if (chunks := list(take_output(rank.streams, now)))]
        if written:
            self._sent_at = now
            self._send(Output(tuple(fold(written))))
        self._holds = any(stream.waiting for rank in self._ranks.values() for stream in rank.streams)

    def follow_late(self) -> None:
        """Try again to read the pipes for which no descriptor was left."""
        for stream in list(self._late):
            rank = self._ranks.get(stream.proc)
            if rank is not None and stream in rank.streams:
                self._follow(stream)
            if stream.successor < 0 or rank is None or stream not in rank.streams:
                self._late.remove(stream)

    def _read(self, stream: OutputStream) -> None:
        if stream.fd < 0:
            return  # an event earlier in the same turn has ended its rank
        if stream.is_whole and self._is_slow():
            self._selector.unregister(stream.fd)
            self._unread.append(stream)
            return
        is_open = stream.read()
        if stream.successor >= 0:
            self._follow(stream)
        if not is_open:
            self._close(stream)
        now = time.monotonic()
        nranks = len(self._ranks)
        due = now + (min(FOLD_S * nranks, OUTPUT_EVERY_S) if nranks > FEW_RANKS else 0.0)
        if not stream.is_marked:  # else the controller waits for it
            due = max(due, self._sent_at + OUTPUT_EVERY_S)
        self._due = due if self._due is None else min(due, self._due)
        if now >= self._due and not stream.is_marked:
            self.flush(now)

    def _close(self, stream: OutputStream) -> None:
        if stream in self._unread:
            self._unread.remove(stream)
        else:
            self._selector.unregister(stream.fd)
        os.close(stream.fd)
        stream.fd = -1

    def _follow(self, stream: OutputStream) -> None:
        """Read the pipe that replaces a rank's previous one; the old pipe is still read as long as a process writes to it."""
        rank = self._ranks[stream.proc]
        path = f"/proc/{rank.pid}/fd/{stream.successor}"
        fd = -1
        try:
            fd = _open_pipe(path)
            successor = stream.succeed(fd)
            self.watch(successor)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno in _NO_ROOM:  # the rank keeps the pipe open until it is read
                if stream not in self._late:
                    print(
                        f"can't read the output of the rank with pid {rank.pid} yet: {error}",
                        file=sys.stderr,
                        flush=True,
                    )
                    self._late.append(stream)
                return
            if error.errno not in (errno.ENOENT, errno.ESRCH):  # else the rank has ended
                print(f"the output of the rank with pid {rank.pid} is lost: {error}", file=sys.stderr, flush=True)
            stream.successor = -1
            return
        stream.successor = -1
        rank.streams = [each for each in rank.streams if each.fd >= 0 or each.waiting or each in self._late]
        rank.streams.append(successor)


def take_output(streams: Sequence[OutputStream], now: float, *, last: bool = False) -> Iterator[OutputChunk]:
    """Yield the output of a rank's streams that may be shown now, in the order of the marks that the streams share."""
    left = [stream for stream in streams if stream.waiting]
    while left:
        stream = min(left, key=lambda stream: stream.next_mark)
        if not last and stream.must_wait(streams, now):
            left.remove(stream)
            continue
        chunk = stream.take(now, last=last)
        if chunk is not None:
            yield chunk
        if chunk is None or not stream.waiting:
            left.remove(stream)


def _open_pipe(path: str) -> int:
    """Open the read end of a pipe whose path came from a rank.

    Raises:
        OSError: the path is not a pipe, belongs to another user, or can't be opened.
    """
    there = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opening another kind of file may block, or have a side effect
    try:
        status = os.fstat(there)
        if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(errno.EINVAL, "not a pipe of this user", path)
        return os.open(f"/proc/self/fd/{there}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(there)
