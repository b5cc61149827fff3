"""Connections to other hosts: TCP, encrypted and authenticated by CURVE, dialled by either side.

All hosts of a session have one key pair. A listener requires each client to prove that it has the pair, too (CURVE, and a ZAP
handler for its public key). It refuses and counts clients that have not, before it looks at any of their bytes.

A host that dials knows several addresses of the other, some of which may lead nowhere, or to another host. It connects to all
of them at once, takes the best that answers, and closes the others. ZeroMQ restores a broken connection; the `Relay` sends
again what the connection has lost.

A brief network failure breaks no connection: TCP only waits, twice as long after each attempt, even when the network is back.
So while nothing gets through (`tcp.is_stuck`), the host that dialled makes new connections again and again, each with a timeout
little longer than the round trip of a packet (`revive`), and the first that is answered replaces the stalled one.

One key pair for all hosts of a session is enough, because they run code for each other anyway. It is made with the session
and reaches the engine by channels that other users can't read.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from monarch_kernel.net.hosts import tcp
from monarch_kernel.net.hosts.handshakes import BACKLOG, HANDSHAKE_MS, HandshakeGuard, read_event
from monarch_kernel.net.transport.zmq_utils import LINGER_MS, has_message, recv_multipart, send_multipart
from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.config import EVERYWHERE, LinkKeys

__all__ = ["Links", "new_keys"]

PATIENCE_S = 0.15
"""How long a better address may take to answer after a worse one has answered."""

LEFTOVER_S = 1.0
"""Connections that were not chosen are closed this much later: one that ends in its handshake would be counted as refused."""

KNOCK_S = 0.04, 1.0
"""Minimum and maximum time to wait for the answer to a connection attempt before the next one."""

_KNOCK_AGAIN_MS = 10
_BROKEN_S = 0.3
"""How long a broken connection is left to ZeroMQ, which reconnects."""

_KNOCKS_S = 3.0
"""After this long reconnecting is left to ZeroMQ, which tries about once a second: the host may never be there again."""

_ZAP = "inproc://zeromq.zap.01"
_KNOCK, _HERE = b"knock", b"here"
HEARTBEAT_MS = 1000
MAX_FRAME_NBYTES = 512 << 10
"""More than a `Relay` ever puts into a frame; libzmq disconnects a peer that announces a larger one, authenticated or not."""


_STATES = int(zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)


def new_keys() -> LinkKeys:
    """Make a key pair for a new session."""
    public, secret = zmq.curve_keypair()
    return LinkKeys(public.decode(), secret.decode())


class _Connection:
    """A connection that this host dialled: the socket, and its known state."""

    def __init__(self, address: str, socket: zmq.Socket[bytes]) -> None:
        self.address = address
        self.socket = socket
        self.is_up = False
        self.broken_at: float | None = None
        self.is_left = False  # to ZeroMQ, which reconnects at some time
        self.round_trip_s = 0.0
        self._fd = -1
        self._monitor = socket.get_monitor_socket(_STATES)

    def look(self, now: float) -> None:
        """Read the events of the connection."""
        while has_message(self._monitor):
            kind, value = read_event(self._monitor)
            if kind == zmq.EVENT_CONNECTED:
                self._fd = value
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_up, self.broken_at, self.is_left = True, None, False
            else:
                self.is_up, self._fd = False, -1
                self.broken_at = now if self.broken_at is None else self.broken_at

    @property
    def has_reached(self) -> bool:
        """Whether TCP is connected; the handshake may not be complete."""
        return self._fd >= 0

    @property
    def is_stuck(self) -> bool:
        """Whether nothing gets through although TCP is connected."""
        if self._fd < 0:
            return False
        self.round_trip_s = tcp.round_trip_s(self._fd) or self.round_trip_s
        return tcp.is_stuck(self._fd)

    def close(self, linger_ms: int) -> None:
        """Close the connection."""
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=linger_ms)


@dataclass
class _Dial:
    """Connections to one host, one of which will be taken: address -> connection, the best first.

    An attempt to replace a stalled connection waits ``knock_s`` for each answer, and repeats ``until`` then.
    """

    connections: dict[str, _Connection]
    held: list[Sequence[Frame]] = field(default_factory=list)
    answered: dict[str, float] = field(default_factory=dict)
    knock_s: float = 0.0
    until: float = 0.0


class Links:
    """The connections of one host.

    Args:
        context: of the sockets; has no other ZAP handler.
        host: our number.
            keys: of the session.
            watch: called with each socket that must be polled and True, and with False when it is closed.

    """

    def __init__(
        self, context: zmq.Context[Any], host: int, keys: LinkKeys, watch: Callable[[zmq.Socket[bytes], bool], None]
    ) -> None:
        self._context = context
        self._host = host
        self._public, self._secret = keys.public.encode(), keys.secret.encode()
        self._watch = watch
        self._listener: zmq.Socket[bytes] | None = None
        self._guard: HandshakeGuard | None = None
        self._zap: zmq.Socket[bytes] | None = None
        self._dials: dict[int, _Dial] = {}
        self._taken: dict[int, _Connection] = {}
        self._callers: dict[int, bytes] = {}  # hosts that have dialled us -> name of the connection
        self._ready: deque[tuple[int, list[Frame]]] = deque()
        self._new: list[int] = []
        self._leftover: list[tuple[float, _Connection]] = []  # connections that were not chosen, and when to close them
        self._ports: dict[str, int] = {}  # by the address of the interface

    # -- connecting

    @property
    def port(self) -> int:
        """The first port at which this host listens; 0 if it does not."""
        return next(iter(self._ports.values()), 0)

    def listen(self, port: int = 0, at: str = EVERYWHERE) -> int:
        """Let others connect; returns the port.

        Args:
            port: the port, if this host does not listen at the address yet; 0 for a free one.
            at: the address of the interface; where it listens at one already, it then has a second port.

        Raises:
            OSError: the port is taken.
        """
        if self._listener is None:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind(_ZAP)  # first: without it every client would be let in
            listener = self._new_socket(zmq.ROUTER)
            listener.setsockopt(zmq.ROUTER_HANDOVER, 1)
            listener.setsockopt(zmq.ROUTER_MANDATORY, 1)
            listener.setsockopt(zmq.ZAP_DOMAIN, b"monarch")
            listener.curve_secretkey, listener.curve_publickey = self._secret, self._public
            listener.curve_server = True
            listener.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            listener.setsockopt(zmq.BACKLOG, BACKLOG)
            guard = HandshakeGuard(self._context, listener)
            try:
                self._bind(listener, port, at)
            except OSError:
                guard.close()
                listener.close(linger=0)
                self._zap.close(linger=0)
                self._zap = None
                raise
            self._listener = listener
            self._guard = guard
            self._watch(guard.monitor, True)
            self._watch(self._zap, True)
            self._watch(listener, True)
        elif at not in self._ports:
            self._bind(self._listener, port, at)
        return self._ports[at]

    def _bind(self, listener: zmq.Socket[bytes], port: int, at: str) -> None:
        try:
            listener.bind(f"tcp://{at}:{port or '*'}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None
        self._ports[at] = int(str(listener.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(":")[2])

    def dial(self, host: int, addresses: Sequence[str]) -> None:
        """Connect to a host by the best of these addresses that answers; this then replaces an existing connection."""
        dial = self._dials[host] = _Dial({}, self._drop_dial(host))
        for number, address in enumerate(dict.fromkeys(addresses)):
            with contextlib.suppress(zmq.ZMQError):
                dial.connections[address] = self._connect(host, number, address)

    def revive(self, now: float) -> None:
        """Connect again to dialled hosts to which nothing gets through; call this several times a second."""
        for host in list(self._taken):
            with contextlib.suppress(zmq.ZMQError):  # the name can't be resolved at the moment
                self._revive(host, self._taken[host], now)

    def _revive(self, host: int, taken: _Connection, now: float) -> None:
        taken.look(now)
        dial = self._dials.get(host)
        if dial is None:
            is_broken = taken.broken_at is not None and now >= taken.broken_at + _BROKEN_S and not taken.is_left
            if is_broken or taken.is_stuck:
                shortest, longest = KNOCK_S
                self._knock(host, taken.address, min(longest, max(shortest, 4 * taken.round_trip_s)), now + _KNOCKS_S)
        elif dial.knock_s:
            (knocking,) = dial.connections.values()
            knocking.look(now)
            if knocking.is_stuck:
                self._put_off(host, knocking, now)
                self._knock(host, taken.address, dial.knock_s, dial.until)
            elif now >= dial.until and not knocking.has_reached:
                self._put_off(host, knocking, now)
                patient = self._taken[host] = self._connect(host, 0, taken.address, KNOCK_S[1])
                patient.is_left = True
                self._end(taken)

    def _put_off(self, host: int, knocking: _Connection, now: float) -> None:
        """Abandon an attempt; it is closed later, as one that ends in its handshake would be counted as refused."""
        del self._dials[host]
        self._leftover.append((now + LEFTOVER_S, knocking))

    def _knock(self, host: int, address: str, knock_s: float, until: float) -> None:
        connection = self._connect(host, 0, address, knock_s, is_hasty=True)
        self._dials[host] = _Dial({address: connection}, knock_s=knock_s, until=until)

    def _connect(
        self, host: int, number: int, address: str, timeout_s: float = 0.0, *, is_hasty: bool = False
    ) -> _Connection:
        """Start a connection; if ``is_hasty``, ZeroMQ repeats it quickly.

        Raises:
            zmq.ZMQError: the address is a name that can't be resolved, or not an address.
        """
        socket = self._new_socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, f"H{self._host}/{number}/{time.monotonic_ns()}".encode())
        socket.setsockopt(zmq.CONNECT_TIMEOUT, round(1000 * timeout_s))
        if is_hasty:
            socket.setsockopt(zmq.RECONNECT_IVL, _KNOCK_AGAIN_MS)
        else:
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5 * HEARTBEAT_MS)
        socket.curve_serverkey = socket.curve_publickey = self._public
        socket.curve_secretkey = self._secret
        connection = _Connection(address, socket)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            connection.close(0)
            raise
        self._watch(socket, True)
        send_multipart(socket, [_KNOCK, str(self._host).encode(), str(host).encode()])
        return connection

    def hang_up(self, host: int) -> None:
        """Close the connection to a host."""
        self._drop_dial(host)
        self._callers.pop(host, None)
        if (taken := self._taken.pop(host, None)) is not None:
            self._end(taken)

    def is_up(self, host: int) -> bool:
        """Whether the connection to a dialled host is up, according to ZeroMQ's own heartbeats.

        A thread of the library answers these, even in a process that can't send anything itself at the moment.
        """
        taken = self._taken.get(host)
        if taken is None:
            return False
        taken.look(time.monotonic())
        return taken.is_up

    def is_connected(self, host: int) -> bool:
        """Whether there is a connection to a host, which may be broken at the moment, or still being made."""
        return host in self._taken or host in self._callers or host in self._dials

    @property
    def refused(self) -> int:
        """Number of connections from clients that lack the keys, or do not speak this protocol."""
        return 0 if self._guard is None else self._guard.refused

    def tend(self) -> None:
        """Keep the cost of unauthenticated connections within limits; call this a few times a second."""
        if self._guard is not None:
            self._guard.tend()

    @property
    def is_dialling(self) -> bool:
        """Whether a dialled host has not answered yet."""
        return bool(self._dials)

    def new_connections(self) -> list[int]:
        """Return the dialled hosts that have answered since the last call."""
        new, self._new = self._new, []
        return new

    # -- messages

    def send(self, host: int, parts: Sequence[Frame]) -> bool:
        """Send a message without blocking; returns False if no such host is connected. A dialled host gets it later."""
        if (taken := self._taken.get(host)) is not None:
            return _hand_over(taken.socket, parts)
        if (name := self._callers.get(host)) is not None and self._listener is not None:
            with contextlib.suppress(zmq.ZMQError):  # the host has just disconnected
                send_multipart(self._listener, [name, *parts])
                return True
        if (dial := self._dials.get(host)) is not None:
            dial.held.append(parts)
            return True
        return False

    def recv(self) -> tuple[int, list[Frame]] | None:
        """Return the next message and the host that sent it, or None if none has arrived."""
        if not self._ready:
            self._ready.extend(self._receive())
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Close all connections."""
        for host in list(self._dials):
            self._drop_dial(host)
        for _, connection in self._leftover:
            self._end(connection)
        for host in list(self._taken):
            self._end(self._taken.pop(host), linger_ms=LINGER_MS)
        if self._listener is not None and self._guard is not None and self._zap is not None:
            self._listener.disable_monitor()
            self._watch(self._guard.monitor, False)
            self._guard.close()
            self._close(self._listener, linger_ms=LINGER_MS)
            self._close(self._zap)
            self._listener = None

    # -- inside

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        return socket

    def _close(self, socket: zmq.Socket[bytes], linger_ms: int = 0) -> None:
        self._watch(socket, False)
        socket.close(linger=linger_ms)

    def _end(self, connection: _Connection, linger_ms: int = 0) -> None:
        """Close a connection that this host dialled."""
        self._watch(connection.socket, False)
        connection.close(linger_ms)

    def _drop_dial(self, host: int) -> list[Sequence[Frame]]:
        dial = self._dials.pop(host, None)
        for connection in dial.connections.values() if dial else ():
            self._end(connection)
        return dial.held if dial else []

    def _receive(self) -> Iterator[tuple[int, list[Frame]]]:
        self._answer_zap()
        if self._guard is not None:
            self._guard.look()
        listener = self._listener
        while listener is not None and (parts := recv_multipart(listener)) is not None:
            name, *rest = parts
            if len(rest) == 3 and rest[0] == _KNOCK:
                if bytes(rest[2]) == str(self._host).encode():  # otherwise it meant another host
                    with contextlib.suppress(zmq.ZMQError):
                        send_multipart(listener, [name, _HERE])
            elif (host := _host_of(bytes(name))) is not None and rest:
                self._callers[host] = bytes(name)
                yield host, rest
        for host, taken in list(self._taken.items()):
            while self._taken.get(host) is taken and (parts := recv_multipart(taken.socket)) is not None:
                if parts[0] != _HERE:
                    yield host, parts
        now = time.monotonic() if self._dials or self._leftover else 0.0
        while self._leftover and now >= self._leftover[0][0]:
            self._end(self._leftover.pop(0)[1])
        for host, dial in list(self._dials.items()):
            for address, connection in dial.connections.items():
                if address not in dial.answered and recv_multipart(connection.socket) is not None:
                    dial.answered[address] = now
            self._choose(host, dial, now)

    def _choose(self, host: int, dial: _Dial, now: float) -> None:
        if not dial.answered:
            return
        best = next(address for address in dial.connections if address in dial.answered)
        is_first = best == next(iter(dial.connections))
        if not is_first and now < min(dial.answered.values()) + PATIENCE_S:
            return
        del self._dials[host]
        before = self._taken.pop(host, None)
        taken = self._taken[host] = dial.connections.pop(best)
        self._new.append(host)
        for parts in dial.held:
            _hand_over(taken.socket, parts)
        if before is not None:
            self._end(before)
        self._leftover += [(now + LEFTOVER_S, connection) for connection in dial.connections.values()]

    def _answer_zap(self) -> None:
        """Admit clients that have the key pair (RFC 27/ZAP)."""
        while self._zap is not None and (parts := recv_multipart(self._zap)) is not None:
            version, request, *_, mechanism, key = (bytes(part) for part in parts)
            good = mechanism == b"CURVE" and z85.encode(key) == self._public
            status = (b"200", b"OK") if good else (b"400", b"not of this session")
            send_multipart(self._zap, [version, request, *status, b"", b""])


def _hand_over(socket: zmq.Socket[bytes], parts: Sequence[Frame]) -> bool:
    """Send on a dialled connection; returns False if there is none: ZeroMQ does not restore one that broke its rules."""
    try:
        send_multipart(socket, parts)
    except zmq.Again:
        return False
    return True


def _host_of(name: bytes) -> int | None:
    """Return the host number in the name of a connection; None if there is none."""
    number = name[1:].partition(b"/")[0]
    return int(number) if name[:1] == b"H" and number.isdigit() else None
