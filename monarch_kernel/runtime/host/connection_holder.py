"""Keeps connections between ranks open for a while in the host agent after one of their ends dies.

When a process dies, the Linux kernel closes its connections, and writes of the other ends fail from then on. Gloo can't handle
that: it takes a send from its list, writes, and forgets the send if the write fails, so that a thread that waits for the send
waits forever. The agent therefore has a copy of each connection's descriptor (``SCM_RIGHTS``). To its peers a dead rank then
looks like one that reads and says nothing. The peers learn of the death by a message, and end their waits themselves
(`RankGroup.abort`). After `HOLD_S` the agent closes the copies, even if a peer has not received the message yet. Meanwhile it
reads what arrives, because gloo also forgets a send of which it has written only a part when a connection ends.

A connection that a living process closes must appear closed to its peer. So each process checks the connections that it has
handed over every `LOOK_EVERY_S`, and makes the agent close its copies of those that are closed here, one by one. Gloo closes
some by itself, for example when a collective times out.

Each process has one connection to the agent for this purpose. A packet has either `_HOLD`, the number of the first of several
connections and their descriptors, or `_LET_GO` and numbers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from monarch_kernel.net.hosts.handshakes import free_descriptors

__all__ = ["HOLD_S", "LOOK_EVERY_S", "FdHolder", "FdKeeper"]

HOLD_S = 3.0
"""How long connections of a dead process stay open; far longer than other processes take to learn of the death and to end their
groups, also where many processes share a processor.
"""

LOOK_EVERY_S = 0.2
"""How long a connection that is closed here may appear open to its peer."""

_SUFFIX = ".fds"
_MOST_AT_ONCE = 250  # the Linux kernel's limit is 253
_TIMEOUT_S = 1.0
_PAUSE_S = 1.0
"""How long the keeper stops accepting connections when no descriptor is left."""

_HOLD, _LET_GO = b"H", b"L"
_NUMBER = struct.Struct("!Q")
_READ_NBYTES = 1 << 20
_PACKET_NBYTES = 1 + _MOST_AT_ONCE * _NUMBER.size


class FdHolder:
    """The end in a rank: makes connections stay open when the process dies.

    If the agent can't be reached, or has too few descriptors, the connections are silently not held: holding matters only when
    this process dies alone. In a fork of this process, the methods do nothing, because connections that the fork closes are
    still open here. Any thread may call all methods, and so may a signal handler that interrupts one of them.

    Args:
        agent: path of the host agent's socket for messages; the socket for connections is next to it.
    """

    def __init__(self, agent: str) -> None:
        self._path = agent + _SUFFIX
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may call `let_go` while its thread is in `hold`
        self._agent: socket.socket | None = None
        self._next = 0
        self._held: dict[int, tuple[int, int]] = {}  # number -> descriptor, and its inode while it is open
        self._is_watched = False

    def hold(self, fds: Iterable[int]) -> None:
        """Make the agent hold connections until they are closed here, or for `HOLD_S` after this process dies."""
        if os.getpid() != self._pid:
            return
        with self._lock, contextlib.ExitStack() as copied:
            copies = {}
            for fd in fds:
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    copies[fd] = os.dup(fd)  # if a thread closed ``fd`` before it is sent, none could be sent
                    copied.callback(os.close, copies[fd])
            if not copies:
                return
            for _ in range(2):  # the agent may have disconnected since the last time, for lack of descriptors
                try:
                    self._hand_over(copies)
                    break
                except TimeoutError:  # the agent is busy
                    break
                except OSError:
                    self._disconnect()
            if self._held and not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="monarch-holder", daemon=True).start()

    def let_go(self) -> None:
        """Make the agent close its copies of connections that are closed here, without waiting for the next periodic check."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            closed = [number for number, (fd, inode) in self._held.items() if not _is_open(fd, inode)]
            try:
                for some in _parts(closed):
                    if self._agent is None:
                        return
                    self._agent.send(_LET_GO + b"".join(map(_NUMBER.pack, some)))
                    for number in some:
                        self._held.pop(number, None)
            except TimeoutError:  # the agent is busy: the next check sends them
                pass
            except OSError:
                self._disconnect()

    def _hand_over(self, copies: dict[int, int]) -> None:
        """Hand over connections; ``copies`` maps each descriptor to its copy, which stays open meanwhile."""
        agent = self._agent
        if agent is None:
            agent = self._agent = self._connect()
        for some in _parts(list(copies)):
            first, self._next = self._next, self._next + len(some)
            socket.send_fds(agent, [_HOLD + _NUMBER.pack(first)], [copies[fd] for fd in some])
            self._held |= {number: (fd, os.fstat(copies[fd]).st_ino) for number, fd in enumerate(some, first)}

    def _connect(self) -> socket.socket:
        agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent.settimeout(_TIMEOUT_S)
        try:
            agent.connect(self._path)
        except OSError:
            agent.close()
            raise
        return agent

    def _disconnect(self) -> None:
        """Forget the agent, which is gone or lacks descriptors and so holds nothing; the next `hold` connects again."""
        self._held.clear()
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            self.let_go()
            with self._lock:
                if not self._held:
                    self._is_watched = False
                    return


