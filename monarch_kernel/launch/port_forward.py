"""Forwards a local port to another machine over connections that the caller makes."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from monarch_kernel.base.peer_users import is_trusted, user_of_peer

__all__ = ["Connection", "Tunnel"]


_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.05
_LEAVE_S = 5.0
"""A connection whose local peer has left is over within this time."""


class Connection(Protocol):
    """A connection with the methods of a socket."""

    def recv(self, nbytes: int, /) -> bytes: ...

    def sendall(self, data: bytes, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class Tunnel:
    """Listens on the loopback interface, and joins each connection of this user with a new one to the remote end.

    Args:
        connect: makes a connection to the remote end; raises an OSError if it can't.
        name: the name of the threads.
        only_one: close a connection that comes while the local peer of another one is there.

    Attributes:
        address: the local address.
    """

    def __init__(self, connect: Callable[[], Connection], name: str, *, only_one: bool = False) -> None:
        self._connect = connect
        self._name = name
        self._only_one = only_one
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._open: list[Connection] = []
        self._peers: list[socket.socket] = []
        self._is_closed = False
        self._threads = [threading.Thread(target=self._accept, name=name, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._is_closed = True
            for connection in (self._listener, *self._open):
                _end(connection)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    here, _ = self._listener.accept()
                except OSError as error:
                    if error.errno in _NO_ROOM and not self._is_closed:
                        time.sleep(_PAUSE_S)
                        continue
                    return
                uid = user_of_peer(here)
                if uid is None or not is_trusted(uid):  # each connection costs two threads, and one to the remote end
                    here.close()
                    continue
                if self._only_one and self._is_taken():
                    here.close()
                    continue
                here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    there = self._connect()
                except OSError:  # the local peer tries again
                    here.close()
                    continue
                self._join(here, there)

    def _is_taken(self) -> bool:
        """Whether the local peer of a connection is there; wait for the end of a connection whose local peer has left.

        A peer may leave and come again at once, before the thread that reads from it has noticed.
        """
        with self._lock:
            if not all(map(_has_left, self._peers)):
                return True
            return not self._ended.wait_for(lambda: not self._peers, _LEAVE_S)

    def _join(self, here: socket.socket, there: Connection) -> None:
        ways: list[int] = [2]  # the number of open directions
        pumps = [
            threading.Thread(target=self._pump, args=(*pair, ways), name=self._name, daemon=True)
            for pair in ((here, there), (there, here))
        ]
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()] + pumps
            self._open += (here, there)
            self._peers.append(here)
            for pump in pumps:
                pump.start()
            if self._is_closed:
                _end(here)
                _end(there)

    def _pump(self, source: Connection, sink: Connection, ways: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        _end(source)
        _end(sink)
        with self._lock:
            ways[0] -= 1
            if not ways[0]:  # both directions have ended
                for connection in (source, sink):
                    connection.close()
                    self._open.remove(connection)
                self._peers = [peer for peer in self._peers if peer not in (source, sink)]
                self._ended.notify_all()


def _has_left(peer: socket.socket) -> bool:
    """Whether the other end of a socket has closed it, even if data that it sent before are still to be read."""
    poll = select.poll()
    poll.register(peer, select.POLLRDHUP)
    return bool(poll.poll(0))


def _end(connection: Connection | socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
