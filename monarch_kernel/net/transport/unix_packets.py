"""Connections within a host, between its agent and a rank: multipart messages over Unix packet sockets.

ZeroMQ would work, but each of its ends has a thread that every message passes: two more wake-ups on the way to a rank, and two
on the way back, which is most of the cost of a small call where many ranks share a core. Here the waiting thread itself reads.

A message is a head (its length, and those of its frames) and the frames. A short message is one packet. A long one is cut into
several, and read directly into its final buffer, where each of its frames starts at a multiple of `_ALIGN_NBYTES`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence

from monarch_kernel.net.wire.codec import Frame, WireError

__all__ = ["PacketListener", "PacketSocket", "Packets", "packets_of"]

PACKET_NBYTES = 64 * 1024
FLUSHED_AT_ONCE = 64
"""Number of packets; a peer that reads while we write could keep us here for as long as a large message takes."""

MAX_BUFFERS = 512
"""Number of buffers in one packet; Linux accepts up to 1,024."""

SMALL_NBYTES = 4096
"""A message that is not longer is copied once before it is sent."""

_ALIGN_NBYTES = 16
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_HEAD = struct.Struct("=QI?")  # total length, number of frames, whether it is cut

Packets = Sequence[Sequence[Frame]]
"""An encoded message: the buffers of each packet."""


class PacketSocket:
    """One end of a connection; its queue is unbounded.

    Attributes:
        fd: its descriptor, for polling.
        is_over: whether the other end has closed it, and everything is read.
        heads: how many frames of a message `recv` returns as bytes; the others are writable.
        unsent_nbytes: the size of what waits until the other end has read.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.fd = sock.fileno()
        self.is_over = False
        self.heads = 2
        self.unsent_nbytes = 0
        self._was_reset = False
        self._unsent: deque[Sequence[Frame]] = deque()
        self._long = bytearray()  # a cut message, and the number of its bytes that have arrived
        self._come = 0

    @classmethod
    def connect(cls, path: str) -> PacketSocket:
        """Connect to a listener.

        Raises:
            OSError: there is no listener.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            raise
        return cls(sock)

    @property
    def has_unsent(self) -> bool:
        """Whether packets wait until the other end has read; call `flush` when the descriptor is writable."""
        return bool(self._unsent)

    def send(self, parts: Sequence[Frame]) -> None:
        """Send a message without blocking; its frames must not change from now on."""
        self.send_packets(packets_of(parts))

    def send_packets(self, packets: Packets) -> None:
        """Send an encoded message, which may have several receivers."""
        if not self._unsent and self._send(packets[0]):
            packets = packets[1:]
        if packets:
            self._unsent.extend(packets)
            self.unsent_nbytes += sum(_nbytes(packet) for packet in packets)
            self.flush()

    def flush(self) -> None:
        """Send as many waiting packets as possible, but no more than `FLUSHED_AT_ONCE`."""
        unsent = self._unsent
        for _ in range(FLUSHED_AT_ONCE):
            if not unsent or not self._send(unsent[0]):
                return
            self.unsent_nbytes -= _nbytes(unsent.popleft())

    def recv(self) -> list[Frame] | None:
        """Read a packet, if any, and return the message that it completes: `heads` frames as bytes, the others writable.

        Raises:
            WireError: it is not a valid packet.
        """
        try:
            if not self._long:
                return self._begin(self._socket.recv(PACKET_NBYTES, _FLAGS))
            nbytes = self._socket.recv_into(memoryview(self._long)[self._come :], 0, _FLAGS)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionError:
            if not self._was_reset:  # it was closed with messages unread; what it has sent follows
                self._was_reset = True
                return None
            nbytes = 0
        except (struct.error, MemoryError, OverflowError) as error:
            raise WireError(f"not a packet: {error}") from None
        self.is_over = not nbytes  # perhaps in the middle of a message, which is lost then
        return self._go_on(nbytes) if nbytes else None

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection after at most ``linger_s``; messages unsent by then are lost."""
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        while self._unsent and poller.poll(1e3 * linger_s):
            self.flush()
        self._unsent.clear()
        self.unsent_nbytes = 0
        self._socket.close()

    def _send(self, packet: Sequence[Frame]) -> bool:
        """Send a packet; returns whether it was sent, or never can be."""
        try:
            if len(packet) == 1:
                self._socket.send(packet[0], _FLAGS)
            else:
                self._socket.sendmsg(packet, (), _FLAGS)
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:  # the other end is gone, as recv() will report
            pass
        return True

    def _begin(self, packet: bytes) -> list[Frame] | None:
        if not packet:
            self.is_over = True
            return None
        total, count, is_cut = _HEAD.unpack_from(packet)
        if is_cut:
            self._long = bytearray(total)
            self._long[: len(packet)] = packet
            return self._go_on(len(packet))
        begin = _HEAD.size + 8 * count
        parts: list[Frame] = []
        for nbytes in struct.unpack_from(f"={count}Q", packet, _HEAD.size):
            part = packet[begin : begin + nbytes]
            parts.append(part if len(parts) < self.heads else memoryview(bytearray(part)))
            begin += nbytes
        return parts

    def _go_on(self, nbytes: int) -> list[Frame] | None:
        self._come += nbytes
        if self._come < len(self._long):
            return None
        view = memoryview(self._long)
        self._long, self._come = bytearray(), 0
        _, count, _ = _HEAD.unpack_from(view)
        begin = _HEAD.size + 8 * count
        parts: list[Frame] = []
        for nbytes in struct.unpack_from(f"={count}Q", view, _HEAD.size):
            begin += -begin % _ALIGN_NBYTES
            part = view[begin : begin + nbytes]
            parts.append(bytes(part) if len(parts) < self.heads else part)
            begin += nbytes
        return parts


