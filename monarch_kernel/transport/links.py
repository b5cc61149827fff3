"""Connections to other hosts: TCP, encrypted and authenticated by CURVE, dialled by either side.

All hosts of a session have one key pair. Who listens has it ask each client for proof that it has the pair, too (CURVE, and a
ZAP handler for its public key); whoever has not is refused and counted, before any of his bytes is looked at.

Who dials knows several addresses of the other, of which some may lead nowhere, or to somebody else. It knocks at all of them at
once, takes the best that answers, and forgets the others. A connection that breaks is made again by ZeroMQ; what it has lost is
sent again by the `Relay`.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from monarch_kernel.transport.sockets import LINGER_MS, has_message, recv_multipart, send_multipart
from monarch_kernel.wire.codec import Frame
from monarch_kernel.wire.config import LinkKeys

__all__ = ["Links", "new_keys"]

PATIENCE_S = 0.15
"""How long a better address has to answer when a worse one has."""

LEFTOVER_S = 1.0
"""Connections that were not taken are closed later: one that ends in its handshake would be taken for a stranger's."""

_ZAP = "inproc://zeromq.zap.01"
_KNOCK, _HERE = b"knock", b"here"
HEARTBEAT_MS = 1000
MAX_FRAME_NBYTES = 16 << 20
"""More than a `Relay` ever puts into one; who announces a larger one, stranger or not, is cut off before it is taken in."""


_STATES = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
_WATCHED = int(
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # such a connection may stay
    | zmq.EVENT_DISCONNECTED
)


def new_keys() -> LinkKeys:
    """A key pair for a new session."""
    public, secret = zmq.curve_keypair()
    return LinkKeys(public.decode(), secret.decode())


@dataclass
class _Dial:
    """Connections to one host, of which one will be taken: address -> socket, the best first."""

    sockets: dict[str, zmq.Socket[bytes]]
    held: list[Sequence[Frame]] = field(default_factory=list)
    answered: dict[str, float] = field(default_factory=dict)


