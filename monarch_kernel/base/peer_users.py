"""Finds which user is at the other end of a connection within this machine.

All users can connect to a port of the loopback interface, and to a Unix socket without a path. So a process that gives away
secrets, or runs what it is sent, must know the user at the other end before it reads or writes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

__all__ = ["is_trusted", "user_of_peer"]

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MAPPED = "".join(f"{word:08X}" for word in struct.unpack("=3I", b"\0" * 10 + b"\xff\xff"))
"""What precedes an address of IPv4 in the table of IPv6."""


def is_trusted(uid: int) -> bool:
    """Whether a user can already do everything that this process can."""
    return uid in (0, os.geteuid())


def user_of_peer(connection: socket.socket) -> int | None:
    """Return the user id of the other end of a connection to a Unix socket, or over IPv4 within this machine.

    None if no process has accepted the connection yet, or if that end is closed.
    """
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[1])
    with contextlib.suppress(OSError, ValueError, IndexError):
        there, here = (_in_table(*name) for name in (connection.getpeername(), connection.getsockname()))
        for table, prefix in (
            ("tcp", ""),
            ("tcp6", _MAPPED),
        ):  # the other end may be a socket for IPv6, as those of ZeroMQ
            with open(f"/proc/self/net/{table}", encoding="ascii") as lines:
                for fields in map(str.split, lines):
                    if fields[1:3] == [prefix + there, prefix + here] and fields[9] != "0":  # 0: it has no process
                        return int(fields[7])
    return None


def _in_table(address: str, port: int) -> str:
    """An address in the form of ``/proc/net/tcp``."""
    (number,) = struct.unpack("=I", socket.inet_aton(address))
    return f"{number:08X}:{port:04X}"
