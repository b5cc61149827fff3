"""ZeroMQ: the controller binds one ROUTER, ranks and agent of its machine connect a DEALER with their name as identity.

Ranks bind a ROUTER, too. One that asks another connects a DEALER to it, whose requests and their answers stay on that link.
What is for processes of other hosts goes to the host's agent (its *gateway*), with the name of whom it is for before it.

Queues are unbounded on both sides (high-water mark 0): the controller never blocks on a slow rank, and what a rank has not
read is held by the rank's own I/O thread. On one machine the address is ``ipc://`` in a directory of mode 0700.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.backend import Socket as PlainSocket

from monarch_kernel.transport.base import CONTROLLER, Peer, host_peer
from monarch_kernel.transport.links import Links
from monarch_kernel.transport.relay import CONTROLLER_HOST, Relay
from monarch_kernel.transport.sockets import (
    LINGER_MS,
    ZmqSocket,
    has_message,
    recv_multipart,
    recv_rest,
    send_multipart,
)
from monarch_kernel.wire.codec import Frame, WireError
from monarch_kernel.wire.config import LinkKeys

__all__ = ["ZmqDealer", "ZmqRank", "ZmqRouter"]

BEAT_S = 0.25
_LOOK_EVERY = 16
"""After so many messages it is looked who else has sent something, so that no flood holds up what others send."""

# pyzmq's enums, and the checks of its Python layer, cost more than the calls themselves.
_NOBLOCK, _POLLIN, _RCVMORE = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.RCVMORE)
_plain: Any = PlainSocket
_recv, _get = _plain.recv, _plain.get


class ZmqRouter(ZmqSocket):
    """The controller's end; what it sends to itself it receives next.

    Args:
        address: where ranks and the agent of its own machine connect to.
        keys: of connections to other machines; None where there are to be none.
        life: how many controllers the session has had before.
    """

    # Before it sleeps, the one controller lets others run this often: an answer that comes meanwhile needs no wake-up, which
    # takes a third off a small call. Ranks do not, for they may outnumber the cores.
    yields = 60

    def __init__(self, address: str, keys: LinkKeys | None = None, life: int = 0) -> None:
        super().__init__(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self._arrived: deque[tuple[Peer, list[Frame]]] = deque()
        self._relay = Relay(CONTROLLER_HOST, life)
        self._links = Links(self._context, CONTROLLER_HOST, keys, self._watch) if keys else None
        self._is_linked = False
        self._homes: dict[Peer, int] = {}
        self._neighbours_here: set[int] = set()
        self._beat_at = 0.0

    # -- other hosts

    def listen(self, port: int = 0) -> int:
        """Let agents of other machines connect; gives the port.

        Raises:
            OSError: the port is taken.
        """
        assert self._links is not None
        self._is_linked = True
        return self._links.listen(port)

    def dial(self, host: int, address: str) -> None:
        """Connect to an agent that can't connect to us."""
        assert self._links is not None
        self._is_linked = True
        self._links.dial(host, [address])

    def route(self, peer: Peer, host: int) -> None:
        """Say which host a process is on, if it is not connected to us itself."""
        self._homes[peer] = host
        self._relay.greet(host)

    def heard(self) -> set[int]:
        """The hosts that were heard of since the last time."""
        heard, self._relay.heard = self._relay.heard, set()
        return heard

    def give_up(self, host: int) -> None:
        """A host is gone: should it be heard of again it is told to end."""
        self._relay.give_up(host)

    @property
    def refused(self) -> int:
        """Connections, and messages between hosts, that were not let in."""
        return self._relay.dropped + (self._links.refused if self._links else 0)

    # -- messages

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message may have arrived, `wake` was called, or the time is up."""
        if self._arrived:
            return
        if self._homes:
            now = time.monotonic()
            if now >= self._beat_at:
                self._beat_at = now + BEAT_S
                self._relay.beat()
                self.flush()
            timeout_s = BEAT_S if timeout_s is None else min(timeout_s, BEAT_S)
        super().wait(timeout_s)

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Hand a message over without blocking; False if no such peer is connected."""
        if (home := self._homes.get(peer)) is not None:
            self._relay.send(CONTROLLER, peer, home, parts)
            return True
        if peer == CONTROLLER:
            self._arrived.append((CONTROLLER, _as_received(parts)))
            return True
        return self._hand_over(peer, parts)

    def flush(self) -> None:
        """Have what is for other hosts go out."""
        if self._relay.waits:
            for neighbour, parts in self._relay.flush():
                if neighbour in self._neighbours_here:
                    self._hand_over(host_peer(neighbour), parts)
                elif self._links is not None:
                    self._links.send(neighbour, parts)

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next message and its sender, or None."""
        while not self._arrived:
            try:
                peer = _recv(self._socket, _NOBLOCK)
            except zmq.Again:
                linked = self._recv_linked() if self._is_linked else None
                if linked is None:
                    if self._relay.waits:
                        self.flush()
                    return None
                self._hear(*linked)
                continue
            parts = [] if not _get(self._socket, _RCVMORE) else recv_rest(self._socket, [_recv(self._socket, _NOBLOCK)])
            if self._homes.get(peer) is None:
                return peer, parts
            self._neighbours_here.add(self._homes[peer])
            self._hear(self._homes[peer], parts)
        return self._arrived.popleft()

    def close(self) -> None:
        """Close all sockets; what was sent lingers for up to a second."""
        if self._event is not None:
            self.flush()
            if self._links is not None:
                self._links.close()
            super().close()

    def _hand_over(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        try:
            send_multipart(self._socket, [peer, *parts])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def _recv_linked(self) -> tuple[int, list[Frame]] | None:
        """Give the next message of another machine; what we have dialled gets a word, so that it knows whom it talks to."""
        assert self._links is not None
        received = self._links.recv()
        for host in self._links.new_connections():
            self._relay.lead(host, host)
            self._relay.beat()
        return received

    def _hear(self, neighbour: int, parts: Sequence[Frame]) -> None:
        try:
            for source, senders, receivers, frames in self._relay.hear(neighbour, parts):
                for sender in senders:
                    if receivers == [CONTROLLER] and self._homes.get(sender) == source:
                        self._arrived.append((sender, frames))
                    else:  # an agent speaks only for itself and its ranks
                        self._relay.dropped += 1
        except WireError:
            self._relay.dropped += 1

    def _watch(self, socket: zmq.Socket[bytes], is_open: bool) -> None:
        if is_open:
            self._items.append((socket, _POLLIN))
        else:
            self._items.remove((socket, _POLLIN))


class ZmqDealer(ZmqSocket):
    """An end that is connected to one other, the controller."""

    def __init__(self, address: str, name: Peer) -> None:
        super().__init__(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, name)
        self._socket.connect(address)

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Hand a message for the controller over without blocking."""
        if peer != CONTROLLER:
            return False
        send_multipart(self._socket, parts)
        return True

    def flush(self) -> None:
        """Nothing: what is sent goes out at once."""

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next message of the controller, or None."""
        parts = recv_multipart(self._socket)
        return None if parts is None else (CONTROLLER, parts)


class ZmqRank(ZmqDealer):
    """The end of a rank: connected to the controller, to the ranks that it asks, and to those that ask it.

    Args:
        address: of the controller; empty where that is on another machine, and is reached by way of the gateway.
        name: of the rank on the wire.
        own_address: where the rank listens.
        gateway: address of its host agent, for processes of other hosts; empty where there are none.
    """

    def __init__(self, address: str, name: Peer, own_address: str, gateway: str = "") -> None:
        super().__init__(address or gateway, name)
        self._name = name
        self._askers = self._context.socket(zmq.ROUTER)
        self._askers.set_hwm(0)
        self._askers.setsockopt(zmq.LINGER, LINGER_MS)
        self._askers.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._askers.bind(own_address)
        if own_address.startswith("ipc://"):
            os.chmod(own_address.removeprefix("ipc://"), 0o600)
        self._items.append((self._askers, _POLLIN))
        self._asked: dict[Peer, zmq.Socket[bytes]] = {}
        self._names: dict[Any, Peer] = {self._socket: CONTROLLER}
        self._ready: deque[Any] = deque()
        self._to_myself: deque[list[Frame]] = deque()
        self._received = 0
        self._gateway: zmq.Socket[bytes] | None = None
        self._far: set[Peer] = set()  # who is reached by way of the gateway
        if not address:
            self._gateway = self._socket
            self._far.add(CONTROLLER)
        elif gateway:
            self._gateway = self._connect(gateway)
        if self._gateway is not None:
            self._names[self._gateway] = b""

    def connect(self, peer: Peer, address: str) -> None:
        """Connect to a rank that is to be asked; without an address it is on another host, and asked through the gateway."""
        if not address:
            self._far.add(peer)
            return
        socket = self._connect(address)
        self._asked[peer] = socket
        self._names[socket] = peer

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.ROUTING_ID, self._name)
        socket.connect(address)
        self._items.append((socket, _POLLIN))
        return socket

    def disconnect(self, peer: Peer) -> None:
        """Give up a connection; what has not been sent is dropped."""
        self._far.discard(peer)
        socket = self._asked.pop(peer, None)
        if socket is not None:
            del self._names[socket]
            self._items.remove((socket, _POLLIN))
            if socket in self._ready:
                self._ready.remove(socket)
            socket.close(linger=0)

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message may have arrived, `wake` was called, or the time is up."""
        if not self._to_myself and not self._ready:
            self._poll(-1 if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999)))

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Hand a message over without blocking; False if no such peer is connected."""
        if peer in self._far:
            send_multipart(self._gateway, [peer, *parts])
        elif peer == CONTROLLER:
            send_multipart(self._socket, parts)
        elif peer == self._name:
            self._to_myself.append(_as_received(parts))
        elif (socket := self._asked.get(peer)) is not None:
            send_multipart(socket, parts)
        else:
            try:
                send_multipart(self._askers, [peer, *parts])
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    return False
                raise
        return True

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next message and its sender, or None; each connection in its turn."""
        if self._to_myself:  # before what others may send because of it
            return self._name, self._to_myself.popleft()
        self._received += 1
        if not self._ready or not self._received % _LOOK_EVERY:
            self._poll(0)
        while self._ready:
            socket = self._ready[0]
            try:
                first = _recv(socket, _NOBLOCK)
            except zmq.Again:
                self._ready.popleft()
                continue
            peer = self._names.get(socket) or first  # of the others the first frame is the name
            if peer is not first:
                received = peer, recv_rest(socket, [first])
            elif not _get(socket, _RCVMORE):
                received = peer, []
            else:
                received = peer, recv_rest(socket, [_recv(socket, _NOBLOCK)])
            if socket is self._gateway:
                self._far.add(peer)  # and is answered on the same way
            self._ready.popleft()
            if has_message(socket):
                self._ready.append(socket)
            return received
        return None

    def close(self) -> None:
        """Close all connections; what was sent lingers for up to a second."""
        if self._event is not None:
            for peer in list(self._asked):
                self._asked.pop(peer).close()
            if self._gateway is not None:
                self._gateway.close()
            self._askers.close()
            super().close()

    def _poll(self, timeout_ms: int) -> None:
        events: list[Any] = zmq.zmq_poll(self._items, timeout_ms)
        for source, _ in events:
            if source == self._wake:
                self._forget_wake()
            elif source not in self._ready:
                self._ready.append(source)


def _as_received(parts: Sequence[Frame]) -> list[Frame]:
    """Copies, as if the message had come from elsewhere: the receiver may write to its frames."""
    return [memoryview(bytearray(part)) if i else bytes(part) for i, part in enumerate(parts)]
