"""ZeroMQ transports: the controller binds a ROUTER; the agent of its machine connects a DEALER with its name.

The ranks of the machine connect to the controller without ZeroMQ (`net.hosts.rank_lines`), except those that may outlive it:
they connect DEALERs, too. Ranks bind a ROUTER. A rank that calls another connects a DEALER to it, which carries the requests
and their answers. Messages for processes of other hosts go to the host's agent (its *gateway*), with the name of the receiver
as first frame; that connection is a `PacketSocket`.

A ZeroMQ socket is polled by a descriptor that signals only what has arrived since the socket was last checked, and any use of
the socket may clear the signal. So a socket whose descriptor was readable, or that was used, is marked as *stirred*. Before the
thread sleeps, it checks the stirred sockets, and no others: checking each costs a system call or two.

Queues are unbounded on both sides (high-water mark 0): the controller never blocks on a slow rank, and messages that a rank has
not read are held by the rank's own I/O thread. On one machine the address is ``ipc://`` in a directory of mode 0700.

Why ZeroMQ: messages keep their order, it needs no broker, and takes microseconds over ``ipc://``. A directory that only the
user can enter, and a token, replace ports. Between machines it is TCP with CURVE, and the controller listens at one port.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.backend import Socket as PlainSocket

from monarch_kernel.net.hosts.links import Links
from monarch_kernel.net.hosts.rank_lines import RankLines, path_of_lines
from monarch_kernel.net.hosts.relay import CONTROLLER_HOST, Relay
from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.memory.shared_blocks import is_for_all
from monarch_kernel.net.transport.base import CONTROLLER, Peer, Senders, host_peer, is_rank, place_of
from monarch_kernel.net.transport.patience import Patience
from monarch_kernel.net.transport.shared_frames import forget, may_look_at_parent, refer, resolve, share
from monarch_kernel.net.transport.unix_packets import PacketSocket
from monarch_kernel.net.transport.zmq_utils import LINGER_MS, Wakeable, has_message, recv_rest, send_multipart
from monarch_kernel.net.wire.codec import Frame, WireError
from monarch_kernel.net.wire.config import EVERYWHERE, LinkKeys

__all__ = ["ZmqRank", "ZmqRouter"]

BEAT_S = 0.25
BEAT_HERE_S = 1.0
"""Interval of beats while all hosts are on this machine, where no connection breaks."""

YIELDS = 60
"""How often the controller yields the CPU at most before it sleeps (`Patience`). Ranks do not yield, since they may outnumber
the cores; nor does the controller while it waits for another machine, whose answers take longer.
"""

_LOOK_EVERY = 16
"""Poll other peers after this many messages, so that a flood from one does not delay the others."""

# pyzmq's enums, and the checks of its Python layer, cost more than the calls themselves.
_NOBLOCK, _RCVMORE = int(zmq.NOBLOCK), int(zmq.RCVMORE)
_plain: Any = PlainSocket
_recv, _get = _plain.recv, _plain.get


class ZmqRouter(Wakeable):
    """The controller's transport; a message that it sends to itself is the next that it receives.

    Args:
        address: where ranks and the agent of this machine connect.
        keys: of connections to other machines; None if there are none.
        epoch: the number of controllers that the session had before.

    Attributes:
        meters: counts the frames that it sends.
    """

    def __init__(self, address: str, keys: LinkKeys | None = None, epoch: int = 0) -> None:
        super().__init__()
        self.meters = Meters(place_of(CONTROLLER))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._poller = select.epoll()
        self._poller.register(self._wake, select.EPOLLIN)
        self._poller.register(self._fd, select.EPOLLIN)
        self._linked: dict[int, zmq.Socket[bytes]] = {}  # sockets of the links, by descriptor
        self._is_stirred = self._are_links_used = True
        self._stirred_links: set[int] = set()
        self._received = 0
        # Whether a process here may soon answer: the last message went to one, and no wait has timed out since.
        self._expects = False
        self._patience = Patience(YIELDS)
        self._arrived: deque[tuple[Senders, list[Frame]]] = deque()
        self._by_zmq: set[Peer] = set()  # ranks with a connection to the ROUTER
        path = path_of_lines(address)
        self._lines = RankLines(path, self._poller, self._arrived, self._by_zmq.__contains__) if path else None
        self._hosts: set[int] = set()
        self._relay = Relay(CONTROLLER_HOST, epoch, members=self._hosts)
        self._links = Links(self._context, CONTROLLER_HOST, keys, self._watch) if keys else None
        self._is_linked = False
        self._homes: dict[Peer, int] = {}
        self._neighbours_here: set[int] = set()
        self._sharing: set[Peer] = set()
        share()
        self._beat_at = 0.0

    # -- other hosts

    def listen(self, port: int = 0, at: str = EVERYWHERE) -> int:
        """Let agents of other hosts connect, at the address of an interface; returns the port.

        Raises:
            OSError: the port is taken.
        """
        assert self._links is not None
        self._link()
        return self._links.listen(port, at)

    def dial(self, host: int, address: str) -> None:
        """Connect to an agent that can't connect to us."""
        assert self._links is not None
        self._link()
        self._links.dial(host, [address])

    def _link(self) -> None:
        self._is_linked = True
        self._beat_at = 0.0  # more often from now on

    def route(self, peer: Peer, host: int) -> None:
        """Set the host of a process that is not connected directly."""
        self._homes[peer] = host
        self._hosts.add(host)
        self._relay.greet(host)

    def share(self, peer: Peer) -> None:
        """Register a process that opens frames in shared memory of this one."""
        self._sharing.add(peer)

    def forget(self, peer: Peer) -> None:
        """Release what is kept for a process that has died."""
        self._sharing.discard(peer)
        forget(peer)

    def active_hosts(self) -> set[int]:
        """Return the hosts that have sent something since the last call."""
        active, self._relay.active = self._relay.active, set()
        return active

    def give_up(self, host: int) -> None:
        """Drop the messages for a lost host; if it sends anything again, it receives the order to end."""
        self._relay.give_up(host)

    @property
    def refused(self) -> int:
        """Number of refused connections, and of refused messages between hosts."""
        here = self._lines.refused if self._lines else 0
        return self._relay.dropped + here + (self._links.refused if self._links else 0)

    @property
    def refused_connections(self) -> int:
        """Number of refused connections from clients without the keys."""
        return self._links.refused if self._links else 0

    # -- messages

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message may have arrived, `wake` was called, or the time is up."""
        if self._arrived or self._stirred_links or (self._are_links_used and self._is_linked):
            return
        if self._lines is not None and self._lines.is_stirred:
            return
        if self._homes:
            left_s = max(0.0, self._beat_at - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        if self._is_stirred:  # until it is known not to be: an interrupt may arrive between any two steps here
            if has_message(self._socket):
                return
            self._is_stirred = False
        yields = self._patience.begin() if self._expects and timeout_s != 0 else 0
        if yields:
            for at in range(yields):
                if self._look(0):
                    self._patience.end(at, has_come=True)
                    return
                os.sched_yield()
        if not self._look(-1 if timeout_s is None else max(0.0, timeout_s)):
            self._expects = False
        elif yields:
            self._patience.end(yields, has_come=False)

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Hand a message over without blocking; False if no such peer is connected."""
        as_sent = parts
        if (home := self._homes.get(peer)) is not None:
            self._relay.send(CONTROLLER, peer, home, parts)
            self._expects = False
        elif peer == CONTROLLER:
            self._arrived.append((CONTROLLER, _as_received(parts)))
        else:
            self._expects = True
            if len(parts) > 1 and peer in self._sharing:
                as_sent = refer(parts, peer)
            if self._lines is not None and peer in self._lines:
                if not self._lines.send(peer, as_sent):
                    return False
            elif not self._hand_over(peer, as_sent):
                return False
        if len(parts) > 1:
            self.meters.sent(place_of(peer), parts, as_sent)
        return True

    def flush(self) -> None:
        """Send the queued messages for other hosts."""
        if self._lines is not None:
            self._lines.sent()
        while self._relay.waits:
            for neighbour, parts in self._relay.flush():
                if neighbour in self._neighbours_here:
                    self._hand_over(host_peer(neighbour), parts)
                elif self._links is not None:
                    self._are_links_used = True
                    self._links.send(neighbour, parts)
            while self._collect_linked():  # sending may clear the signal that something has arrived
                pass

    def recv(self) -> tuple[Senders, list[Frame]] | None:
        """Return the next message and its sender, or senders, or None."""
        if not self._arrived:
            self._received += 1
            if self._homes:
                self._beat()
            if not self._received % _LOOK_EVERY:
                self._look(0)
                self._collect_linked()
            if not self._collect() and self._look(0):
                self._collect()
        return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        """Close all sockets; sent messages linger for up to a second."""
        if self._event is not None:
            self.flush()
            self._event = None
            if self._links is not None:
                self._links.close()
            if self._lines is not None:
                self._lines.close(LINGER_MS / 1e3)
            self._socket.close()
            self._context.term()
            self._poller.close()

    # -- inside

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + (BEAT_S if self._is_linked else BEAT_HERE_S)
            self._are_links_used = True  # they have periodic work, too
            if self._links is not None:
                self._links.revive(now)
            self._relay.beat()
            self.flush()
            if self._links is not None:
                self._links.tend()

    def _look(self, timeout_s: float) -> bool:
        """Sleep until a socket is stirred, `wake` is called, or the time is up (negative: never); returns whether any was."""
        signalled = self._poller.poll(timeout_s)
        for fd, events in signalled:
            if fd == self._wake:
                self._forget_wake()
            elif fd == self._fd:
                self._is_stirred = True
            elif self._lines is None or not self._lines.stir(fd, events):
                self._stirred_links.add(fd)
        return bool(signalled)

    def _collect(self) -> bool:
        """Read the stirred sockets until there is a message for this process; returns whether there is."""
        while not self._arrived:
            if self._lines is not None and self._lines.is_stirred:
                self._lines.take()
            elif self._is_stirred and has_message(self._socket):
                self._take()
            else:
                self._is_stirred = False
                if not self._collect_linked():
                    if not self._relay.waits:
                        break
                    self.flush()  # which stirs sockets
        return bool(self._arrived)

    def _take(self) -> None:
        """Receive a message of a process of this machine."""
        peer = _recv(self._socket, _NOBLOCK)
        parts = [] if not _get(self._socket, _RCVMORE) else recv_rest(self._socket, [_recv(self._socket, _NOBLOCK)])
        if (home := self._homes.get(peer)) is None:
            if is_rank(peer):
                if self._lines is not None and peer in self._lines:  # only that connection speaks for it
                    self._relay.dropped += 1
                    return
                self._by_zmq.add(peer)
            self._arrived.append((peer, resolve(parts, peer)))
        else:
            self._neighbours_here.add(home)
            self._handle_messages(home, parts)

    def _collect_linked(self) -> bool:
        """Read a message of another machine, if there is one."""
        if not (self._stirred_links or (self._are_links_used and self._is_linked)):
            return False
        linked = self._recv_linked()
        if linked is not None:
            self._handle_messages(*linked)
            return True
        # Checking clears the signal also of sockets that are no longer read, which otherwise would be readable forever; of the
        # others it may clear the signal of a message that has just arrived.
        have_more = [has_message(socket) for fd in self._stirred_links if (socket := self._linked.get(fd)) is not None]
        self._stirred_links.clear()
        self._are_links_used = any(have_more) or (self._links is not None and self._links.is_dialling)
        return False

    def _hand_over(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        self._is_stirred = True
        try:
            send_multipart(self._socket, [peer, *parts])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def _recv_linked(self) -> tuple[int, list[Frame]] | None:
        """Return the next message of another machine; a host that we dialled gets a beat, so that it knows its peer."""
        assert self._links is not None
        received = self._links.recv()
        for host in self._links.new_connections():
            self._relay.lead(host, host)
            self._relay.beat()
        return received

    def _handle_messages(self, neighbour: int, parts: Sequence[Frame]) -> None:
        try:
            for source, senders, receivers, frames in self._relay.receive(neighbour, parts):
                # An agent sends only messages of itself and its ranks.
                known = tuple(sender for sender in senders if self._homes.get(sender) == source)
                if receivers != [CONTROLLER]:
                    known = ()
                if known:
                    self._arrived.append((known if len(known) > 1 else known[0], frames))
                self._relay.dropped += len(senders) - len(known)
        except WireError:
            self._relay.dropped += 1

    def _watch(self, socket: zmq.Socket[bytes], is_open: bool) -> None:
        fd = int(socket.getsockopt(zmq.FD))
        if is_open:
            self._linked[fd] = socket
            self._poller.register(fd, select.EPOLLIN)
            self._stirred_links.add(fd)
        else:
            del self._linked[fd]
            self._stirred_links.discard(fd)
            self._poller.unregister(fd)


class ZmqRank(Wakeable):
    """A rank's transport: connected to the controller, to the ranks that it calls, and to those that call it.

    Args:
        address: of the controller; empty if that is on another machine, and reached through the gateway.
        name: of the rank on the wire.
        own_address: where the rank listens.
        gateway: address of its host agent, for processes of other hosts; empty if there are none.
        has_line: whether it connects to the controller without ZeroMQ, and so to this one only.

    Attributes:
        meters: counts the frames that it sends.
        shares: whether large frames for processes of this machine stay in shared memory.
    """

    def __init__(
        self, address: str, name: Peer, own_address: str, gateway: str = "", *, has_line: bool = False
    ) -> None:
        super().__init__()
        self.meters = Meters(place_of(name))
        self._name = name
        self._context = zmq.Context()
        self._poller = select.poll()
        self._poller.register(self._wake, select.POLLIN)
        self._sockets: dict[int, zmq.Socket[bytes]] = {}  # by descriptor, like the following
        self._names: dict[int, Peer] = {}
        self._stirred: set[int] = set()
        self._ready: deque[int] = deque()
        self._dealers: dict[Peer, int] = {}
        self._to_myself: deque[list[Frame]] = deque()
        self._received = 0
        self._remote_peers: set[Peer] = set()  # peers that are reached through the gateway
        self._router = self._new_socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(own_address)
        if own_address.startswith("ipc://"):
            os.chmod(own_address.removeprefix("ipc://"), 0o600)
        self._router_fd = self._watch(self._router)
        self.shares = may_look_at_parent()  # the agent, which started this rank for this user
        share(self.shares)
        self._line = _line_to(address, name) if address and has_line else None
        if self._line is not None:
            self._poller.register(self._line.fd, select.POLLIN)
        elif address:
            self._dealers[CONTROLLER] = self._connect(CONTROLLER, address)
        else:
            self._remote_peers.add(CONTROLLER)
        self._gateway = PacketSocket.connect(gateway.removeprefix("ipc://")) if gateway else None
        if self._gateway is not None:
            self._gateway.send([name])
            self._poller.register(self._gateway.fd, select.POLLIN)

    @property
    def unsent_nbytes(self) -> int:
        """Size of what waits until the controller or the host agent reads; without what ZeroMQ holds."""
        return sum(end.unsent_nbytes for end in (self._line, self._gateway) if end is not None)

    def connect(self, peer: Peer, address: str) -> None:
        """Connect to a rank that this one will call; without an address it is on another host, behind the gateway."""
        if address:
            self._dealers[peer] = self._connect(peer, address)
        else:
            self._remote_peers.add(peer)

    def _connect(self, peer: Peer, address: str) -> int:
        socket = self._new_socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self._name)
        socket.connect(address)
        fd = self._watch(socket)
        self._names[fd] = peer
        return fd

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        return socket

    def _watch(self, socket: zmq.Socket[bytes]) -> int:
        fd = int(socket.getsockopt(zmq.FD))
        self._sockets[fd] = socket
        self._poller.register(fd, select.POLLIN)
        self._stirred.add(fd)
        return fd

    def forget(self, peer: Peer) -> None:
        """Release what is kept for a process that has died."""
        forget(peer)

    def disconnect(self, peer: Peer) -> None:
        """Close a connection; unsent messages are dropped."""
        self._remote_peers.discard(peer)
        forget(peer)
        fd = self._dealers.pop(peer, None)
        if fd is not None:
            del self._names[fd]
            self._poller.unregister(fd)
            self._stirred.discard(fd)
            if fd in self._ready:
                self._ready.remove(fd)
            self._sockets.pop(fd).close(linger=0)

    def wait(self, timeout_s: float | None) -> None:
        """Return when a message may have arrived, `wake` was called, or the time is up."""
        if self._stirred:
            self._settle()
        if not self._to_myself and not self._ready:
            self._poll(None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999)))

    def send(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        """Send a message without blocking; returns False if no such peer is connected."""
        as_sent = parts
        if peer in self._remote_peers:
            assert self._gateway is not None
            self._gateway.send([peer, *parts])
            self._watch_unsent(self._gateway)
        elif peer == self._name:
            self._to_myself.append(_as_received(parts))
        else:
            if len(parts) > 1 and self.shares:
                as_sent = refer(parts, peer)
            if self._line is not None and peer == CONTROLLER:
                self._line.send(as_sent)
                self._watch_unsent(self._line)
            elif not self._hand_over(peer, as_sent):
                return False
        if len(parts) > 1:
            self.meters.sent(place_of(peer), parts, as_sent)
        return True

    def _watch_unsent(self, end: PacketSocket) -> None:
        if end.has_unsent:
            self._poller.register(end.fd, select.POLLIN | select.POLLOUT)

    def _hand_over(self, peer: Peer, parts: Sequence[Frame]) -> bool:
        if (fd := self._dealers.get(peer)) is not None:
            send_multipart(self._sockets[fd], parts)
            self._stirred.add(fd)
            return True
        self._stirred.add(self._router_fd)
        try:
            send_multipart(self._router, [peer, *parts])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                forget(peer)
                return False
            raise
        return True

    def flush(self) -> None:
        """Do nothing: messages are sent at once."""

    def recv(self) -> tuple[Peer, list[Frame]] | None:
        """Return the next message and its sender, or None; connections take turns."""
        if self._to_myself:  # before messages that others may send in response to it
            return self._name, self._to_myself.popleft()
        self._received += 1
        if self._stirred:
            self._settle()
        if not self._ready or not self._received % _LOOK_EVERY:
            self._poll(0)
        while self._ready:
            fd = self._ready.popleft()
            socket = self._sockets.get(fd)
            if socket is None:
                received = self._recv_packets(fd)
                if received is None:
                    continue
                return received
            self._stirred.add(fd)
            try:
                first = _recv(socket, _NOBLOCK)
            except zmq.Again:
                continue
            peer = self._names.get(fd) or first  # for a ROUTER the first frame is the name
            if peer is not first:
                received = peer, recv_rest(socket, [first])
            elif not _get(socket, _RCVMORE):
                received = peer, []
            else:
                received = peer, recv_rest(socket, [_recv(socket, _NOBLOCK)])
            return peer, resolve(received[1], peer)
        return None

    def _recv_packets(self, fd: int) -> tuple[Peer, list[Frame]] | None:
        """Read a message that came without ZeroMQ, from the controller or through the gateway."""
        is_direct = self._line is not None and self._line.fd == fd
        end = self._line if is_direct else self._gateway
        assert end is not None
        if end.has_unsent:
            end.flush()
            if not end.has_unsent:
                self._poller.register(fd, select.POLLIN)
        parts = end.recv()
        if parts is None:
            if end.is_over:  # the other end has ended, and this rank soon will
                self._poller.unregister(fd)
            return None
        if is_direct:
            return CONTROLLER, resolve(parts, CONTROLLER)
        peer, *frames = parts
        self._remote_peers.add(bytes(peer))  # the answer goes the same way
        return bytes(peer), frames

    def close(self) -> None:
        """Close all connections; sent messages linger for up to a second."""
        if self._event is not None:
            self._event = None
            for socket in self._sockets.values():
                socket.close()
            for end in (self._line, self._gateway):
                if end is not None:
                    end.close(LINGER_MS / 1e3)
            self._context.term()

    def _settle(self) -> None:
        """Find the stirred sockets that have a message; an interrupt may arrive between any two steps."""
        for fd in list(self._stirred):
            if has_message(self._sockets[fd]) and fd not in self._ready:
                self._ready.append(fd)
            self._stirred.discard(fd)

    def _poll(self, timeout_ms: int | None) -> None:
        for fd, _ in self._poller.poll(timeout_ms):
            if fd == self._wake:
                self._forget_wake()
            elif fd in self._sockets:
                self._stirred.add(fd)
            elif fd not in self._ready:
                self._ready.append(fd)
        if self._stirred:
            self._settle()


def _line_to(address: str, name: Peer) -> PacketSocket | None:
    """Connect a rank to the controller without ZeroMQ; None if the controller has just ended, and the rank soon will."""
    try:
        line = PacketSocket.connect(path_of_lines(address))
    except OSError:
        return None
    line.heads = 1
    line.send([name])
    return line


def _as_received(parts: Sequence[Frame]) -> list[Frame]:
    """Copies, as if the message had come from another process: the receiver may write to its frames."""
    first, *rest = parts
    return [bytes(first), *[part if is_for_all(part) else memoryview(bytearray(part)) for part in rest]]