_PAUSE_S = 0.02


def _nbytes(packet: Sequence[Frame]) -> int:
    return sum(map(len, packet))


class PacketListener:
    """Where the ranks of a host connect; only processes that may enter the directory can.

    Attributes:
        fd: its descriptor, for polling.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._path = path
        self._socket.bind(path)
        os.chmod(path, 0o600)
        self._socket.listen(4096)  # the system's limit applies
        self._socket.setblocking(False)
        self.fd = self._socket.fileno()

    def accept(self) -> PacketSocket | None:
        """Return a new connection, if there is one."""
        try:
            return PacketSocket(self._socket.accept()[0])
        except (BlockingIOError, InterruptedError, ConnectionError):
            return None
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            time.sleep(_PAUSE_S)  # the connection waits until a descriptor is free; the caller will ask again at once
            return None

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):  # the whole directory may have been removed
            os.unlink(self._path)


def packets_of(parts: Sequence[Frame]) -> Packets:
    """Encode a message as packets."""
    lengths = [len(part) for part in parts]
    count = len(lengths)
    table = struct.pack(f"={count}Q", *lengths)
    total = _HEAD.size + len(table) + sum(lengths)
    if total <= SMALL_NBYTES:
        return [[b"".join([_HEAD.pack(total, count, False), table, *parts])]]
    if total <= PACKET_NBYTES and count < MAX_BUFFERS:
        return [[_HEAD.pack(total, count, False), table, *parts]]
    return list(_cut(table, parts))


def _cut(table: bytes, parts: Sequence[Frame]) -> Iterator[Sequence[Frame]]:
    """Cut a long message into packets."""
    pieces: list[Frame] = [table]
    end = _HEAD.size + len(table)
    for part in parts:
        gap = -end % _ALIGN_NBYTES
        pieces += [bytes(gap), part]
        end += gap + len(part)
    packet: list[Frame] = [_HEAD.pack(end, len(parts), True)]
    room = PACKET_NBYTES - _HEAD.size
    for piece in pieces:
        view = memoryview(piece)
        while view:
            if not room or len(packet) == MAX_BUFFERS:
                yield packet
                packet, room = [], PACKET_NBYTES
            packet.append(view[:room])
            view = view[room:]
            room -= len(packet[-1])
    yield packet
