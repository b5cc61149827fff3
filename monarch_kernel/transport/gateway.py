"""A host agent's transport: to the controller, to the ranks of its host, and for them to the ranks of others.

Theory of operation
===================

The ranks of a host connect to their agent, which passes on what they send with the name of whom it is for before it, and hands
them what comes for them with the name of who has sent it. It reads neither. Ways, numbers, fan-out and folding are the
`Relay`'s.

What is for the controller goes to it, or, in a tree of agents, to the agent that it has named (`join`). When that falls silent
the controller is dialled again, by the addresses that we came up with.

What is for a rank of another host goes by way of the controller, until it has said where that host is (`reach`), and a
connection to it is there: then straight to its agent. If nothing is heard on that for a while it is given up, and the way is
the old one. The numbers of the `Relay` see to it that nothing is lost or overtaken where the way changes.

A message that is for several ranks will soon have several answers. For a millisecond those that have come wait for the others,
so that equal ones go up as one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from monarch_kernel.transport.base import CONTROLLER, Peer, host_peer, is_rank
from monarch_kernel.transport.links import Links
from monarch_kernel.transport.relay import CONTROLLER_HOST, Relay
from monarch_kernel.transport.sockets import LINGER_MS, recv_multipart, send_multipart
from monarch_kernel.wire.codec import Frame, WireError
from monarch_kernel.wire.config import LinkKeys

__all__ = ["Gateway"]

FOLD_S = 0.001
PARENT_SILENT_S = 1.0
NEIGHBOUR_SILENT_S = 3.0
REDIAL_S = 10.0
"""After this long without an answer, or without a connection that was given up, another host is dialled once more."""

_DIALLING_S = 0.02


class Gateway:
    """Carries messages between the ranks of one host, their agent, and everybody else; for the agent's one thread.

    Args:
        host: number of the host.
        directory: where ranks find it.
        addresses: of the controller; empty where the controller dials.
        keys: for connections to other machines; None where there are to be none.
        life: how many controllers the session has had before.
        watch: called with each descriptor that has to be polled, which is edge-triggered: whenever one is readable call
            `turn`; and with False before it is closed.

    Attributes:
        name: of the agent itself.
        address: where ranks connect to.
        heard_controller_at: when the controller was last heard of; None if it never was.
    """

    def __init__(
        self,
        host: int,
        directory: str,
        addresses: Sequence[str],
        keys: LinkKeys | None,
        life: int,
        watch: Callable[[int, bool], None],
    ) -> None:
        self.name = host_peer(host)
        self.address = f"ipc://{directory}/{self.name.decode()}"
        self.heard_controller_at: float | None = None
        self._watch_fd = watch
        self._addresses = tuple(addresses)
        self._context: zmq.Context[Any] = zmq.Context()
        self._relay = Relay(host, life, default=CONTROLLER_HOST)
        self._router: zmq.Socket[bytes] = self._new_socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(self.address)
        os.chmod(self.address.removeprefix("ipc://"), 0o600)
        self._watch(self._router, True)
        self._uplink: zmq.Socket[bytes] | None = None
        self._links = Links(self._context, host, keys, self._watch) if keys else None
        if addresses and addresses[0].startswith("ipc://"):
            self._uplink = self._new_socket(zmq.DEALER)
            self._uplink.setsockopt(zmq.ROUTING_ID, self.name)
            self._uplink.connect(addresses[0])
            self._watch(self._uplink, True)
        elif self._links is not None:
            self._links.listen()
            if addresses:
                self._links.dial(CONTROLLER_HOST, addresses)
        self._relay.greet(CONTROLLER_HOST)
        self._parent = CONTROLLER_HOST
        self._joining: int | None = None
        self._join_by = 0.0
        self._heard_at: dict[int, float] = {}
        self._reachable: dict[int, tuple[str, ...]] = {}
        self._redial_at: dict[int, float] = {}
        self._homes: dict[Peer, int] = {CONTROLLER: CONTROLLER_HOST}
        self._homeless: dict[Peer, list[tuple[Peer, list[Frame]]]] = {}
        self._ranks: set[Peer] = set()
        self._unsent: dict[Peer, list[list[Frame]]] = {}
        self._arrived: deque[tuple[Peer, list[Frame]]] = deque()
        self._expected = 0
        self._fold_until = 0.0

    # -- whom it knows

    @property
    def port(self) -> int:
        """Where other hosts may dial; 0 where none may."""
        return self._links.port if self._links else 0

    @property
    def has_controller(self) -> bool:
        """Whether the controller's process is certainly there, also if it says nothing; known only where we have dialled it."""
        return self._links is not None and self._parent == CONTROLLER_HOST and self._links.is_up(CONTROLLER_HOST)

    @property
    def is_given_up(self) -> bool:
        """Whether the controller has given this host up."""
        return self._relay.is_given_up

    @property
    def refused(self) -> int:
        """Connections and messages that were not let in."""
        return self._relay.dropped + (self._links.refused if self._links else 0)

    def expect(self, rank: Peer) -> None:
        """A rank of this host will connect; what comes for it before waits."""
        self._ranks.add(rank)

    def forget(self, rank: Peer) -> None:
        """A rank of this host has ended."""
        self._ranks.discard(rank)
        self._unsent.pop(rank, None)

    def reach(self, host: int, addresses: Sequence[str], peers: Iterable[Peer]) -> None:
        """These processes are on a host that can be dialled there; it dials us, if there are no addresses."""
        for peer in peers:
            self._homes[peer] = host
            for sender, frames in self._homeless.pop(peer, ()):
                self._relay.send(sender, peer, host, frames)
        if addresses:
            self._reachable[host] = tuple(addresses)
            self._dial(host)

    def _dial(self, host: int) -> None:
        """Try to have a connection to another host, now and once more later."""
        if self._links is not None and not self._links.is_connected(host):
            self._links.dial(host, self._reachable[host])
            self._redial_at[host] = time.monotonic() + REDIAL_S

    def join(self, parent: int, addresses: Sequence[str]) -> None:
        """Take the way to the controller by this agent from now on, if it can be reached."""
        if self._links is not None:
            self._joining = parent
            self._join_by = time.monotonic() + REDIAL_S
            self._links.dial(parent, addresses)

    # -- messages

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Send a message of the agent's own; False if that is not for the controller."""
        if peer != CONTROLLER:
            return False
        self._relay.send(self.name, CONTROLLER, CONTROLLER_HOST, parts)
        self._flush()
        return True

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Give the next message for the agent itself, or None."""
        return self._arrived.popleft() if self._arrived else None

    def turn(self) -> float | None:
        """Pass on all that has come; gives after how many seconds to call again, at the latest, or None."""
        now = time.monotonic()
        self._retry()
        busy = True
        while busy:  # what we send may be answered before we sleep, and the descriptors would not tell
            busy = False
            while (parts := recv_multipart(self._router)) is not None:
                busy = True
                if len(parts) > 2:
                    self._from_rank(bytes(parts[0]), bytes(parts[1]), parts[2:])
            while self._uplink is not None and (parts := recv_multipart(self._uplink)) is not None:
                busy = True
                self._hear(CONTROLLER_HOST, parts, now)
            while self._links is not None and (linked := self._links.recv()) is not None:
                busy = True
                self._hear(*linked, now)
            self._connected()
            if self._may_flush():
                busy = True
                self._flush()
        if self._relay.waits or self._unsent:
            return FOLD_S
        return _DIALLING_S if self._links is not None and self._links.is_dialling else None

    def beat(self, now: float) -> None:
        """Say that we are alive, and see who else is; call this every `AgentConfig.beat_s`."""
        for neighbour, at in list(self._heard_at.items()):
            if self._links is None or neighbour == CONTROLLER_HOST:
                continue
            if neighbour == self._parent:
                if now >= at + PARENT_SILENT_S and self._joining is None:
                    self._joining = CONTROLLER_HOST
                    self._links.dial(CONTROLLER_HOST, self._addresses)
            elif now >= at + NEIGHBOUR_SILENT_S:
                del self._heard_at[neighbour]
                self._links.hang_up(neighbour)
                self._relay.lead(neighbour, self._parent)
                if neighbour in self._reachable:
                    self._redial_at[neighbour] = now + REDIAL_S
        for host, at in list(self._redial_at.items()):
            if now >= at and self._links is not None:
                del self._redial_at[host]
                if self._relay.way(host) != host:
                    self._links.hang_up(host)
                    self._dial(host)
        if self._joining not in (None, CONTROLLER_HOST) and now >= self._join_by and self._links is not None:
            self._links.hang_up(self._joining)  # it can't be reached; the way stays as it is
            self._joining = None
        self._relay.beat()
        self._flush()

    def close(self) -> None:
        """Close all sockets; what was sent lingers for up to a second."""
        self._flush()
        if self._links is not None:
            self._links.close()
        for socket in (self._router, self._uplink):
            if socket is not None:
                self._watch(socket, False)
                socket.close()
        self._context.term()

    # -- inside

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        return socket

    def _watch(self, socket: zmq.Socket[bytes], is_open: bool) -> None:
        self._watch_fd(int(socket.getsockopt(zmq.FD)), is_open)

    def _connected(self) -> None:
        """See what connections have come about that we have dialled."""
        for host in self._links.new_connections() if self._links is not None else ():
            self._heard_at[host] = time.monotonic()
            if host == self._joining:
                self._joining = None
                former, self._parent = self._parent, host
                self._relay.lead_by(former, host)
                if former != host and self._links is not None:
                    self._links.hang_up(former)
                    self._heard_at.pop(former, None)
            elif host != CONTROLLER_HOST:
                self._relay.greet(host)
                self._relay.lead(host, host)
            self._relay.beat()

    def _hear(self, neighbour: int, parts: Sequence[Frame], now: float) -> None:
        self._heard_at[neighbour] = now
        try:
            for source, senders, receivers, frames in self._relay.hear(neighbour, parts):
                self._homes.update((sender, source) for sender in senders if is_rank(sender))
                if len(receivers) > 1:
                    self._expected = len(receivers)
                    self._fold_until = now + FOLD_S
                for receiver in receivers:
                    for sender in senders:
                        if receiver == self.name:
                            self._arrived.append((sender, frames))
                        else:
                            self._to_rank(receiver, [receiver, sender, *frames])
        except WireError:
            self._relay.dropped += 1
        if CONTROLLER_HOST in self._relay.heard:
            self.heard_controller_at = now
        self._relay.heard.clear()

    def _from_rank(self, rank: Peer, receiver: Peer, frames: list[Frame]) -> None:
        home = self._homes.get(receiver)
        if home is not None:
            self._relay.send(rank, receiver, home, frames)
        else:  # the controller is about to say where that is
            self._homeless.setdefault(receiver, []).append((rank, frames))

    def _to_rank(self, rank: Peer, parts: list[Frame]) -> None:
        if rank in self._unsent:
            self._unsent[rank].append(parts)
            return
        try:
            send_multipart(self._router, parts)
        except zmq.ZMQError:
            if rank in self._ranks:
                self._unsent[rank] = [parts]
            else:
                self._relay.dropped += 1

    def _retry(self) -> None:
        """Send what is for ranks that were not connected yet."""
        waiting, self._unsent = self._unsent, {}
        for rank, messages in waiting.items():
            for parts in messages:
                self._to_rank(rank, parts)

    def _may_flush(self) -> bool:
        relay = self._relay
        return relay.waits and (relay.senders >= self._expected or time.monotonic() >= self._fold_until)

    def _flush(self) -> None:
        self._expected = 0
        for neighbour, parts in self._relay.flush():
            if neighbour == CONTROLLER_HOST and self._uplink is not None:
                with contextlib.suppress(zmq.ZMQError):
                    send_multipart(self._uplink, parts)
            elif self._links is not None:
                self._links.send(neighbour, parts)
