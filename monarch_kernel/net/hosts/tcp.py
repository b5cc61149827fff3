"""What the Linux kernel knows of a TCP connection, which ZeroMQ does not tell: whether anything still gets through.

After a loss TCP waits twice as long each time before it tries again. So a connection whose network was gone for half a second
may stand still for one more, though the network is back.
"""

from __future__ import annotations

import socket
import struct

__all__ = ["hang_up", "is_stuck", "nbytes_received", "round_trip_s"]

_STUCK_AFTER_MS = 250
_INFO = struct.Struct("=2x B x B 3x 4x4x4x4x I 4x4x4x4x4x4x4x I 4x4x I")
"""Of ``struct tcp_info``: retransmits, backoff, unacked, last_ack_recv, rtt."""

_RECEIVED = struct.Struct("=128x Q")
"""Of the same: bytes_received."""


def is_stuck(fd: int) -> bool:
    """Whether what was sent is not acknowledged, was sent again in vain, and nothing was heard for a while.

    The other machine's kernel acknowledges, also for a process that stands still; so it is the network.
    """
    retransmits, backoff, unacked, quiet_ms, _ = _info(fd)
    return bool((retransmits or backoff) and unacked and quiet_ms >= _STUCK_AFTER_MS)


def round_trip_s(fd: int) -> float:
    """How long a packet takes there and back; 0.0 if that is not known."""
    return _info(fd)[4] / 1e6


def _info(fd: int) -> tuple[int, ...]:
    try:  # ZeroMQ may have closed it a moment ago, and the number be another file's: then it says nothing
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
        try:
            info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        finally:
            link.detach()
        found: tuple[int, ...] = _INFO.unpack(info)
    except (OSError, struct.error):
        return 0, 0, 0, 0, 0
    return found


def nbytes_received(fd: int, port: int) -> int:
    """How much has come on a connection to a port of ours; -1 if the descriptor is of none, or of something else by now."""
    try:
        link = socket.socket(fileno=fd)
        try:
            if link.getsockname()[1] != port:
                return -1
            info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        finally:
            link.detach()
        (nbytes,) = _RECEIVED.unpack(info)
    except (OSError, IndexError, TypeError, struct.error):
        return -1
    return int(nbytes)


def hang_up(fd: int, port: int) -> None:
    """End a connection to a port of ours, as its peer would: whoever has the descriptor, which stays his, sees its end."""
    try:
        link = socket.socket(fileno=fd)
        try:
            if link.getsockname()[1] == port:
                link.shutdown(socket.SHUT_RDWR)
        finally:
            link.detach()
    except (OSError, IndexError, TypeError):  # it has ended, or is something else by now
        pass
