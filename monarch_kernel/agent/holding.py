"""Connections between ranks that the host agent keeps open for a while when one of their ends dies.

When a process dies, the Linux kernel closes its connections, and what others write to them fails from then on. Gloo does not
stand that: it takes a send from its list, writes, and if that fails forgets it, so that whoever waits for it waits for ever.
So the agent has a copy of each connection's descriptor (``SCM_RIGHTS``). A rank that dies then looks to its peers like one
that is silent; they are told of the death, and end what they wait for themselves, by other means (`RankGroup.abort`).
After `HOLD_S` at the latest they see that the connection is closed.

Each set of connections has a connection of its own to the agent, and is held as long as that stands.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from monarch_kernel.transport.strangers import free_descriptors

__all__ = ["HOLD_S", "Hold", "Keeper"]

HOLD_S = 1.0
"""How long connections of a rank that has died stay open; far longer than it takes to tell the others."""

_SUFFIX = ".fds"
_MOST_AT_ONCE = 250  # the kernel's limit is 253
_SPARE_DESCRIPTORS = 64
"""What is left to the agent for other things; connections for which there is no room are not held."""

_TIMEOUT_S = 1.0
_RELEASE = b"release"


class Hold:
    """A rank's end: connections of its own that stay open when it dies, until it lets go of them.

    Where the agent can't be reached they are not held, and nothing is said: it is needed when the rank dies alone.

    Args:
        agent: path of the host agent's socket for messages, beside which the one for connections is.
        fds: descriptors of the connections.
    """

    def __init__(self, agent: str, fds: Sequence[int]) -> None:
        self._agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._agent.settimeout(_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._agent.connect(agent + _SUFFIX)
            for at in range(0, len(fds), _MOST_AT_ONCE):
                some = fds[at : at + _MOST_AT_ONCE]
                socket.send_fds(self._agent, [len(some).to_bytes(2, "big")], some)

    def release(self) -> None:
        """Let go of them: those that are closed here are closed."""
        with contextlib.suppress(OSError):
            self._agent.send(_RELEASE)
        self._agent.close()


class Keeper:
    """The agent's end.

    Args:
        agent: path of the host agent's socket for messages; only its user may look into that directory.
        selector: that calls what is registered with a socket when that can be read.
    """

    def __init__(self, agent: str, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._held: dict[socket.socket, list[int]] = {}
        self._dead: list[tuple[float, list[int]]] = []  # when to close them; the next ones first
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        path = Path(agent + _SUFFIX)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(1024)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def due(self) -> float | None:
        """When `close_due` has to be called next, as `time.monotonic` tells time; None if not for what has happened so far."""
        return self._dead[0][0] if self._dead else None

    def close_due(self, now: float) -> None:
        """Close what was held long enough."""
        while self._dead and now >= self._dead[0][0]:
            _, fds = self._dead.pop(0)
            _close(fds)

    def _accept(self) -> None:
        try:
            rank, _ = self._listener.accept()
        except OSError:  # it has gone, or we have no descriptors left
            return
        if free_descriptors() < _SPARE_DESCRIPTORS:
            rank.close()
            return
        rank.setblocking(False)
        self._held[rank] = []
        self._selector.register(rank, selectors.EVENT_READ, partial(self._hear, rank))

    def _hear(self, rank: socket.socket) -> None:
        try:
            # Those that are not taken, the kernel closes.
            room = max(0, min(_MOST_AT_ONCE, free_descriptors() - _SPARE_DESCRIPTORS))
            said, fds, _, _ = socket.recv_fds(rank, len(_RELEASE), room)
        except BlockingIOError:
            return
        except OSError:
            said, fds = b"", []
        self._held[rank] += fds
        if said and said != _RELEASE:
            return
        self._selector.unregister(rank)
        rank.close()
        held = self._held.pop(rank)
        if said:
            _close(held)
        else:
            self._dead.append((time.monotonic() + HOLD_S, held))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
