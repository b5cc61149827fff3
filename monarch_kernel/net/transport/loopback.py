"""The same as ZeroMQ within one process, deterministic, with faults on request: for tests, ours and users'."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.transport.base import CONTROLLER, Peer, place_of
from monarch_kernel.net.wire.codec import Frame

__all__ = ["MemoryHub", "MemoryTransport"]


class MemoryHub:
    """Where memory transports meet; decides which message is delivered next.

    By default messages are delivered at once. With ``manual=True`` each link (sender, receiver) is a queue, and a test
    delivers from it one by one, in any order among links, never within one.
    """

    def __init__(self, *, manual: bool = False) -> None:
        self._manual = manual
        self._ends: dict[Peer, MemoryTransport] = {}
        self._links: dict[tuple[Peer, Peer], deque[list[Frame]]] = {}
        self._cut: set[Peer] = set()
        self._lock = threading.Lock()

    def connect(self, name: Peer = CONTROLLER) -> MemoryTransport:
        """Make the end of a peer; a second one with the same name takes its place."""
        end = self._ends[name] = MemoryTransport(self, name)
        self._cut.discard(name)
        return end

    def leave(self, name: Peer, end: MemoryTransport) -> None:
        """Forget the end of a peer, unless another has taken its place."""
        with self._lock:
            if self._ends.get(name) is end:
                del self._ends[name]

    def cut(self, name: Peer) -> None:
        """Lose a peer: what is under way to and from it is dropped, and so is what comes later."""
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
        if end is not None:  # else it has left meanwhile
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
        # As they come from ZeroMQ: the header as bytes, and frames that the receiver may write to.
        copies: list[Frame] = [memoryview(bytearray(part)) if i else bytes(part) for i, part in enumerate(parts)]
        if self._manual:
            with self._lock:
                self._links.setdefault((sender, receiver), deque()).append(copies)
        else:
            end.arrive(sender, copies)
        return True


class MemoryTransport:
    """One peer's end of a hub."""

    def __init__(self, hub: MemoryHub, name: Peer) -> None:
        self.closed = False
        self.meters = Meters(place_of(name))
        self.shares = False
        self._hub = hub
        self._name = name
        self._arrived: deque[tuple[Peer, list[Frame]]] = deque()
        self._heard: set[int] = set()
        # Released when there is something to look at; unlike an Event, a KeyboardInterrupt cannot leave it half set.
        self._signal = threading.Lock()
        self._signal.acquire()

    def arrive(self, sender: Peer, parts: list[Frame]) -> None:
        """Called by the hub."""
        if sender.startswith(b"H"):
            self._heard.add(int(sender[1:]))
        self._arrived.append((sender, parts))
        self.wake()

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Hand a message over; False if no such peer is connected."""
        is_sent = self._hub.carry(self._name, peer, parts)
        if is_sent and len(parts) > 1:
            self.meters.sent(place_of(peer), parts, parts)
        return is_sent

    def flush(self) -> None:
        """Nothing: what is sent goes out at once."""

    @property
    def refused(self) -> int:
        """Nothing: all who are in the hub may be heard."""
        return 0

    @property
    def strangers(self) -> int:
        """Nothing: nobody can connect."""
        return 0

    def route(self, peer: Peer, host: int) -> None:
        """Nothing: all who are in the hub reach each other."""

    def dial(self, host: int, address: str) -> None:
        """Nothing: all who are in the hub reach each other."""

    def share(self, peer: Peer) -> None:
        """Nothing: frames are copied."""

    def forget(self, peer: Peer) -> None:
        """Nothing: frames are copied."""

    def heard(self) -> set[int]:
        """The hosts that were heard of since the last time."""
        heard, self._heard = self._heard, set()
        return heard

    def give_up(self, host: int) -> None:
        """Nothing: it is up to the test what comes of it."""

    def connect(self, peer: Peer, address: str) -> None:
        """Nothing: all who are in the hub reach each other."""

    def disconnect(self, peer: Peer) -> None:
        """Nothing: who has left is reached no more."""

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next message and its sender, or None."""
        return self._arrived.popleft() if self._arrived else None

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message arrived, `wake` was called, or the time is up; at once while a message is not read."""
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
        """Leave the hub; who sends here from now on is told so."""
        self.closed = True
        self._hub.leave(self._name, self)
        self.wake()
