"""Who knocks at a port of ours and is not of the session: how many may stand at the door, for how long, and how many came.

Theory of operation
===================

Whoever connects to a port costs a descriptor until he has proved, by CURVE's handshake, that he has the session's keys. libzmq
gives up those that take longer than `HANDSHAKE_MS`, and does not bound how many there are; at the limit of descriptors it
tries to accept without end. So a monitor tells us of each. Who has the keys needs milliseconds, a second or two where a
thousand come at once, and us to let him in: until then his proof waits. Of those that take longer `MAX_WAITING` may stay, and
of all no more than take half of the descriptors that are left; those that came first are hung up on. Where few descriptors are
left all are, also those that were not accepted yet, for which one is kept in reserve. So are those that say more than a
handshake takes.

That somebody has come in we are told, but not who. We take him for the first who has sent a proof, and put that right if it
turns out that another one says more than can be said before.

Whoever has the keys gives up, too, and comes again, while this process is stopped (the lid of a laptop is closed) or its
interpreter is held. So when nobody has looked for `PATIENCE_S`, who ends then or as long after that is not counted: he may have
waited for us. One whose key is another is a stranger at any time.

The descriptors are libzmq's, and may be others by the time that we are told of them. So nothing of ours closes one: a
connection is shut down, and only if it is one to our port. libzmq then sees its end. (To unbind and to bind again would end the
connections that have come about, too.)
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

__all__ = ["BACKLOG", "HANDSHAKE_MS", "MAX_WAITING", "Strangers", "free_descriptors", "read_event"]

HANDSHAKE_MS = 5000
BACKLOG = 1024
"""Whom the kernel has no room for it tells nothing, and he tries again after a second or more: also many of ours at once."""

PATIENCE_S = 2.0
MAX_WAITING = 128
"""Of those that have waited for longer than this."""

MAX_AT_ONCE = 2048
RESERVE = 16
"""When fewer descriptors than this are left nobody may wait."""

_PROOF_NBYTES = 300
"""More than comes of CURVE before a client's proof (ZMTP's greeting and HELLO: 266), less than with it."""

_MAX_PROOF_NBYTES = 1000
"""With it about 600 have come."""

_MAX_HANDSHAKE_NBYTES = 4096
"""Who says more without having come in wants to fill our memory: libzmq keeps what comes until the frame is whole."""

_GLANCE_S = 0.05
_LET_IN_S = 0.2
"""After we have found time we let in all who wait with a proof within this."""

# Not EVENT_HANDSHAKE_FAILED_PROTOCOL: libzmq 4.3.5 loses its errno when it tells of it, and a connection on which something was
# sent twice (CURVE counts) then stands still, instead of being ended.
_WATCHED = int(
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH  # such a connection may stay
    | zmq.EVENT_DISCONNECTED
)


class Strangers:
    """Connections that a socket has accepted, and that have not come about yet.

    Args:
        context: of the socket.
        listener: the socket, not bound yet.

    Attributes:
        refused: how many have ended before they came about, but for those that may have waited for us in vain.
        monitor: to be polled; when it is readable call `look`.
    """

    def __init__(self, context: zmq.Context[Any], listener: zmq.Socket[bytes]) -> None:
        self.refused = 0
        address = f"inproc://strangers-{id(self)}"
        listener.monitor(address, _WATCHED)
        self.monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.monitor.rcvhwm = 0  # else libzmq's thread would wait for us, and with it all connections
        self.monitor.connect(address)
        self._port = 0
        self._door = -1  # the descriptor on which libzmq listens
        self._tended = 0
        self._looked_at = time.monotonic()
        self._counts_from = 0.0
        self._glance_at = 0.0
        self._tended_at = self._let_in_at = 0.0  # who came before this could have been let in
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._waiting: dict[int, float] = {}  # descriptor -> when it came, the first first
        self._taken_for_in: dict[int, float] = {}  # of those who have said no more than a proof since it may be another
        self._leaving: set[int] = set()
        self._most = min(MAX_AT_ONCE, free_descriptors() // 2)

    def look(self) -> None:
        """See who has come, come in and gone since the last time."""
        now = time.monotonic()
        if now > self._looked_at + PATIENCE_S:
            self._counts_from = now + PATIENCE_S
        self._looked_at = now
        if has_message(self.monitor):
            self._read()
        if self._waiting:
            self._send_away(len(self._waiting) - self._most)
            if (many := len(self._waiting) - MAX_WAITING) > 0:
                self._send_away(sum(came < now - PATIENCE_S for came in islice(self._waiting.values(), many)))
            if now >= self._glance_at:
                self._glance_at = now + _GLANCE_S
                self._send_the_loud_away()

    def _read(self) -> int:
        """Take what libzmq tells; gives how many have come in."""
        now, came_in = time.monotonic(), 0
        while has_message(self.monitor):
            kind, value = read_event(self.monitor)
            if kind == zmq.EVENT_ACCEPTED:
                self._waiting[value] = now
                self._leaving.discard(value)
                self._taken_for_in.pop(value, None)
            elif kind in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
                self._came_in()
                came_in += 1
                self.refused += kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            elif kind == zmq.EVENT_LISTENING:
                self._door = value
                self._port = _port_of(value)
            else:
                is_known = value in self._waiting or value in self._leaving
                self.refused += is_known and now >= self._counts_from
                self._waiting.pop(value, None)
                self._leaving.discard(value)
                self._taken_for_in.pop(value, None)
        return came_in

    def tend(self) -> None:
        """See how many may wait, by the descriptors that are left; call this a few times a second."""
        self.look()
        self._tended += 1
        if not self._waiting and self._tended % 4:
            return
        free = free_descriptors()
        self._most = min(MAX_AT_ONCE, (free + len(self._waiting)) // 2) if free >= RESERVE else 0
        if not self._most:
            self._send_away(len(self._waiting))
            self._empty_the_queue()
        if (now := time.monotonic()) >= self._tended_at + _LET_IN_S:
            self._tended_at, self._let_in_at = now, self._tended_at

    def close(self) -> None:
        """Watch no more; the socket is closed by its owner, and before that."""
        if self._spare >= 0:
            os.close(self._spare)
        self.monitor.close(linger=0)

    def _came_in(self) -> None:
        """One has proved that he has the keys, or has tried to; libzmq does not say which."""
        for fd, came in self._waiting.items():
            if tcp.nbytes_received(fd, self._port) >= _PROOF_NBYTES:
                del self._waiting[fd]
                self._taken_for_in[fd] = came
                return
        if self._waiting:
            self._waiting.popitem()

    def _send_away(self, count: int) -> None:
        """Hang up on those that have waited for longest, but not on a proof that we had no time for yet."""
        for fd, came in list(islice(self._waiting.items(), max(0, count))):
            if self._waiting.get(fd) != came:  # it has come in or gone meanwhile
                continue
            nbytes = tcp.nbytes_received(fd, self._port)
            if came < self._let_in_at or nbytes < _PROOF_NBYTES:
                self._hang_up(fd, nbytes)

    def _send_the_loud_away(self) -> None:
        """Hang up on those that have said more than a handshake takes."""
        counts = {fd: tcp.nbytes_received(fd, self._port) for fd in self._waiting}
        loud = [fd for fd, nbytes in counts.items() if nbytes > _MAX_HANDSHAKE_NBYTES]
        if loud:
            self._read()  # who has come in by now could say that much, and libzmq has told us of it before he could
        for fd in loud:
            if fd in self._waiting:
                self._hang_up(fd, counts[fd])

    def _hang_up(self, fd: int, nbytes: int) -> None:
        """End a connection, if it is not one that has come in when we took another for it."""
        if nbytes >= _PROOF_NBYTES and self._is_in(fd, nbytes):
            return
        del self._waiting[fd]
        tcp.hang_up(fd, self._port)
        self._leaving.add(fd)

    def _is_in(self, fd: int, nbytes: int) -> bool:
        """Put right whom we took for one that has come in, if it was this one; False if it was not.

        Who says more than a proof is in. If all that we took for those that are in say that much, too, somebody has come in of
        whom we have not read yet: libzmq tells of each before he can say anything.
        """
        came = self._waiting[fd]
        while True:
            for other in list(self._taken_for_in):
                theirs = tcp.nbytes_received(other, self._port)
                if not 0 <= theirs <= _MAX_PROOF_NBYTES:  # rightly, or it has gone
                    del self._taken_for_in[other]
                elif theirs < nbytes:
                    self._waiting[other] = self._taken_for_in.pop(other)
                    del self._waiting[fd]
                    if nbytes <= _MAX_PROOF_NBYTES:
                        self._taken_for_in[fd] = came
                    return True
            came_in = self._read()
            if self._waiting.get(fd) != came:  # it has gone, or was the one
                return True
            if not came_in:
                return False

    def _empty_the_queue(self) -> None:
        """Accept those that the kernel has queued, and hang up on them: libzmq can't, and would try for ever."""
        if self._door < 0:
            return
        if self._spare >= 0:
            os.close(self._spare)
        door = socket.socket(fileno=self._door)
        try:
            door.settimeout(0)
            while True:
                door.accept()[0].close()
                self.refused += 1
        except OSError:  # none is left, or libzmq was quicker
            pass
        finally:
            door.detach()
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._spare = -1


def read_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """What a socket that tells of connections says: what has happened, and to which descriptor, if it says so."""
    event, _ = monitor.recv_multipart(zmq.NOBLOCK)
    kind, value = struct.unpack("=hi", event)  # zmq.utils.monitor does that, too, but imports asyncio for it
    return kind, value


def _port_of(fd: int) -> int:
    door = socket.socket(fileno=fd)
    try:
        return int(door.getsockname()[1])
    finally:
        door.detach()


def free_descriptors() -> int:
    """How many more files this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    try:
        taken = sum(int(fd) < limit for fd in os.listdir("/proc/self/fd"))
    except OSError:
        return 0
    return limit - taken + 1  # the one that lists them