class FdKeeper:
    """The end in the agent: keeps the copies of connections.

    Args:
        agent: path of the host agent's socket for messages; only its user may enter that directory.
        selector: the agent's selector; the data of each key is a callback for when the socket is readable.
    """

    def __init__(self, agent: str, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._held: dict[socket.socket, dict[int, int]] = {}  # process -> number -> descriptor here
        self._dead: list[tuple[float, list[int]]] = []  # (when to close, descriptors), the earliest first
        self._paused_until: float | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        path = Path(agent + _SUFFIX)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(1024)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def is_waiting(self) -> bool:
        """Whether `do_what_is_due` will have work to do."""
        return bool(self._dead) or self._paused_until is not None

    def do_what_is_due(self, now: float) -> None:
        """Close connections that were held for `HOLD_S`; ``now`` is from `time.monotonic`."""
        while self._dead and now >= self._dead[0][0]:
            _, fds = self._dead.pop(0)
            for fd in fds:
                self._read_no_more(fd)
            _close(fds)
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            process, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the selector would report it again at once
                self._selector.unregister(self._listener)
                self._paused_until = time.monotonic() + _PAUSE_S
            return
        if not _free_slots():
            process.close()
            return
        process.setblocking(False)
        self._held[process] = {}
        self._selector.register(process, selectors.EVENT_READ, partial(self._read_packet, process))

    def _read_packet(self, process: socket.socket) -> None:
        held = self._held[process]
        try:
            # The Linux kernel closes those beyond the limit, which are the last ones.
            room = min(_MOST_AT_ONCE, _free_slots())
            packet, fds, _, _ = socket.recv_fds(process, _PACKET_NBYTES, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            packet, fds = b"", []
        if not packet:  # the process has ended
            self._selector.unregister(process)
            process.close()
            del self._held[process]
            if held:
                self._dead.append((time.monotonic() + HOLD_S, list(held.values())))
            for fd in held.values():
                self._selector.register(fd, selectors.EVENT_READ, partial(self._drop_data, fd))
            return
        numbers = [number for (number,) in _NUMBER.iter_unpack(packet[1:])] if len(packet) % _NUMBER.size == 1 else []
        if packet[:1] == _HOLD and numbers:
            held |= dict(enumerate(fds, numbers[0]))
            return
        _close(fds)  # any other packet must not have descriptors
        if packet[:1] == _LET_GO:
            _close([held.pop(number) for number in numbers if number in held])

    def _drop_data(self, fd: int) -> None:
        """Read what a peer has sent to a dead process."""
        try:
            is_open = bool(os.read(fd, _READ_NBYTES))
        except BlockingIOError:
            return
        except OSError:
            is_open = False
        if not is_open:
            self._read_no_more(fd)

    def _read_no_more(self, fd: int) -> None:
        with contextlib.suppress(KeyError):  # it has ended
            self._selector.unregister(fd)


def _free_slots() -> int:
    """Return how many more connections can be held; half of all descriptors are reserved for the agent's other work."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(0, free_descriptors() - (0 if limit == resource.RLIM_INFINITY else limit // 2))


def _parts(numbers: Sequence[int]) -> Iterable[Sequence[int]]:
    return (numbers[at : at + _MOST_AT_ONCE] for at in range(0, len(numbers), _MOST_AT_ONCE))


def _is_open(fd: int, inode: int) -> bool:
    """Whether a descriptor still belongs to the same connection."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
