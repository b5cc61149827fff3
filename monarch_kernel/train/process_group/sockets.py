"""The TCP sockets of this process that gloo and torch's stores open: which exist, and how to end what waits on them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = [
    "FILTER",
    "NO_FILTER",
    "SETTLES_WITHIN_S",
    "Socket",
    "close",
    "copy_of",
    "duplicate",
    "has_closed",
    "open_sockets",
    "settle",
    "stand_in",
    "unsent_and_received",
]

FILTER = 26
"""SO_ATTACH_FILTER of Linux; to read, the length and content of the filter."""

NO_FILTER = 27
"""SO_DETACH_FILTER of Linux."""

_STAND_IN_S = 1.0
"""How long a rank tries to connect to its own listener."""

SETTLES_WITHIN_S = 1.0
"""How long messages that are on their way may take to arrive, in seconds."""

_QUIET_S = 0.05
"""How long nothing moves before no message is on its way, in seconds; a thread of gloo may wait for a processor meanwhile."""

_BYTES_RECEIVED = struct.Struct("=128xQ")
"""Of Linux's ``struct tcp_info``, up to ``tcpi_bytes_received``."""


def stand_in(sockets: Iterable[Socket], size: int) -> None:
    """Connect to gloo's listeners in place of each peer, and disconnect, so that code that waits for a peer stops waiting.

    A connection begins with the number of the peer that it is for, in 8 bytes; numbers count from 0.
    """
    for each in sockets:
        if (address := _listens_at(each)) is None:
            continue
        for number in range(size):
            with contextlib.suppress(OSError), socket.create_connection(address[:2], _STAND_IN_S) as connection:
                connection.sendall(struct.pack("=q", number))


def settle(connections: Iterable[socket.socket], at_most_s: float = SETTLES_WITHIN_S) -> None:
    """Wait until nothing has moved on connections for a moment: what waits for a message that is on its way should get it."""
    quiet_since = time.monotonic()
    deadline = quiet_since + at_most_s
    last: list[tuple[int, int]] = []
    connections = list(connections)
    while (now := time.monotonic()) < deadline:
        state = [unsent_and_received(each) for each in connections]
        if state != last or any(unsent for unsent, _ in state):
            last, quiet_since = state, now
        elif now - quiet_since >= _QUIET_S:
            return
        time.sleep(0.005)


def unsent_and_received(connection: socket.socket) -> tuple[int, int]:
    """Bytes that the peer has not acknowledged, and bytes that have arrived so far; zeros if the connection is closed."""
    try:
        (unsent,) = struct.unpack("=i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        (received,) = _BYTES_RECEIVED.unpack(info)
    except (OSError, struct.error):  # the second: an old kernel has no such field
        return 0, 0
    return unsent, received


def close(connections: Sequence[socket.socket]) -> None:
    """Close connections."""
    for connection in connections:
        connection.close()


class Socket(NamedTuple):
    """A socket of this process. The inode identifies it, because the number of a descriptor can be reused."""

    fd: int
    inode: str


def copy_of(of: Socket) -> socket.socket | None:
    """Duplicate a TCP connection; None for other sockets, such as gloo's listener, whose failure ends the process."""
    copy = duplicate(of)
    if copy is None or not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return copy
    copy.close()
    return None


def _listens_at(of: Socket) -> Any:
    """The address of a TCP listener; None for other sockets, and if its port is closed (`close_port`)."""
    copy = duplicate(of)
    if copy is None:
        return None
    with copy:
        listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return copy.getsockname() if listens and not copy.getsockopt(socket.SOL_SOCKET, FILTER) else None


def duplicate(of: Socket) -> socket.socket | None:
    """Duplicate a TCP socket; None for other sockets."""
    try:
        fd = os.dup(of.fd)
    except OSError:  # closed in the meantime
        return None
    try:
        if f"socket:[{os.fstat(fd).st_ino}]" != of.inode:
            raise OSError("closed in the meantime, and the descriptor was reused")
        copy = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return None
    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
        return copy
    copy.close()
    return None


def has_closed(of: Socket) -> bool:
    """Whether a socket has been closed."""
    try:
        return f"socket:[{os.fstat(of.fd).st_ino}]" != of.inode
    except OSError:
        return True


def open_sockets() -> set[Socket]:
    """Return the sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(Socket(int(name), target))
    return found
