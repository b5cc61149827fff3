"""ZeroMQ: the controller binds one ROUTER, every rank and host agent connects a DEALER with its name as identity.

Queues are unbounded on both sides (high-water mark 0): the controller never blocks on a slow rank, and what a rank has not
read is held by the rank's own I/O thread. On one machine the address is ``ipc://`` in a directory of mode 0700.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.backend import Socket as PlainSocket

from monarch_kernel.transport.base import CONTROLLER, Peer
from monarch_kernel.wire.codec import Frame

__all__ = ["ZmqDealer", "ZmqRouter"]

_ZERO_COPY_NBYTES = 64 * 1024
_LINGER_MS = 1000

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


class _ZmqSocket:
    """What both ends share: a socket, and an eventfd that wakes whoever waits on it."""

    yields = 0

    def __init__(self, kind: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._event: _Event | None = _Event()
        self._wake = self._event.fd
        self._items: list[Any] = [(self._socket, _POLLIN), (self._wake, _POLLIN)]

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message may have arrived, `wake` was called, or the time is up."""
        for _ in range(self.yields):
            if _get(self._socket, _EVENTS) & _POLLIN:
                return
            os.sched_yield()
        events: list[Any] = zmq.zmq_poll(
            self._items, -1 if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))
        )
        for source, _ in events:
            if source == self._wake:
                try:
                    os.eventfd_read(self._wake)
                except BlockingIOError:
                    pass

    def wake(self) -> None:
        """Make the current or the next `wait` return at once."""
        event = self._event
        if event is not None:
            os.eventfd_write(event.fd, 1)

    def fileno(self) -> int:
        """A descriptor for an outer poll; edge-triggered, so call `recv` until it gives None before polling."""
        return int(self._socket.getsockopt(zmq.FD))

    def close(self) -> None:
        """Close the socket; what was sent lingers for up to a second."""
        if self._event is not None:
            self._event = None
            self._socket.close()
            self._context.term()

    def _send(self, parts: Sequence[Frame]) -> None:
        socket = self._socket
        for part in parts[:-1]:
            _send(socket, part, _NOBLOCK | _SNDMORE, copy=len(part) < _ZERO_COPY_NBYTES)
        _send(socket, parts[-1], _NOBLOCK, copy=len(parts[-1]) < _ZERO_COPY_NBYTES)

    def _recv_rest(self, parts: list[Frame]) -> list[Frame]:
        socket = self._socket
        while _get(socket, _RCVMORE):
            parts.append(_recv(socket, _NOBLOCK, copy=False).buffer)
        return parts


class ZmqRouter(_ZmqSocket):
    """The controller's end."""

    # Before it sleeps, the one controller lets others run this often: an answer that comes meanwhile needs no wake-up, which
    # takes a third off a small call. Ranks do not, for they may outnumber the cores.
    yields = 60

    def __init__(self, address: str) -> None:
        super().__init__(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Hand a message over without blocking; False if no such peer is connected."""
        try:
            self._send([peer, *parts])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next message and its sender, or None."""
        try:
            peer = _recv(self._socket, _NOBLOCK)
        except zmq.Again:
            return None
        if not _get(self._socket, _RCVMORE):
            return peer, []
        return peer, self._recv_rest([_recv(self._socket, _NOBLOCK)])


class ZmqDealer(_ZmqSocket):
    """The end of a rank or host agent, connected to the controller."""

    def __init__(self, address: str, name: Peer) -> None:
        super().__init__(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, name)
        self._socket.connect(address)

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Hand a message for the controller over without blocking."""
        if peer != CONTROLLER:
            return False
        self._send(parts)
        return True

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next message of the controller, or None."""
        try:
            first = _recv(self._socket, _NOBLOCK)
        except zmq.Again:
            return None
        return CONTROLLER, self._recv_rest([first])
