"""Limits unauthenticated connections to a port of the session: their number and their duration; counts the refused ones.

Theory of operation
===================

A client that connects to a port costs a descriptor until it proves, in CURVE's handshake, that it has the session's keys.
libzmq gives up handshakes that take longer than `HANDSHAKE_MS`, but does not bound their number; at the limit of descriptors it
calls accept() in an endless loop. So a socket monitor reports each connection to this module. A client that has the keys needs
milliseconds for the handshake, or a second or two where a thousand connect at once, and it needs this process to check its
proof; until then its proof waits. Of the connections that take longer, `MAX_WAITING` may stay, and all connections together may
use at most half of the remaining descriptors; the oldest are closed first. Where few descriptors are left, all unauthenticated
connections are closed. This includes connections that are not accepted yet; one descriptor is kept in reserve to accept them. A
connection that sends more bytes than a handshake takes is closed, too.

The monitor reports that a handshake succeeded, but not on which connection. This module attributes the success to the first
connection that has sent a proof, and corrects that when another connection sends more bytes than are possible before success.

A client with the keys also gives up, and tries again, while this process is stopped (the lid of a laptop is closed) or its
interpreter is blocked. So after a pause of more than `PATIENCE_S` between two calls of `HandshakeGuard.look`, connections that
end then, or for as long after that, are not counted as refused: they may have waited for this process. A connection with
another key is always counted.

The descriptors belong to libzmq, and may refer to other files by the time that the monitor reports them. So this module closes
none of them: it shuts a connection down, after it has checked that it is one to this port, and libzmq then sees its end.
(Unbinding and binding again would also end the established connections.)
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import time
from itertools import islice
from typing import Any

import zmq

from monarch_kernel.net.hosts import tcp
from monarch_kernel.net.transport.zmq_utils import has_message

__all__ = ["BACKLOG", "HANDSHAKE_MS", "MAX_WAITING", "HandshakeGuard", "free_descriptors", "read_event"]

HANDSHAKE_MS = 5000
BACKLOG = 1024
"""The kernel silently drops connections when the accept queue is full; clients, ours included, retry after 1 s or more."""

PATIENCE_S = 2.0
MAX_WAITING = 128
"""Of the connections that have waited for longer than `PATIENCE_S`."""

MAX_AT_ONCE = 2048
RESERVE = 16
"""When fewer descriptors than this are left, no unauthenticated connection may stay."""

_PROOF_NBYTES = 300
"""More than a client sends in CURVE before its proof (ZMTP's greeting and HELLO: 266), less than with the proof."""

_MAX_PROOF_NBYTES = 1000
"""With the proof a client has sent about 600."""

_MAX_HANDSHAKE_NBYTES = 4096
"""A client that sends more before it is authenticated could fill memory: libzmq buffers a frame until it is complete."""

_GLANCE_S = 0.05
_LET_IN_S = 0.2
"""After a pause, all connections whose proofs are waiting are let in within this time."""

# Not EVENT_HANDSHAKE_FAILED_PROTOCOL: libzmq 4.3.5 loses its errno when it reports this event, and a connection on which
# something was sent twice (CURVE counts) then hangs instead of ending.
_WATCHED = int(
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # such a connection may stay
    | zmq.EVENT_DISCONNECTED
)


class HandshakeGuard:
    """The connections that a socket has accepted, and whose handshake is not complete.

    Args:
        context: of the socket.
        listener: the socket, not bound yet.

    Attributes:
        refused: number of connections that ended before they were authenticated, without those that may have waited for us.
        monitor: socket to poll; call `look` when it is readable.
    """

    def __init__(self, context: zmq.Context[Any], listener: zmq.Socket[bytes]) -> None:
        self.refused = 0
        address = f"inproc://strangers-{id(self)}"
        listener.monitor(address, _WATCHED)
        self.monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.monitor.rcvhwm = 0  # else libzmq's thread would block, and all connections with it
        self.monitor.connect(address)
        self._ports: set[int] = set()
        self._listen_fds: list[int] = []  # the descriptors on which libzmq listens
        self._tended = 0
        self._looked_at = time.monotonic()
        self._counts_from = 0.0
        self._glance_at = 0.0
        self._tended_at = self._let_in_at = 0.0  # connections from before this could have been let in
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._waiting: dict[int, float] = {}  # descriptor -> when it was accepted, oldest first
        self._assumed_authenticated: dict[int, float] = {}  # sent no more than a proof: may be a wrong guess
        self._closing: set[int] = set()
        self._most = min(MAX_AT_ONCE, free_descriptors() // 2)

    def look(self) -> None:
        """Process the connections that were accepted, authenticated and closed since the last call."""
        now = time.monotonic()
        if now > self._looked_at + PATIENCE_S:
            self._counts_from = now + PATIENCE_S
        self._looked_at = now
        if has_message(self.monitor):
            self._read()
        if self._waiting:
            self._close_oldest(len(self._waiting) - self._most)
            if (many := len(self._waiting) - MAX_WAITING) > 0:
                self._close_oldest(sum(came < now - PATIENCE_S for came in islice(self._waiting.values(), many)))
            if now >= self._glance_at:
                self._glance_at = now + _GLANCE_S
                self._close_talkative()

    def _read(self) -> int:
        """Read the monitor's events; returns the number of completed handshakes."""
        now, n_authenticated = time.monotonic(), 0
        while has_message(self.monitor):
            kind, value = read_event(self.monitor)
            if kind == zmq.EVENT_ACCEPTED:
                self._waiting[value] = now
                self._closing.discard(value)
                self._assumed_authenticated.pop(value, None)
            elif kind in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
                self._note_authenticated()
                n_authenticated += 1
                self.refused += kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            elif kind == zmq.EVENT_LISTENING:
                self._listen_fds.append(value)
                self._ports.add(_port_of(value))
            else:
                is_known = value in self._waiting or value in self._closing
                self.refused += is_known and now >= self._counts_from
                self._waiting.pop(value, None)
                self._closing.discard(value)
                self._assumed_authenticated.pop(value, None)
        return n_authenticated

    def tend(self) -> None:
        """Update the number of connections that may wait, by the descriptors that are left; call this a few times a second."""
        self.look()
        self._tended += 1
        if not self._waiting and self._tended % 4:
            return
        free = free_descriptors()
        self._most = min(MAX_AT_ONCE, (free + len(self._waiting)) // 2) if free >= RESERVE else 0
        if not self._most:
            self._close_oldest(len(self._waiting))
            self._refuse_queued()
        if (now := time.monotonic()) >= self._tended_at + _LET_IN_S:
            self._tended_at, self._let_in_at = now, self._tended_at

    def close(self) -> None:
        """Stop monitoring; call this before the owner closes the socket."""
        if self._spare >= 0:
            os.close(self._spare)
        self.monitor.close(linger=0)

    def _note_authenticated(self) -> None:
        """Handle a completed handshake, successful or not; libzmq does not say of which connection."""
        for fd, came in self._waiting.items():
            if self._nbytes_received(fd) >= _PROOF_NBYTES:
                del self._waiting[fd]
                self._assumed_authenticated[fd] = came
                return
        if self._waiting:
            self._waiting.popitem()

    def _close_oldest(self, count: int) -> None:
        """Close the connections that have waited longest, except those whose proofs have had no time to be checked."""
        for fd, came in list(islice(self._waiting.items(), max(0, count))):
            if self._waiting.get(fd) != came:  # it was authenticated or closed meanwhile
                continue
            nbytes = self._nbytes_received(fd)
            if came < self._let_in_at or nbytes < _PROOF_NBYTES:
                self._hang_up(fd, nbytes)

    def _close_talkative(self) -> None:
        """Close connections that have sent more than a handshake takes."""
        counts = {fd: self._nbytes_received(fd) for fd in self._waiting}
        talkative = [fd for fd, nbytes in counts.items() if nbytes > _MAX_HANDSHAKE_NBYTES]
        if talkative:
            self._read()  # an authenticated one could send that much; libzmq reports its success before it can
        for fd in talkative:
            if fd in self._waiting:
                self._hang_up(fd, counts[fd])

    def _hang_up(self, fd: int, nbytes: int) -> None:
        """Close a connection, unless it is an authenticated one for which another was mistaken."""
        if nbytes >= _PROOF_NBYTES and self._is_authenticated(fd, nbytes):
            return
        del self._waiting[fd]
        for port in self._ports:
            tcp.hang_up(fd, port)
        self._closing.add(fd)

    def _is_authenticated(self, fd: int, nbytes: int) -> bool:
        """Correct the guess which connection was authenticated, if it was this one; returns False if it was not.

        A connection that sends more than a proof is authenticated. If all connections that were taken for authenticated have
        sent that much, too, there is a success that was not read yet: libzmq reports each before its connection can send
        anything.
        """
        came = self._waiting[fd]
        while True:
            for other in list(self._assumed_authenticated):
                theirs = self._nbytes_received(other)
                if not 0 <= theirs <= _MAX_PROOF_NBYTES:  # the guess was right, or it has closed
                    del self._assumed_authenticated[other]
                elif theirs < nbytes:
                    self._waiting[other] = self._assumed_authenticated.pop(other)
                    del self._waiting[fd]
                    if nbytes <= _MAX_PROOF_NBYTES:
                        self._assumed_authenticated[fd] = came
                    return True
            n_authenticated = self._read()
            if self._waiting.get(fd) != came:  # it has closed, or was the one
                return True
            if not n_authenticated:
                return False

    def _nbytes_received(self, fd: int) -> int:
        """The bytes received on a connection to one of the ports; -1 if the descriptor is not, or no longer, one."""
        return max((tcp.nbytes_received(fd, port) for port in self._ports), default=-1)

    def _refuse_queued(self) -> None:
        """Accept the connections in the kernel's queues, and close them: libzmq can't, and would try forever."""
        if not self._listen_fds:
            return
        if self._spare >= 0:
            os.close(self._spare)
        for fd in self._listen_fds:
            listener = socket.socket(fileno=fd)
            try:
                listener.settimeout(0)
                while True:
                    listener.accept()[0].close()
                    self.refused += 1
            except OSError:  # none is left, or libzmq accepted it first
                pass
            finally:
                listener.detach()
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._spare = -1


def read_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Read an event of a monitor socket: what happened, and the descriptor, if it names one."""
    event, _ = monitor.recv_multipart(zmq.NOBLOCK)
    kind, value = struct.unpack("=hi", event)  # zmq.utils.monitor does this, too, but imports asyncio
    return kind, value


def _port_of(fd: int) -> int:
    listener = socket.socket(fileno=fd)
    try:
        return int(listener.getsockname()[1])
    finally:
        listener.detach()


def free_descriptors() -> int:
    """Return the number of files that this process may still open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    try:
        taken = sum(int(fd) < limit for fd in os.listdir("/proc/self/fd"))
    except OSError:
        return 0
    return limit - taken + 1  # the one that listdir() used
