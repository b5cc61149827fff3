"""The controller's connections to the ranks of its machine: Unix packet sockets, which the waiting thread itself reads.

A ZeroMQ socket has a thread at each of its ends that every message passes. For a small call that is more than half of the work,
and four of six switches between threads. So a rank that lives no longer than the controller connects here (`ZmqRank`). A rank
that another controller may attach to keeps to ZeroMQ, which connects again by itself.

A rank sends its name first. A name belongs to the first connection that claims it. A rank's next process has another name.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence

from monarch_kernel.net.transport.base import Peer, Senders, is_rank
from monarch_kernel.net.transport.shared_frames import resolve
from monarch_kernel.net.transport.unix_packets import PacketListener, Packets, PacketSocket, packets_of
from monarch_kernel.net.wire.codec import Frame, WireError

__all__ = ["RankLines", "path_of_lines"]


def path_of_lines(address: str) -> str:
    """Return where ranks connect to a controller with this address; empty if it is on another machine."""
    return f"{os.path.dirname(address.removeprefix('ipc://'))}/ranks" if address.startswith("ipc://") else ""


class RankLines:
    """The connections of ranks, for the thread that drives the transport.

    `stir` only notes what a descriptor has signalled, and may be interrupted between any two steps. All else must not be.

    Args:
        path: where ranks connect.
        poller: polls the descriptors, beside others.
        arrived: gets the messages, each with its sender.
        is_taken: whether a process of that name has another connection.

    Attributes:
        refused: the number of connections without a separate name, and of those that sent no message of ours.
    """

    def __init__(
        self,
        path: str,
        poller: select.epoll,
        arrived: deque[tuple[Senders, list[Frame]]],
        is_taken: Callable[[Peer], bool],
    ) -> None:
        self.refused = 0
        self._poller = poller
        self._arrived = arrived
        self._is_taken = is_taken
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a controller that was killed
        self._listener = PacketListener(path)
        poller.register(self._listener.fd, select.EPOLLIN)
        self._open: dict[int, PacketSocket] = {}
        self._names: dict[int, Peer] = {}
        self._lines: dict[Peer, PacketSocket] = {}
        self._stirred: dict[int, int] = {}  # what descriptors have signalled
        self._last: Sequence[Frame] | None = None
        self._packets: Packets = ()

    @property
    def is_stirred(self) -> bool:
        """Whether `take` has something to do."""
        return bool(self._stirred)

    def __contains__(self, peer: Peer) -> bool:
        """Whether a rank is connected."""
        return peer in self._lines

    def stir(self, fd: int, events: int) -> bool:
        """Note what a descriptor has signalled; returns whether it is one of these."""
        if fd in self._open or fd == self._listener.fd:
            self._stirred[fd] = events
            return True
        return False

    def take(self) -> None:
        """Do what descriptors have signalled: read a message of each, send what has waited, accept new connections."""
        while self._stirred:
            fd, events = self._stirred.popitem()
            if (line := self._open.get(fd)) is None:
                self._accept()
                continue
            if events & select.EPOLLOUT:
                line.flush()
                if not line.has_unsent:
                    self._poller.modify(fd, select.EPOLLIN)
            if events & ~select.EPOLLOUT:
                self._read(line)

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Send a message without blocking; returns False if that rank is not connected, or no longer."""
        line = self._lines.get(peer)
        if line is None:
            return False
        if self._stirred.get(line.fd, select.EPOLLIN) != select.EPOLLIN:  # it may have closed its end
            self.take()
            if peer not in self._lines:
                return False
        if parts is not self._last:  # a message for several ranks is encoded once
            self._last, self._packets = parts, packets_of(parts)
        line.send_packets(self._packets)
        if line.has_unsent:
            self._poller.modify(line.fd, select.EPOLLIN | select.EPOLLOUT)
        return True

    def sent(self) -> None:
        """Drop the message that was encoded last: no other rank gets it."""
        self._last, self._packets = None, ()

    def close(self, linger_s: float) -> None:
        """Close all connections; what waits is still sent, for at most this time."""
        until = time.monotonic() + linger_s
        for line in self._open.values():
            line.close(max(0.0, until - time.monotonic()))
        for kept in (self._open, self._names, self._lines, self._stirred):
            kept.clear()
        self._listener.close()

    def _accept(self) -> None:
        while (line := self._listener.accept()) is not None:
            line.heads = 1
            self._open[line.fd] = line
            self._poller.register(line.fd, select.EPOLLIN)

    def _read(self, line: PacketSocket) -> None:
        try:
            parts = line.recv()
        except WireError:
            self.refused += 1
            self._drop(line)
            return
        if parts is None:
            if line.is_over:
                self._drop(line)
            return
        name = self._names.get(line.fd)
        if name is not None:
            self._arrived.append((name, resolve(parts, name)))
            return
        claimed = bytes(parts[0]) if len(parts) == 1 else b""
        if is_rank(claimed) and claimed not in self._lines and not self._is_taken(claimed):
            self._names[line.fd] = claimed
            self._lines[claimed] = line
        else:
            self.refused += 1
            self._drop(line)

    def _drop(self, line: PacketSocket) -> None:
        self._poller.unregister(line.fd)
        del self._open[line.fd]
        self._lines.pop(self._names.pop(line.fd, b""), None)
        line.close()
