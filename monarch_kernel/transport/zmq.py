"""ZeroMQ: the controller binds one ROUTER, every rank and host agent connects a DEALER with its name as identity.

Ranks bind a ROUTER, too. One that asks another connects a DEALER to it, whose requests and their answers stay on that link.

Queues are unbounded on both sides (high-water mark 0): the controller never blocks on a slow rank, and what a rank has not
read is held by the rank's own I/O thread. On one machine the address is ``ipc://`` in a directory of mode 0700.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.backend import Socket as PlainSocket

from monarch_kernel.transport.base import CONTROLLER, Peer
from monarch_kernel.wire.codec import Frame

__all__ = ["ZmqDealer", "ZmqRank", "ZmqRouter"]

_ZERO_COPY_NBYTES = 64 * 1024
_LINGER_MS = 1000
_LOOK_EVERY = 16
"""After so many messages it is looked who else has sent something, so that no flood holds up what others send."""

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
                self._forget_wake()

    def _forget_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

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
        _send_all(self._socket, parts)


def _send_all(socket: Any, parts: Sequence[Frame]) -> None:
    for part in parts[:-1]:
        _send(socket, part, _NOBLOCK | _SNDMORE, copy=len(part) < _ZERO_COPY_NBYTES)
    _send(socket, parts[-1], _NOBLOCK, copy=len(parts[-1]) < _ZERO_COPY_NBYTES)


def _recv_rest(socket: Any, parts: list[Frame]) -> list[Frame]:
    while _get(socket, _RCVMORE):
        parts.append(_recv(socket, _NOBLOCK, copy=False).buffer)
    return parts


class ZmqRouter(_ZmqSocket):
    """The controller's end; what it sends to itself it receives next."""

    # Before it sleeps, the one controller lets others run this often: an answer that comes meanwhile needs no wake-up, which
    # takes a third off a small call. Ranks do not, for they may outnumber the cores.
    yields = 60

    def __init__(self, address: str) -> None:
        super().__init__(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self._to_myself: deque[list[Frame]] = deque()

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message may have arrived, `wake` was called, or the time is up."""
        if not self._to_myself:
            super().wait(timeout_s)

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Hand a message over without blocking; False if no such peer is connected."""
        if peer == CONTROLLER:
            self._to_myself.append(_as_received(parts))
            return True
        try:
            self._send([peer, *parts])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next message and its sender, or None."""
        if self._to_myself:
            return CONTROLLER, self._to_myself.popleft()
        try:
            peer = _recv(self._socket, _NOBLOCK)
        except zmq.Again:
            return None
        if not _get(self._socket, _RCVMORE):
            return peer, []
        return peer, _recv_rest(self._socket, [_recv(self._socket, _NOBLOCK)])


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
        return CONTROLLER, _recv_rest(self._socket, [first])


class ZmqRank(ZmqDealer):
    """The end of a rank: connected to the controller, to the ranks that it asks, and to those that ask it.

    Args:
        address: of the controller.
        name: of the rank on the wire.
        own_address: where the rank listens.
    """

    def __init__(self, address: str, name: Peer, own_address: str) -> None:
        super().__init__(address, name)
        self._name = name
        self._askers = self._context.socket(zmq.ROUTER)
        self._askers.set_hwm(0)
        self._askers.setsockopt(zmq.LINGER, _LINGER_MS)
        self._askers.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._askers.bind(own_address)
        if own_address.startswith("ipc://"):
            os.chmod(own_address.removeprefix("ipc://"), 0o600)
        self._items.append((self._askers, _POLLIN))
        self._asked: dict[Peer, zmq.Socket[bytes]] = {}
        self._names: dict[Any, Peer] = {self._socket: CONTROLLER}
        self._ready: deque[Any] = deque()
        self._to_myself: deque[list[Frame]] = deque()
        self._received = 0

    def connect(self, peer: Peer, address: str) -> None:
        """Connect to a rank that is to be asked; what is sent to it goes that way from now on."""
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.ROUTING_ID, self._name)
        socket.connect(address)
        self._asked[peer] = socket
        self._names[socket] = peer
        self._items.append((socket, _POLLIN))

    def disconnect(self, peer: Peer) -> None:
        """Give up a connection; what has not been sent is dropped."""
        socket = self._asked.pop(peer, None)
        if socket is not None:
            del self._names[socket]
            self._items.remove((socket, _POLLIN))
            if socket in self._ready:
                self._ready.remove(socket)
            socket.close(linger=0)

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message may have arrived, `wake` was called, or the time is up."""
        if not self._to_myself and not self._ready:
            self._poll(-1 if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999)))

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Hand a message over without blocking; False if no such peer is connected."""
        if peer == CONTROLLER:
            self._send(parts)
        elif peer == self._name:
            self._to_myself.append(_as_received(parts))
        elif (socket := self._asked.get(peer)) is not None:
            _send_all(socket, parts)
        else:
            try:
                _send_all(self._askers, [peer, *parts])
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    return False
                raise
        return True

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next message and its sender, or None; each connection in its turn."""
        if self._to_myself:  # before what others may send because of it
            return self._name, self._to_myself.popleft()
        self._received += 1
        if not self._ready or not self._received % _LOOK_EVERY:
            self._poll(0)
        while self._ready:
            socket = self._ready[0]
            try:
                first = _recv(socket, _NOBLOCK)
            except zmq.Again:
                self._ready.popleft()
                continue
            if socket is not self._askers:
                received = self._names[socket], _recv_rest(socket, [first])
            elif not _get(socket, _RCVMORE):
                received = first, []
            else:
                received = first, _recv_rest(socket, [_recv(socket, _NOBLOCK)])
            self._ready.popleft()
            if _get(socket, _EVENTS) & _POLLIN:  # to look costs less than to find nothing
                self._ready.append(socket)
            return received
        return None

    def close(self) -> None:
        """Close all connections; what was sent lingers for up to a second."""
        if self._event is not None:
            for peer in list(self._asked):
                self._asked.pop(peer).close()
            self._askers.close()
            super().close()

    def _poll(self, timeout_ms: int) -> None:
        events: list[Any] = zmq.zmq_poll(self._items, timeout_ms)
        for source, _ in events:
            if source == self._wake:
                self._forget_wake()
            elif source not in self._ready:
                self._ready.append(source)


def _as_received(parts: Sequence[Frame]) -> list[Frame]:
    """Copies, as if the message had come from elsewhere: the receiver may write to its frames."""
    return [memoryview(bytearray(part)) if i else bytes(part) for i, part in enumerate(parts)]
