"""Ports for servers that need a port number, and so cannot choose a port themselves."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

__all__ = ["free_ports"]

_RANGE = range(12_000, 30_000)
"""The range is below the ports that the kernel assigns to connections and to port 0, so none of these is taken meanwhile."""


def free_ports(n: int, host: str = "127.0.0.1") -> list[int]:
    """Find ports of this machine on which no process listens."""
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
