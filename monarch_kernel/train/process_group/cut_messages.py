"""Completes messages of gloo of which a part has arrived when their group ends, so that nothing waits for the rest.

Theory of operation
===================

gloo forgets the message that it is reading when the connection ends (`gloo_waits`), and nothing ends a receive that it has
forgotten, neither an abort nor another message. Only the missing bytes do. So another socket takes the place of the connection,
under the same descriptor (`Substitute`), and gloo reads the missing bytes from it. What gloo still writes to the other rank is
read and dropped.

The number of missing bytes is unknown, and may be zero: gloo may also wait for the next message. So gloo first gets zeros.
As the start of a message they belong to a buffer that does not exist: gloo leaves them, with all that follows, and the socket
shows how many bytes gloo has taken. If it has taken exactly the start of one message, none was cut. Otherwise it gets bytes of
ones, with some zeros in between, until it leaves them. Ones are NaN in tensors of floating point numbers, and as the start of a
message they have a kind that does not exist, which gloo skips.

A receive that is completed so looks like a success, and must not be one. So before gloo gets the first byte, waits begin to
stop at their end, until it is known whether a message was cut (`Received`). If one was, they raise an error, as does each later
one until the group is formed again. Waits in C++, as that of a backward pass, can't look there; their threads raise the error
when they come back to Python. All connections of the group are replaced first, so that no other rank gets such bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any, NamedTuple

from monarch_kernel.train.process_group.sockets import Socket, has_closed

__all__ = ["Received", "Substitute", "complete", "substitutes"]

_PREAMBLE_NBYTES = 48
"""Size of what gloo sends before each message: six numbers of 8 bytes (``struct Preamble`` in gloo's ``pair.h``)."""

_ZEROS = bytes(3 * _PREAMBLE_NBYTES)
_BLOCK = b"\xff" * (1 << 16) + _ZEROS

_NO_MESSAGE_AFTER_S = 0.05
"""How long gloo leaves bytes after the start of a message before it is certain that it leaves them for good."""

_LEFT_AFTER_S = 0.5
"""The same where the number of bytes that it has taken proves nothing; a thread of gloo may wait for a processor meanwhile."""

_AT_MOST_S = 60.0
"""How long messages may take to complete: far longer than any size of memory takes."""

_POLL_MS = 5

_ADD, _DEL = 1, 2  # EPOLL_CTL_ADD and EPOLL_CTL_DEL of Linux
_ONCE = select.EPOLLET
"""Wakes gloo when bytes or room come, and not all the time because of bytes that it leaves, which would take a processor."""


class Received:
    """Lets no wait return with bytes that no rank has sent; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doubts = 0
        self._is_known = threading.Event()
        self._is_doubted = False  # whether `check` has something to do
        self._is_wrong = False

    def check(self) -> None:
        """Raise an error if the message that this thread has waited for may be one that was completed.

        Raises:
            DistNetworkError: it may be.
        """
        if self._is_doubted:
            self._is_known.wait()
            if self._is_wrong:
                raise _error_type()

    def doubt(self) -> None:
        """Make waits stop at their end, until `believe`."""
        with self._lock:
            self._doubts += 1
            self._is_known.clear()
            self._is_doubted = True

    def refuse(self, threads: Iterable[int]) -> None:
        """Make waits raise an error, and these threads, which wait in native code."""
        with self._lock:
            self._is_wrong = True
        for thread in threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_error_type()))

    def believe(self) -> None:
        """Let waits return, unless they were refused."""
        with self._lock:
            self._doubts -= 1
            if not self._doubts:
                self._is_doubted = self._is_wrong
                self._is_known.set()

    def forget(self) -> None:
        """Let waits return: the group is formed again."""
        with self._lock:
            self._is_wrong = False
            self._is_doubted = self._doubts > 0


@cache
def _error_type() -> Any:
    """A class that has its text, because a thread gets a class; other processes get the usual error. Its base needs torch."""
    from torch.distributed import DistNetworkError

    text = "the process group has ended in the middle of a message to this rank: the received tensor is incomplete"

    def __init__(self: Exception, *args: object) -> None:
        Exception.__init__(self, *(args or (text,)))

    def __reduce__(self: Exception) -> tuple[Any, ...]:
        return DistNetworkError, self.args

    content = {"__init__": __init__, "__reduce__": __reduce__, "__module__": DistNetworkError.__module__}
    return type("DistNetworkError", (DistNetworkError,), content)


class _Watch(NamedTuple):
    """How gloo watches a connection: with which epoll, for which events, and with which data."""

    epoll: int
    events: int
    data: int


class Substitute:
    """A socket that gloo reads and writes in place of a connection.

    Attributes:
        socket: the socket that gloo has now.
        is_done: whether gloo gets no more bytes.

    Args:
        fd: the descriptor of the connection, which is open.
        watch: how gloo watches it.
    """

    def __init__(self, fd: int, watch: _Watch) -> None:
        self._theirs, self._ours = socket.socketpair()
        self._theirs.setblocking(False)
        self._ours.setblocking(False)
        self.socket = Socket(fd, f"socket:[{os.fstat(self._theirs.fileno()).st_ino}]")
        self.is_done = False
        self._is_cut: bool | None = None  # whether a message was cut; None: not known yet
        self._rest = memoryview(_ZEROS)
        self._last = (-1, 0.0)  # how much gloo has not read, and since when
        try:
            _epoll_ctl(watch, _DEL, fd)  # of the connection, which stays open elsewhere: gloo would be woken by it
        except OSError:  # gloo has closed it meanwhile
            self.close()
            raise
        os.dup2(self._theirs.fileno(), fd, inheritable=False)
        _epoll_ctl(watch._replace(events=watch.events | _ONCE), _ADD, fd)

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._ours.fileno()

    @property
    def takes_more(self) -> bool:
        """Whether to poll for room, too."""
        return bool(self._is_cut) and not self.is_done

    def go_on(self, now: float, refuse: Callable[[], None]) -> None:
        """Give gloo the next bytes, and look what it does with them; ``refuse`` is called when a message was cut."""
        self.drain()
        if self.is_done or (self._is_cut is None and self._rest and not self._send()):
            return
        (unread,) = struct.unpack("=i", fcntl.ioctl(self._theirs, termios.FIONREAD, bytes(4)))
        if unread != self._last[0]:
            self._last = unread, now
        left_s = now - self._last[1]
        if self._is_cut is None:
            if unread == len(_ZEROS) - _PREAMBLE_NBYTES:
                self.is_done = left_s >= _NO_MESSAGE_AFTER_S
            elif unread == 0 or left_s >= _LEFT_AFTER_S:
                self._is_cut = unread < len(_ZEROS)  # else gloo read nothing more from this connection before
                self.is_done = unread > 0
                if self._is_cut:
                    refuse()
        elif unread and left_s >= _LEFT_AFTER_S:
            self.is_done = True
        else:
            while self._send():
                self._rest = memoryview(_BLOCK)

    def drain(self) -> None:
        """Read what gloo has written."""
        with contextlib.suppress(OSError):
            while self._ours.recv(1 << 20):
                pass

    def close(self) -> None:
        """Close this end; gloo finds the end of the stream unless it has closed its own."""
        self._theirs.close()
        self._ours.close()

    def _send(self) -> bool:
        """Send what is left of a block; return whether all of it was sent."""
        try:
            self._rest = self._rest[self._ours.send(self._rest) :]
        except OSError:  # there is no room, or gloo has closed the connection
            return False
        return not self._rest


def substitutes(connections: Iterable[Socket]) -> dict[Socket, Substitute]:
    """Replace connections of gloo that are open; leaves out those that gloo does not watch, and all where descriptors lack."""
    watches = _watches()
    found: dict[Socket, Substitute] = {}
    for each in connections:
        if (watch := watches.get(each)) is not None and not has_closed(each):
            with contextlib.suppress(OSError):
                found[each] = Substitute(each.fd, watch)
    return found


def complete(
    messages: Collection[Substitute],
    received: Received,
    waiting: Callable[[], Collection[int]],
) -> None:
    """Complete the messages that were cut, if any.

    Args:
        messages: in place of the connections of the groups.
        received: refuses what is completed.
        waiting: returns the threads that may wait for a message in native code.
    """
    received.doubt()
    try:
        poll = select.poll()
        deadline = time.monotonic() + _AT_MOST_S
        while not all(each.is_done for each in messages) and (now := time.monotonic()) < deadline:
            for each in messages:
                each.go_on(now, lambda: received.refuse(waiting()))
                poll.register(each, select.POLLIN | select.POLLOUT * each.takes_more)
            poll.poll(_POLL_MS)
    finally:
        received.believe()


def _watches() -> dict[Socket, _Watch]:
    """Return the sockets that epolls of this process watch."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}", encoding="ascii") as lines:
                for line in lines:  # tfd:        7 events:       19 data:     55e8c0ffee00  pos:0 ino:3f1c sdev:8
                    words = line.replace(":", " ").split()
                    if words[0] == "tfd" and "ino" in words:
                        fd, events, data = int(words[1]), int(words[3], 16), int(words[5], 16)
                        inode = int(words[words.index("ino") + 1], 16)
                        found[Socket(fd, f"socket:[{inode}]")] = _Watch(int(name), events, data)
    return found


class _EpollEvent(ctypes.Structure):
    """``struct epoll_event`` of Linux."""

    _pack_ = 1 if platform.machine() == "x86_64" else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _epoll_ctl(watch: _Watch, operation: int, fd: int) -> None:
    """Call ``epoll_ctl``, with the interpreter lock held. Python's own gives the kernel other data."""
    event = _EpollEvent(watch.events, watch.data)
    if ctypes.pythonapi.epoll_ctl(watch.epoll, operation, fd, ctypes.byref(event)):
        raise OSError("epoll_ctl failed")
