"""The interface between the program and its transports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.wire.codec import Frame

__all__ = [
    "CONTROLLER",
    "HostTransport",
    "Peer",
    "PeerTransport",
    "Senders",
    "Transport",
    "host_peer",
    "incarnation_of",
    "is_rank",
    "place_of",
    "proc_of",
    "rank_peer",
]

Peer = bytes
"""Name of a process: `CONTROLLER`, ``R<proc>`` or ``R<proc>+<incarnation>`` for a rank, ``H<host>`` for a host agent."""

Senders = Peer | tuple[Peer, ...]
"""The sender of a message, or the senders of equal ones."""

CONTROLLER: Peer = b"C"


def rank_peer(proc: int, incarnation: int = 0) -> Peer:
    """Return the name of a rank's process; ``incarnation`` counts the replacements of processes that died.

    Each incarnation has its own name, so messages to or from one are never mistaken for another's.
    """
    return b"R%d+%d" % (proc, incarnation) if incarnation else b"R%d" % proc


def is_rank(peer: Peer) -> bool:
    """Whether this is the name of a rank's process."""
    return peer.startswith(b"R")


def proc_of(peer: Peer) -> int:
    """Return the number of the rank, or 0 for the controller, which callers address like any other process."""
    if peer == CONTROLLER:
        return 0
    if not is_rank(peer):
        raise ValueError(f"{peer!r} is not the name of a rank")
    return int(peer[1:].partition(b"+")[0])


def place_of(peer: Peer) -> int:
    """Return the number of a rank; 0 for the controller, and for all others, for which no counts are kept."""
    try:
        return proc_of(peer)
    except ValueError:
        return proc_of(CONTROLLER)


def incarnation_of(peer: Peer) -> int:
    """Return how many processes the rank had before this one."""
    return int(peer.partition(b"+")[2] or 0)


def host_peer(host: int) -> Peer:
    """Return the name of a host agent."""
    return b"H%d" % host


class Transport(Protocol):
    """Carries multipart messages to named peers, in order per (sender, receiver).

    One thread at a time may call `send`, `flush`, `recv` and `wait`; any thread may call `wake`.
    """

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Send a message without blocking; returns False if no such peer is connected."""
        ...

    def flush(self) -> None:
        """Send messages that wait to be combined with others."""
        ...

    def recv(self) -> tuple[Senders, list[Frame]] | None:
        """Return the next message and its sender, or None if none has arrived.

        Equal messages of several ranks of another host, which have travelled as one, are returned as one, with all senders.
        """
        ...

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message may have arrived, `wake` was called, or the time is up (None: never)."""
        ...

    def wake(self) -> None:
        """Make the current or the next `wait` return at once."""
        ...

    def close(self) -> None:
        """Release the transport's resources; queued messages are still sent for a short while."""
        ...


class HostTransport(Transport, Protocol):
    """The controller's transport, which also reaches other hosts, and the ranks there through their agents.

    Attributes:
        meters: counts the frames that it sends.
        refused: number of refused connections and messages.
        refused_connections: number of refused connections from clients without the keys.
    """

    meters: Meters

    @property
    def refused(self) -> int:
        """Number of refused connections, and of refused messages between hosts."""
        ...

    @property
    def refused_connections(self) -> int:
        """Number of refused connections from clients without the keys."""
        ...

    def route(self, peer: Peer, host: int) -> None:
        """Set the host of a process that is not connected directly."""
        ...

    def share(self, peer: Peer) -> None:
        """Register a process of this machine that opens frames in shared memory of this one."""
        ...

    def forget(self, peer: Peer) -> None:
        """Release what is kept for a process that has died."""
        ...

    def dial(self, host: int, address: str) -> None:
        """Connect to an agent that can't connect to us."""
        ...

    def active_hosts(self) -> set[int]:
        """Return the hosts that have sent something since the last call."""
        ...

    def give_up(self, host: int) -> None:
        """Drop the messages for a lost host; if it sends anything again, it receives the order to end."""
        ...


class PeerTransport(Transport, Protocol):
    """A rank's transport, which also reaches other ranks: those that it has connected to, and those that have connected to it.

    Attributes:
        meters: counts the frames that it sends.
        shares: whether it opens what other processes of the machine have in shared memory.
    """

    meters: Meters
    shares: bool

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Return the next message and its sender, or None if none has arrived."""
        ...

    @property
    def unsent_nbytes(self) -> int:
        """Size of what waits until the controller or the host agent reads."""
        ...

    def connect(self, peer: Peer, address: str) -> None:
        """Connect to a rank that this one will call; messages to it go that way from now on."""
        ...

    def disconnect(self, peer: Peer) -> None:
        """Close a connection; unsent messages are dropped."""
        ...

    def forget(self, peer: Peer) -> None:
        """Release what is kept for a process that has died."""
        ...