class Links:
    """The connections of one host.

    Args:
        context: of the sockets; has no other ZAP handler.
        host: our number.
        keys: of the session.
        watch: called with each socket that has to be polled, and with False when it is closed.

    Attributes:
        refused: connections of those that have not the keys, or do not speak our protocol.
    """

    def __init__(
        self, context: zmq.Context[Any], host: int, keys: LinkKeys, watch: Callable[[zmq.Socket[bytes], bool], None]
    ) -> None:
        self.refused = 0
        self._context = context
        self._host = host
        self._public, self._secret = keys.public.encode(), keys.secret.encode()
        self._watch = watch
        self._listener: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._zap: zmq.Socket[bytes] | None = None
        self._dials: dict[int, _Dial] = {}
        self._taken: dict[int, zmq.Socket[bytes]] = {}
        self._callers: dict[int, bytes] = {}  # who has dialled us, and the name of his connection
        self._ready: deque[tuple[int, list[Frame]]] = deque()
        self._strangers: dict[int, None] = {}  # descriptors of connections that have not come about yet
        self._states: dict[int, zmq.Socket[bytes]] = {}  # tell whether the connections that we have taken stand
        self._up: set[int] = set()
        self._new: list[int] = []
        self._leftover: list[
            tuple[float, zmq.Socket[bytes]]
        ] = []  # those that were not taken, and when they are closed
        self.port = 0

    # -- connecting

    def listen(self, port: int = 0) -> int:
        """Let others dial us; gives the port.

        Raises:
            OSError: it is taken.
        """
        if self._listener is None:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind(_ZAP)  # first: without it everybody would be let in
            listener = self._new_socket(zmq.ROUTER)
            listener.setsockopt(zmq.ROUTER_HANDOVER, 1)
            listener.setsockopt(zmq.ROUTER_MANDATORY, 1)
            listener.setsockopt(zmq.ZAP_DOMAIN, b"monarch")
            listener.curve_secretkey, listener.curve_publickey = self._secret, self._public
            listener.curve_server = True
            try:
                listener.bind(f"tcp://*:{port or '*'}")
            except zmq.ZMQError as error:
                listener.close(linger=0)
                self._zap.close(linger=0)
                self._zap = None
                raise OSError(error.errno, error.strerror) from None
            self._listener = listener
            self._monitor = listener.get_monitor_socket(_WATCHED)
            self._watch(self._monitor, True)
            self._watch(self._zap, True)
            self.port = int(str(listener.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(":")[2])
            self._watch(listener, True)
        return self.port

    def dial(self, host: int, addresses: Sequence[str]) -> None:
        """Connect to a host by the best of these addresses that answers; a connection that there is ends then."""
        held = self._drop_dial(host)
        dial = self._dials[host] = _Dial({}, held)
        for i, address in enumerate(dict.fromkeys(addresses)):
            socket = self._new_socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, f"H{self._host}/{i}/{time.monotonic_ns()}".encode())
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5 * HEARTBEAT_MS)
            socket.curve_serverkey = socket.curve_publickey = self._public
            socket.curve_secretkey = self._secret
            try:
                socket.connect(address)
            except zmq.ZMQError:  # a name that can't be resolved, or no address at all
                socket.close(linger=0)
                continue
            dial.sockets[address] = socket
            self._watch(socket, True)
            send_multipart(socket, [_KNOCK, str(self._host).encode(), str(host).encode()])

    def hang_up(self, host: int) -> None:
        """End the connection to a host."""
        self._drop_dial(host)
        self._callers.pop(host, None)
        if (socket := self._taken.pop(host, None)) is not None:
            self._end(host, socket)

    def is_up(self, host: int) -> bool:
        """Whether the connection to a host that we have dialled stands, as far as ZeroMQ's own heartbeats tell.

        These are answered by a thread of the library: also by a process that can't say anything itself at the moment.
        """
        monitor = self._states.get(host)
        while monitor is not None and has_message(monitor):
            kind, _ = _read_event(monitor)
            (self._up.add if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED else self._up.discard)(host)
        return host in self._up

    def is_connected(self, host: int) -> bool:
        """Whether there is a connection to a host, which may be broken at the moment, or is about to be."""
        return host in self._taken or host in self._callers or host in self._dials

    @property
    def is_dialling(self) -> bool:
        """Whether somebody was dialled who has not answered yet."""
        return bool(self._dials)

    def new_connections(self) -> list[int]:
        """The hosts that we have dialled, and that have answered since the last time."""
        new, self._new = self._new, []
        return new

    # -- messages

    def send(self, host: int, parts: Sequence[Frame]) -> bool:
        """Hand a message over without blocking; False if no such host is connected. To one that was dialled it waits."""
        if (socket := self._taken.get(host)) is not None:
            send_multipart(socket, parts)
            return True
        if (name := self._callers.get(host)) is not None and self._listener is not None:
            with contextlib.suppress(zmq.ZMQError):  # it has gone a moment ago
                send_multipart(self._listener, [name, *parts])
                return True
        if (dial := self._dials.get(host)) is not None:
            dial.held.append(parts)
            return True
        return False

    def recv(self) -> tuple[int, list[Frame]] | None:
        """Give the next message and the host that has sent it, or None if none has arrived."""
        if not self._ready:
            self._ready.extend(self._receive())
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Close all connections."""
        for host in list(self._dials):
            self._drop_dial(host)
        for _, socket in self._leftover:
            self._close(socket)
        for host in list(self._taken):
            self._end(host, self._taken.pop(host), linger_ms=LINGER_MS)
        if self._listener is not None and self._monitor is not None and self._zap is not None:
            self._listener.disable_monitor()
            self._close(self._monitor)
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

    def _end(self, host: int, socket: zmq.Socket[bytes], linger_ms: int = 0) -> None:
        """Close a connection that was taken."""
        self._up.discard(host)
        if (monitor := self._states.pop(host, None)) is not None:
            socket.disable_monitor()
            monitor.close(linger=0)
        self._close(socket, linger_ms)

    def _drop_dial(self, host: int) -> list[Sequence[Frame]]:
        dial = self._dials.pop(host, None)
        for socket in dial.sockets.values() if dial else ():
            self._close(socket)
        return dial.held if dial else []

    def _receive(self) -> Iterator[tuple[int, list[Frame]]]:
        self._answer_zap()
        self._count_refusals()
        listener = self._listener
        while listener is not None and (parts := recv_multipart(listener)) is not None:
            name, *rest = parts
            if len(rest) == 3 and rest[0] == _KNOCK:
                if bytes(rest[2]) == str(self._host).encode():  # else it has taken us for another
                    with contextlib.suppress(zmq.ZMQError):
                        send_multipart(listener, [name, _HERE])
            elif (host := _host_of(bytes(name))) is not None and rest:
                self._callers[host] = bytes(name)
                yield host, rest
        for host, socket in list(self._taken.items()):
            while self._taken.get(host) is socket and (parts := recv_multipart(socket)) is not None:
                if parts[0] != _HERE:
                    yield host, parts
        now = time.monotonic() if self._dials or self._leftover else 0.0
        while self._leftover and now >= self._leftover[0][0]:
            self._close(self._leftover.pop(0)[1])
        for host, dial in list(self._dials.items()):
            for address, socket in dial.sockets.items():
                if address not in dial.answered and (parts := recv_multipart(socket)) is not None:
                    dial.answered[address] = now
            self._choose(host, dial, now)

    def _choose(self, host: int, dial: _Dial, now: float) -> None:
        if not dial.answered:
            return
        best = next(address for address in dial.sockets if address in dial.answered)
        is_first = best == next(iter(dial.sockets))
        if not is_first and now < min(dial.answered.values()) + PATIENCE_S:
            return
        del self._dials[host]
        before = self._taken.pop(host, None)
        taken = self._taken[host] = dial.sockets.pop(best)
        self._new.append(host)
        for parts in dial.held:
            send_multipart(taken, parts)
        if before is not None:
            self._end(host, before)
        self._states[host] = taken.get_monitor_socket(_STATES)
        self._up.add(host)
        self._leftover += [(now + LEFTOVER_S, socket) for socket in dial.sockets.values()]

    def _answer_zap(self) -> None:
        """Let in who has the key pair (RFC 27/ZAP)."""
        while self._zap is not None and (parts := recv_multipart(self._zap)) is not None:
            version, request, *_, mechanism, key = (bytes(part) for part in parts)
            good = mechanism == b"CURVE" and z85.encode(key) == self._public
            status = (b"200", b"OK") if good else (b"400", b"not of this session")
            send_multipart(self._zap, [version, request, *status, b"", b""])

    def _count_refusals(self) -> None:
        """Count the connections that end before they have come about: not all failures have an event of their own.

        The events of handshakes do not say whose they are: they are taken for the youngest one's, since strangers may stay.
        """
        while self._monitor is not None and has_message(self._monitor):
            kind, fd = _read_event(self._monitor)
            if kind == zmq.EVENT_ACCEPTED:
                self._strangers[fd] = None
            elif kind in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
                if self._strangers:
                    self._strangers.popitem()
                self.refused += kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            elif fd in self._strangers:
                del self._strangers[fd]
                self.refused += 1


def _read_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """What a socket that tells of connections says: what has happened, and to which descriptor, if it says so."""
    event, _ = monitor.recv_multipart(zmq.NOBLOCK)
    kind, value = struct.unpack("=hi", event)  # zmq.utils.monitor does that, too, but imports asyncio for it
    return kind, value


def _host_of(name: bytes) -> int | None:
    """The number of the host that a connection says to be of."""
    number = name[1:].partition(b"/")[0]
    return int(number) if name[:1] == b"H" and number.isdigit() else None
