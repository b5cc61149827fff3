"""A transport within one process: deterministic, with faults on request; for tests of this package and of users."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.transport.base import CONTROLLER, Peer, place_of
from monarch_kernel.net.wire.codec import Frame

__all__ = ["MemoryHub", "MemoryTransport"]


class MemoryHub:
    """Connects memory transports, and decides which message is delivered next.

    By default messages are delivered at once. With ``manual=True`` each link (sender, receiver) is a queue, and a test
    delivers its messages one by one, in any order among links, but in order within each.
    """

    def __init__(self, *, manual: bool = False) -> None:
        self._manual = manual
        self._ends: dict[Peer, MemoryTransport] = {}
        self._links: dict[tuple[Peer, Peer], deque[list[Frame]]] = {}
        self._cut: set[Peer] = set()
        self._lock = threading.Lock()

    def connect(self, name: Peer = CONTROLLER) -> MemoryTransport:
        """Make the transport of a peer; a second one with the same name replaces it."""
        end = self._ends[name] = MemoryTransport(self, name)
        self._cut.discard(name)
        return end

    def leave(self, name: Peer, end: MemoryTransport) -> None:
        """Remove the transport of a peer, unless another has replaced it."""
        with self._lock:
            if self._ends.get(name) is end:
                del self._ends[name]

    def cut(self, name: Peer) -> None:
        """Disconnect a peer: messages in transit to and from it are dropped, and so are later ones."""
        with self._lock:
            self._cut.add(name)
            for link in [link for link in self._links if name in link]:
                del self._links[link]

    @property
    def waiting(self) -> list[tuple[Peer, Peer]]:
        """Links (sender, receiver) that hold a message, sorted."""
        with self._lock:
            return sorted(link for link, queue in self._links.items() if queue)

    def deliver(self, sender: Peer, receiver: Peer) -> None:
        """Hand over the oldest message of a link."""
        with self._lock:
            parts = self._links[sender, receiver].popleft()
            end = self._ends.get(receiver)
        if end is not None:  # otherwise it has left
            end.arrive(sender, parts)

    def drop(self, sender: Peer, receiver: Peer) -> None:
        """Lose the oldest message of a link."""
        with self._lock:
            self._links[sender, receiver].popleft()

    def carry(self, sender: Peer, receiver: Peer, parts: Sequence[Frame]) -> bool:
        """Take a message from a transport."""
        end = self._ends.get(receiver)
        if end is None or receiver in self._cut or sender in self._cut:
            return False
        # Like those of ZeroMQ: the header as bytes, and frames that the receiver may write to.
        copies: list[Frame] = [memoryview(bytearray(part)) if i else bytes(part) for i, part in enumerate(parts)]
        if self._manual:
            with self._lock:
                self._links.setdefault((sender, receiver), deque()).append(copies)
        else:
            end.arrive(sender, copies)
        return True


class MemoryTransport:
    """The transport of one peer of a hub."""

    def __init__(self, hub: MemoryHub, name: Peer) -> None:
        self.closed = False
        self.meters = Meters(place_of(name))
        self.shares = False
        self.unsent_nbytes = 0
        self._hub = hub
        self._name = name
        self._arrived: deque[tuple[Peer, list[Frame]]] = deque()
        self._active: set[int] = set()
        # Released when there is something to read; unlike an Event, a KeyboardInterrupt cannot leave it half set.
        self._signal = threading.Lock()
        self._signal.acquire()

    def arrive(self, sender: Peer, parts: list[Frame]) -> None:
        """Receive a message; called by the hub."""
        if sender.startswith(b"H"):
            self._active.add(int(sender[1:]))
        self._arrived.append((sender, parts))
        self.wake()

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Send a message; returns False if no such peer is connected."""
        is_sent = self._hub.carry(self._name, peer, parts)
        if is_sent and len(parts) > 1:
            self.meters.sent(place_of(peer), parts, parts)
        return is_sent

    def flush(self) -> None:
        """Do nothing: messages are sent at once."""

    @property
    def refused(self) -> int:
        """Return 0: the hub refuses no peer."""
        return 0

    @property
    def refused_connections(self) -> int:
        """Return 0: no client can connect."""
        return 0

    def route(self, peer: Peer, host: int) -> None:
        """Do nothing: all peers of the hub reach each other."""

    def dial(self, host: int, address: str) -> None:
        """Do nothing: all peers of the hub reach each other."""

    def share(self, peer: Peer) -> None:
        """Do nothing: frames are copied."""

    def forget(self, peer: Peer) -> None:
        """Do nothing: frames are copied."""

    def active_hosts(self) -> set[int]:
        """Return the hosts that have sent something since the last call."""
        active, self._active = self._active, set()
        return active

    def give_up(self, host: int) -> None:
        """Do nothing: the test decides what happens then."""

    def connect(self, peer: Peer, address: str) -> None:
        """Do nothing: all peers of the hub reach each other."""

    def disconnect(self, peer: Peer) -> None:
        """Do nothing: a peer that has left can't be reached."""

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Return the next message and its sender, or None."""
        return self._arrived.popleft() if self._arrived else None

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message has arrived, `wake` was called, or the time is up; at once if there is an unread message."""
        if self._arrived:
            self._signal.acquire(blocking=False)
        else:
            self._signal.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))

    def wake(self) -> None:
        """Make the current or the next `wait` return at once."""
        try:
            self._signal.release()
        except RuntimeError:
            pass  # released already

    def close(self) -> None:
        """Leave the hub; `send` to this peer returns False from now on."""
        self.closed = True
        self._hub.leave(self._name, self)
        self.wake()
