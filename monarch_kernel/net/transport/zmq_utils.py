"""Helpers for all ZeroMQ sockets of this package: multipart messages and wake-ups."""

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
    """An eventfd that is closed when its last user drops it, so that a late wake can't write to another file."""

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.fd)


class Wakeable:
    """Base of transports: an eventfd that wakes the waiting thread."""

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
    """Send a message without blocking; large frames are not copied.

    Raises:
        zmq.ZMQError: the socket has no peer to send it to.
    """
    for part in parts[:-1]:
        _send(socket, part, _NOBLOCK | _SNDMORE, copy=len(part) < _ZERO_COPY_NBYTES)
    _send(socket, parts[-1], _NOBLOCK, copy=len(parts[-1]) < _ZERO_COPY_NBYTES)


def recv_multipart(socket: Any) -> list[Frame] | None:
    """Return the next message of a socket, or None if none has arrived; the first frame is bytes, the others are writable."""
    return recv_rest(socket, [_recv(socket, _NOBLOCK)]) if has_message(socket) else None


def recv_rest(socket: Any, parts: list[Frame]) -> list[Frame]:
    """Append the remaining frames of a message to those that were already read."""
    while _get(socket, _RCVMORE):
        parts.append(_recv(socket, _NOBLOCK, copy=False).buffer)
    return parts


def has_message(socket: Any) -> bool:
    """Whether a message has arrived; this costs a tenth of a failed attempt to receive, which raises."""
    return bool(_get(socket, _EVENTS) & _POLLIN)
