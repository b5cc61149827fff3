"""Ports for servers that take a number only, and so cannot choose one themselves."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

__all__ = ["free_ports"]

_RANGE = range(12_000, 30_000)
"""Below the ports that the kernel gives to connections, and to sockets that ask for any: none of these is taken meanwhile."""


def free_ports(n: int, host: str = "127.0.0.1") -> list[int]:
    """Ports of this machine on which nothing listens."""
    ports: list[int] = []
    with ExitStack() as probes:
        while len(ports) < n:
            port = random.SystemRandom().choice(_RANGE)
            try:
                probes.enter_context(socket.create_server((host, port)))
            except OSError:
                continue
            ports.append(port)
    return ports
