"""A host agent's transport: to the controller, to the ranks of its host, and from them to ranks of other hosts.

Theory of operation
===================

The ranks of a host connect to their agent (`PacketSocket`). The agent forwards what they send, which starts with the name of
the receiver, and delivers messages to them with the name of the sender in front. It reads the content of neither. Paths,
numbers, fan-out and folding are the `Relay`'s.

Messages for the controller go to it, or, in a tree of agents, to the agent that it has named as parent (`join`). The parent
reports whether it has a path to the controller (`Beat.attached`), which may be unable to send anything itself. When the parent
stops to report a path, or falls silent, this agent dials the controller again, by the addresses that it was started with.

Messages for a rank of another host go through the controller, until it has said where that host is (`reach`) and a connection
is established: then directly to its agent. If nothing arrives on that connection for a while, the agent closes it and returns
to the old path. The numbers of the `Relay` ensure that nothing is lost or reordered when the path changes.

A message for several ranks will soon have several answers. The first answers wait for the others, so that equal ones go up as
one: for a millisecond, and again where that was not enough, for half as long as the others have taken so far (`MAX_FOLD_S` at
most). Messages of a rank that owes no answer, and those that the controller forwards through this agent, are not delayed.

The descriptor of a ZeroMQ socket signals only what has arrived since the socket was last checked, and any use may clear the
signal. So these sockets are checked when a descriptor was readable and after each use (*stirred*), but not for each message of
a rank.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from monarch_kernel.net.hosts.links import Links
from monarch_kernel.net.hosts.relay import CONTROLLER_HOST, Relay
from monarch_kernel.net.transport.base import CONTROLLER, Peer, host_peer, is_rank
from monarch_kernel.net.transport.unix_packets import PacketListener, Packets, PacketSocket, packets_of
from monarch_kernel.net.transport.zmq_utils import LINGER_MS, recv_multipart, send_multipart
from monarch_kernel.net.wire.codec import Frame, WireError
from monarch_kernel.net.wire.config import EVERYWHERE, LinkKeys

__all__ = ["Gateway"]

FOLD_S = 0.001
MAX_FOLD_S = 0.02
EXPECTED_S = 0.5
"""The agent stops waiting for an answer after this time."""

BATCH = 256
"""After this many messages the agent does its other work."""

PARENT_SILENT_S = 1.0
NEIGHBOUR_SILENT_S = 3.0
REDIAL_S = 10.0
"""A host is dialled again this long after an attempt without an answer, or after its connection was given up."""

_DIALLING_S = 0.02


class Gateway:
    """Carries messages between the ranks of one host, their agent, and all others; for the agent's only thread.

    Args:
        host: number of the host.
        directory: where ranks find it.
        addresses: of the controller; empty if the controller dials.
        keys: for connections to other machines; None if there are none.
        epoch: the number of controllers that the session had before.
        watch: called with a descriptor that must be polled, and True: call `turn` whenever it is readable; and with False
            before it is closed.
        listens_at: the address of the interface where it listens for other hosts.

    Attributes:
        name: of the agent itself.
        address: where ranks connect.
        controller_seen_at: when the last message of the controller came; None if none has come.
    """

    def __init__(
        self,
        host: int,
        directory: str,
        addresses: Sequence[str],
        keys: LinkKeys | None,
        epoch: int,
        watch: Callable[[int, bool], None],
        listens_at: str = EVERYWHERE,
    ) -> None:
        self.name = host_peer(host)
        self.address = f"ipc://{directory}/{self.name.decode()}"
        self.controller_seen_at: float | None = None
        self._watch_fd = watch
        self._addresses = tuple(addresses)
        self._context: zmq.Context[Any] = zmq.Context()
        self._relay = Relay(host, epoch, default=CONTROLLER_HOST)
        self._epoll = select.epoll()
        self._watch_fd(self._epoll.fileno(), True)
        self._listener = PacketListener(self.address.removeprefix("ipc://"))
        self._epoll.register(self._listener.fd, select.EPOLLIN)
        self._local: dict[int, PacketSocket] = {}
        self._names: dict[int, Peer] = {}  # ranks that have sent their names
        self._connected_ranks: dict[Peer, PacketSocket] = {}
        self._uplink: zmq.Socket[bytes] | None = None
        self._links = Links(self._context, host, keys, self._watch) if keys else None
        if addresses and addresses[0].startswith("ipc://"):
            self._uplink = self._new_socket(zmq.DEALER)
            self._uplink.setsockopt(zmq.ROUTING_ID, self.name)
            self._uplink.connect(addresses[0])
            self._watch(self._uplink, True)
        elif self._links is not None:
            self._links.listen(at=listens_at)
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
        self._unrouted: dict[Peer, list[tuple[Peer, list[Frame]]]] = {}
        self._ranks: set[Peer] = set()
        self._unsent: dict[Peer, list[Packets]] = {}
        self._arrived: deque[tuple[Peer, list[Frame]]] = deque()
        self._is_stirred = True
        self._pending: set[Peer] = set()
        self._asked_at = 0.0
        self._fold_until = 0.0
        self._is_urgent = False

    # -- state of other processes

    @property
    def port(self) -> int:
        """Port for connections of other hosts; 0 if there is none."""
        return self._links.port if self._links else 0

    @property
    def has_controller(self) -> bool:
        """Whether the controller's process certainly runs, even if silent; False, for unknown, if it has dialled this host."""
        if self._parent != CONTROLLER_HOST:
            return time.monotonic() < self._heard_at.get(self._parent, 0.0) + PARENT_SILENT_S
        return self._links is not None and self._links.is_up(CONTROLLER_HOST)

    def _has_way(self, now: float) -> bool:
        """Whether there is a path to the controller through this host, also for hosts whose messages it forwards."""
        heard_at = self.controller_seen_at
        return self.has_controller or (heard_at is not None and now < heard_at + PARENT_SILENT_S)

    @property
    def is_given_up(self) -> bool:
        """Whether the controller has given this host up."""
        return self._relay.is_given_up

    @property
    def is_congested(self) -> bool:
        """Whether messages for the controller wait here, because it has not taken enough of those that were sent."""
        return self._relay.is_congested(CONTROLLER_HOST)

    @property
    def refused(self) -> int:
        """Number of refused connections and messages."""
        return self._relay.dropped + (self._links.refused if self._links else 0)

    @property
    def refused_connections(self) -> int:
        """Number of refused connections from clients without the keys."""
        return self._links.refused if self._links else 0

    def expect(self, rank: Peer) -> None:
        """Register a rank of this host that will connect; messages for it wait until then."""
        self._ranks.add(rank)

    def forget(self, rank: Peer) -> None:
        """Remove a rank of this host that has ended; messages that it has sent are still forwarded."""
        if (connection := self._connected_ranks.get(rank)) is not None:
            poller = select.poll()
            poller.register(connection.fd, select.POLLIN)
            while connection.fd in self._local and poller.poll(0):
                self._read(connection)
            self._drop(connection)
        self._ranks.discard(rank)
        self._pending.discard(rank)
        self._unsent.pop(rank, None)

    def reach(self, host: int, addresses: Sequence[str], peers: Iterable[Peer]) -> None:
        """Set the host of these processes, and dial it; it dials this host, if there are no addresses."""
        for peer in peers:
            self._homes[peer] = host
            for sender, frames in self._unrouted.pop(peer, ()):
                self._relay.send(sender, peer, host, frames)
        if addresses:
            self._reachable[host] = tuple(addresses)
            self._dial(host)

    def _dial(self, host: int) -> None:
        """Dial another host unless it is connected, and schedule one more attempt."""
        if self._links is not None and not self._links.is_connected(host):
            self._links.dial(host, self._reachable[host])
            self._redial_at[host] = time.monotonic() + REDIAL_S

    def part(self, host: int) -> None:
        """Drop the messages for a lost host, and stop dialling it."""
        self._reachable.pop(host, None)
        self._redial_at.pop(host, None)
        self._relay.give_up(host)
        if self._links is not None and host != self._parent:  # else beat() looks for another path to the controller
            self._heard_at.pop(host, None)
            self._links.hang_up(host)

    def join(self, parent: int, addresses: Sequence[str]) -> None:
        """Use this agent as the path to the controller from now on, if it can be reached."""
        if self._links is not None:
            self._joining = parent
            self._join_by = time.monotonic() + REDIAL_S
            self._links.dial(parent, addresses)

    # -- messages

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Send a message of the agent itself; returns False unless it is for the controller."""
        if peer != CONTROLLER:
            return False
        self._relay.send(self.name, CONTROLLER, CONTROLLER_HOST, parts)
        self._flush()
        return True

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Return the next message for the agent itself, or None."""
        return self._arrived.popleft() if self._arrived else None

    def turn(self) -> float | None:
        """Forward all messages that have arrived; returns the seconds until the next call at the latest, or None."""
        now = time.monotonic()
        for fd, events in self._epoll.poll(0):
            if (connection := self._local.get(fd)) is not None:
                if events & select.EPOLLOUT:
                    self._go_on(connection)
                if events & ~select.EPOLLOUT:
                    self._read(connection)
            elif fd == self._listener.fd:
                self._accept()
            else:
                self._is_stirred = True
        is_dialling = self._links is not None and self._links.is_dialling
        left = BATCH
        while left and (self._is_stirred or is_dialling or self._may_flush(now)):
            is_dialling = self._is_stirred = False
            while left and (received := self._take()) is not None:
                left -= 1
                self._handle_messages(*received, now)
            self._connected()
            if self._may_flush(now):
                self._flush()  # which stirs: an answer may arrive before we sleep, without a signal of the descriptor
        if not left:
            self._is_stirred = True
            return 0.0
        if self._relay.waits:
            return max(0.0, self._fold_until - now)
        return _DIALLING_S if self._links is not None and self._links.is_dialling else None

    @property
    def is_stirred(self) -> bool:
        """Whether something may have arrived without a signal of a descriptor: call `turn` before you poll."""
        return self._is_stirred

    def _take(self) -> tuple[int, list[Frame]] | None:
        """Return the next message of another host or the controller, and the neighbour that sent it."""
        if self._uplink is not None and (parts := recv_multipart(self._uplink)) is not None:
            return CONTROLLER_HOST, parts
        return self._links.recv() if self._links is not None else None

    def beat(self, now: float) -> None:
        """Send beats and check those of others; call this every `AgentConfig.beat_s`."""
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
            self._links.hang_up(self._joining)  # it can't be reached; the path stays as it is
            self._joining = None
        if self._links is not None:
            self._links.revive(now)
            self._take_direct_paths(self._links)
        self._relay.is_attached = self._has_way(now)
        self._is_stirred = True  # something may be due
        self._relay.beat()
        self._flush()
        if self._links is not None:
            self._links.tend()

    def _take_direct_paths(self, links: Links) -> None:
        """Send messages for a host that was dialled, and is connected, to it again.

        The path to a host is that by which it was last heard. When two hosts have just been connected, messages that were on
        their way before still arrive from the parent, on both sides. Each would then hear the other from there only.
        """
        for host in self._reachable:
            if host in self._heard_at and self._relay.way(host) != host and links.is_up(host):
                self._relay.lead(host, host)

    def close(self) -> None:
        """Close all sockets; sent messages linger for up to a second."""
        self._flush()
        if self._links is not None:
            self._links.close()
        if self._uplink is not None:
            self._watch(self._uplink, False)
            self._uplink.close()
        for connection in list(self._local.values()):
            self._drop(connection)
        self._listener.close()
        self._watch_fd(self._epoll.fileno(), False)
        self._epoll.close()
        self._context.term()

    # -- inside

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        return socket

    def _watch(self, socket: zmq.Socket[bytes], is_open: bool) -> None:
        fd = int(socket.getsockopt(zmq.FD))
        if is_open:
            self._epoll.register(fd, select.EPOLLIN)
            self._is_stirred = True
        else:
            self._epoll.unregister(fd)

    def _connected(self) -> None:
        """Process new connections to hosts that this one has dialled."""
        for host in self._links.new_connections() if self._links is not None else ():
            self._is_stirred = True
            self._heard_at[host] = time.monotonic()
            if host == self._joining:
                self._joining = None
                former, self._parent = self._parent, host
                if host != CONTROLLER_HOST:
                    self._relay.greet(host)  # it reports its path to the controller while it gets our messages
                self._relay.lead_by(former, host)
                if former != host and self._links is not None:
                    self._links.hang_up(former)
                    self._heard_at.pop(former, None)
            elif host != CONTROLLER_HOST:
                self._relay.greet(host)
                self._relay.lead(host, host)
            self._relay.beat()

    def _handle_messages(self, neighbour: int, parts: Sequence[Frame], now: float) -> None:
        if neighbour != self._parent:
            self._heard_at[neighbour] = now
        passed_on = self._relay.passed_on
        try:
            for source, senders, receivers, frames in self._relay.receive(neighbour, parts):
                senders = [sender for sender in senders if self._may_speak(sender, source)]
                if len(receivers) > 1:
                    self._expect_answers(receivers, now)
                ranks = [receiver for receiver in receivers if receiver != self.name]
                packed = [packets_of([sender, *frames]) for sender in senders] if ranks else ()
                for rank in ranks:
                    for packets in packed:
                        self._to_rank(rank, packets)
                for sender in senders if len(ranks) < len(receivers) else ():
                    if sender == CONTROLLER:
                        self._arrived.append((sender, frames))
                    else:
                        self._relay.dropped += 1
        except WireError:
            self._relay.dropped += 1
        if neighbour == self._parent and self._relay.passed_on > passed_on:
            self._is_urgent = True  # messages from the parent are not delayed
        if CONTROLLER_HOST in self._relay.active:
            self.controller_seen_at = now
        if neighbour == self._parent and (CONTROLLER_HOST in self._relay.active or neighbour in self._relay.attached):
            self._heard_at[neighbour] = now  # a parent without a path is of no use
        self._relay.active.clear()
        self._relay.attached.clear()

    def _may_speak(self, sender: Peer, host: int) -> bool:
        """Whether a process is on that host; a rank never moves: its replacement has another name."""
        if self._homes.get(sender) == host or (is_rank(sender) and self._homes.setdefault(sender, host) == host):
            return True
        self._relay.dropped += 1
        return False

    def _expect_answers(self, ranks: Sequence[Peer], now: float) -> None:
        self._pending = set(ranks)
        self._asked_at = now
        if not self._relay.waits:
            self._fold_until = now + FOLD_S

    def _from_rank(self, rank: Peer, receiver: Peer, frames: list[Frame]) -> None:
        if rank in self._pending:
            self._pending.remove(rank)
        else:
            self._is_urgent = True  # not an answer that others may be equal to
        home = self._homes.get(receiver)
        if home is not None:
            self._relay.send(rank, receiver, home, frames)
        else:  # the controller will say where that is
            self._unrouted.setdefault(receiver, []).append((rank, frames))

    def _to_rank(self, rank: Peer, packets: Packets) -> None:
        if (connection := self._connected_ranks.get(rank)) is not None:
            connection.send_packets(packets)
            if connection.has_unsent:
                self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)
        elif rank in self._ranks:
            self._unsent.setdefault(rank, []).append(packets)
        else:
            self._relay.dropped += 1

    # -- connections of ranks

    def _accept(self) -> None:
        while (connection := self._listener.accept()) is not None:
            self._local[connection.fd] = connection
            self._epoll.register(connection.fd, select.EPOLLIN)

    def _read(self, connection: PacketSocket) -> None:
        """Read one message: the other connections are next."""
        try:
            parts = connection.recv()
        except WireError:
            self._relay.dropped += 1
            self._drop(connection)
            return
        if parts:
            name = self._names.get(connection.fd)
            if name is None:
                self._admit(connection, bytes(parts[0]))
            else:
                self._from_rank(name, bytes(parts[0]), parts[1:])
        elif connection.is_over:
            self._drop(connection)

    def _admit(self, connection: PacketSocket, name: Peer) -> None:
        """Register a rank that has sent its name, and send the messages that waited for it."""
        if name not in self._ranks or name in self._connected_ranks:
            self._relay.dropped += 1
            self._drop(connection)
            return
        self._names[connection.fd] = name
        self._connected_ranks[name] = connection
        for packets in self._unsent.pop(name, ()):
            self._to_rank(name, packets)

    def _go_on(self, connection: PacketSocket) -> None:
        connection.flush()
        if not connection.has_unsent:
            self._epoll.modify(connection.fd, select.EPOLLIN)

    def _drop(self, connection: PacketSocket) -> None:
        if self._local.pop(connection.fd, None) is not None:
            self._epoll.unregister(connection.fd)
            self._connected_ranks.pop(self._names.pop(connection.fd, b""), None)
            connection.close()

    # -- connections to others

    def _may_flush(self, now: float) -> bool:
        return self._relay.waits and (self._is_urgent or not self._pending or now >= self._fold_until)

    def _flush(self) -> None:
        self._is_urgent = False
        if self._pending:
            now = time.monotonic()
            waited_s = now - self._asked_at
            if waited_s > EXPECTED_S:
                self._pending.clear()
            self._fold_until = now + min(max(FOLD_S, waited_s / 2), MAX_FOLD_S)
        self._is_stirred = True
        for neighbour, parts in self._relay.flush():
            if neighbour == CONTROLLER_HOST and self._uplink is not None:
                with contextlib.suppress(zmq.ZMQError):
                    send_multipart(self._uplink, parts)
            elif self._links is not None:
                self._links.send(neighbour, parts)
