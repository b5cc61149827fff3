"""What all ZeroMQ sockets here have in common: messages of several frames, and being woken."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.backend import Socket as PlainSocket

from monarch_kernel.net.wire.codec import Frame

__all__ = ["LINGER_MS", "Wakeable", "has_message", "recv_multipart", "recv_rest", "send_multipart"]

LINGER_MS = 1000
_ZERO_COPY_NBYTES = 64 * 1024

# pyzmq's enums, and the checks of its Python layer, cost more than the calls themselves.
_NOBLOCK, _SNDMORE, _POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN)
_RCVMORE, _EVENTS = int(zmq.RCVMORE), int(zmq.EVENTS)
_plain: Any = PlainSocket
_send, _recv, _get = _plain.send, _plain.recv, _plain.get


class _Event:
    """An eventfd that is closed when the last thread that uses it lets go, so that a late wake can't hit another file."""

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.fd)


class Wakeable:
    """What both ends share: an eventfd that wakes whoever waits."""

    def __init__(self) -> None:
        self._event: _Event | None = _Event()
        self._wake = self._event.fd

    def wake(self) -> None:
        """Make the current or the next `wait` return at once."""
        event = self._event
        if event is not None:
            os.eventfd_write(event.fd, 1)

    def _forget_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def send_multipart(socket: Any, parts: Sequence[Frame]) -> None:
    """Hand a message over without blocking; large frames are not copied.

    Raises:
        zmq.ZMQError: the socket has nobody to send it to.
    """
    for part in parts[:-1]:
        _send(socket, part, _NOBLOCK | _SNDMORE, copy=len(part) < _ZERO_COPY_NBYTES)
    _send(socket, parts[-1], _NOBLOCK, copy=len(parts[-1]) < _ZERO_COPY_NBYTES)


def recv_multipart(socket: Any) -> list[Frame] | None:
    """Give the next message of a socket, or None if none has arrived; the first frame as bytes, the others writable."""
    return recv_rest(socket, [_recv(socket, _NOBLOCK)]) if has_message(socket) else None


def recv_rest(socket: Any, parts: list[Frame]) -> list[Frame]:
    """Give the frames of the message that one has begun to read, behind those that there are."""
    while _get(socket, _RCVMORE):
        parts.append(_recv(socket, _NOBLOCK, copy=False).buffer)
    return parts


def has_message(socket: Any) -> bool:
    """Whether a message has arrived; to look costs a tenth of an attempt to receive that fails, for that raises."""
    return bool(_get(socket, _EVENTS) & _POLLIN)
