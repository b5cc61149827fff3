"""State of a TCP connection in the Linux kernel, which ZeroMQ does not report: whether anything still gets through.

After a loss, TCP doubles the time before each further attempt. So a connection whose network was down for half a second may
stall for another second, although the network is back.
"""

from __future__ import annotations

import socket
import struct

__all__ = ["hang_up", "is_stuck", "nbytes_received", "round_trip_s"]

_STUCK_AFTER_MS = 250
_INFO = struct.Struct("=2x B x B 3x 4x4x4x4x I 4x4x4x4x4x4x4x I 4x4x I")
"""Fields of ``struct tcp_info``: retransmits, backoff, unacked, last_ack_recv, rtt."""

_RECEIVED = struct.Struct("=128x Q")
"""Field of the same: bytes_received."""


def is_stuck(fd: int) -> bool:
    """Whether sent data is unacknowledged after a retransmission, and nothing was received for a while.

    The other machine's kernel acknowledges data even for a process that is stopped, so the cause is the network.
    """
    retransmits, backoff, unacked, quiet_ms, _ = _info(fd)
    return bool((retransmits or backoff) and unacked and quiet_ms >= _STUCK_AFTER_MS)


def round_trip_s(fd: int) -> float:
    """Return the round-trip time of a packet; 0.0 if unknown."""
    return _info(fd)[4] / 1e6


def _info(fd: int) -> tuple[int, ...]:
    try:  # ZeroMQ may have just closed it, and the number belong to another file: then nothing is known
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
    """Return the bytes received on a connection to this port; -1 if the descriptor is not, or no longer, one."""
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
    """Shut down a connection to this port, as its peer would; the owner keeps the descriptor, and sees the end."""
    try:
        link = socket.socket(fileno=fd)
        try:
            if link.getsockname()[1] == port:
                link.shutdown(socket.SHUT_RDWR)
        finally:
            link.detach()
    except (OSError, IndexError, TypeError):  # it has closed, or the number belongs to something else
        pass
