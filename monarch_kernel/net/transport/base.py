"""The seam between the program and what carries its messages."""

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

CONTROLLER: Peer = b"C"


def rank_peer(proc: int, incarnation: int = 0) -> Peer:
    """Name of a rank's process; ``incarnation`` counts those that were put in place of one that died.

    Each has a name of its own, so nothing that is sent to one, or comes from it, is ever taken for the other's.
    """
    return b"R%d+%d" % (proc, incarnation) if incarnation else b"R%d" % proc


def is_rank(peer: Peer) -> bool:
    """Whether this is the name of a rank's process."""
    return peer.startswith(b"R")


def proc_of(peer: Peer) -> int:
    """Number of the rank, or 0 for the controller, which is a process like others to those who call it."""
    if peer == CONTROLLER:
        return 0
    if not is_rank(peer):
        raise ValueError(f"{peer!r} is not the name of a rank")
    return int(peer[1:].partition(b"+")[0])


def place_of(peer: Peer) -> int:
    """Number of a rank; 0 for the controller, and for all others, of whom no counts are kept."""
    try:
        return proc_of(peer)
    except ValueError:
        return proc_of(CONTROLLER)


def incarnation_of(peer: Peer) -> int:
    """How many processes have had the place of a rank before it."""
    return int(peer.partition(b"+")[2] or 0)


def host_peer(host: int) -> Peer:
    """Name of a host agent."""
    return b"H%d" % host


class Transport(Protocol):
    """Carries multipart messages to named peers, in order per (sender, receiver).

    One thread at a time may call `send`, `flush`, `recv` and `wait`; any thread may call `wake`.
    """

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Hand a message over without blocking; False if no such peer is connected."""
        ...

    def flush(self) -> None:
        """Have what was sent go out, if it waits to be put together with more."""
        ...

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next message and its sender, or None if none has arrived."""
        ...

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message may have arrived, `wake` was called, or the time is up (None: never)."""
        ...

    def wake(self) -> None:
        """Make the current or the next `wait` return at once."""
        ...

    def close(self) -> None:
        """Give up what the transport holds; messages not yet handed over are sent for a short while."""
        ...


class HostTransport(Transport, Protocol):
    """The controller's transport, which also reaches other hosts, and through their agents the ranks there.

    Attributes:
        meters: count the frames that it sends.
        refused: connections and messages that were not let in.
        strangers: of these, the connections of those who have not the keys.
    """

    meters: Meters

    @property
    def refused(self) -> int:
        """Connections, and messages between hosts, that were not let in."""
        ...

    @property
    def strangers(self) -> int:
        """Of these, the connections of those who have not the keys."""
        ...

    def route(self, peer: Peer, host: int) -> None:
        """Say which host a process is on, if it is not connected to us itself."""
        ...

    def share(self, peer: Peer) -> None:
        """Say that a process of this machine opens what is in shared memory here."""
        ...

    def forget(self, peer: Peer) -> None:
        """A process has died."""
        ...

    def dial(self, host: int, address: str) -> None:
        """Connect to an agent that can't connect to us."""
        ...

    def heard(self) -> set[int]:
        """The hosts that were heard of since the last time."""
        ...

    def give_up(self, host: int) -> None:
        """A host is gone: should it be heard of again it is told to end."""
        ...


class PeerTransport(Transport, Protocol):
    """A rank's transport, which also reaches other ranks: those it has connected to, and those that have connected to it.

    Attributes:
        meters: count the frames that it sends.
        shares: whether it opens what other processes of the machine have in shared memory.
    """

    meters: Meters
    shares: bool

    def connect(self, peer: Peer, address: str) -> None:
        """Connect to a rank that is to be asked; what is sent to it goes that way from now on."""
        ...

    def disconnect(self, peer: Peer) -> None:
        """Give up a connection; what has not been sent is dropped."""
        ...

    def forget(self, peer: Peer) -> None:
        """A process has died."""
        ...
