"""Connections between ranks that the host agent keeps open for a while when one of their ends dies.

When a process dies, the Linux kernel closes its connections, and what others write to them fails from then on. Gloo does not
stand that: it takes a send from its list, writes, and if that fails forgets it, so that whoever waits for it waits for ever.
So the agent has a copy of each connection's descriptor (``SCM_RIGHTS``). A rank that dies then looks to its peers like one
that is silent; they are told of the death, and end what they wait for themselves, by other means (`RankGroup.abort`). After
`HOLD_S` the copies are closed, whoever has been told by then.

A connection that a living process closes is to be seen as closed, so it looks at those it has handed over every
`LOOK_EVERY_S`, and has the agent let go of those that are closed here, one by one: gloo closes some by itself, as when a
collective times out.

Each process has one connection to the agent for all that. It says `_HOLD`, the number of the first of some connections, and
has their descriptors go with that; or `_LET_GO`, and numbers.
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

__all__ = ["HOLD_S", "LOOK_EVERY_S", "Holder", "Keeper"]

HOLD_S = 1.0
"""How long connections of a process that has died stay open; far longer than it takes the controller to tell the others."""

LOOK_EVERY_S = 0.2
"""How long a connection that is closed here may seem to be open."""

_SUFFIX = ".fds"
_MOST_AT_ONCE = 250  # the Linux kernel's limit is 253
_TIMEOUT_S = 1.0
_DEAF_S = 1.0
"""How long nobody is let in when there is no descriptor left for whoever it is."""

_HOLD, _LET_GO = b"H", b"L"
_NUMBER = struct.Struct("!Q")
_PACKET_NBYTES = 1 + _MOST_AT_ONCE * _NUMBER.size


class Holder:
    """A process's end: has connections stay open when it dies.

    Where the agent can't be reached, or has no room, they are not held, and nothing is said: it is needed when only this
    process dies. In a process that is forked from this one nothing is held, and nothing let go of, as what it closes is still
    open here. All methods are for any thread.

    Args:
        agent: path of the host agent's socket for messages, beside which the one for connections is.
    """

    def __init__(self, agent: str) -> None:
        self._path = agent + _SUFFIX
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._agent: socket.socket | None = None
        self._next = 0
        self._held: dict[int, tuple[int, int]] = {}  # number -> descriptor, and its inode as long as it is open
        self._is_watched = False

    def hold(self, fds: Iterable[int]) -> None:
        """Have these stay open; until they are closed here, or this process dies."""
        if os.getpid() != self._pid:
            return
        with self._lock, contextlib.ExitStack() as copied:
            copies = {}
            for fd in fds:
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    copies[fd] = os.dup(fd)  # a thread may close ``fd`` before it is sent, and then none could be sent
                    copied.callback(os.close, copies[fd])
            if not copies:
                return
            for _ in range(2):  # it may have left us since the last time, for want of room
                try:
                    self._give(copies)
                    break
                except TimeoutError:  # it is busy
                    break
                except OSError:
                    self._leave()
            if self._held and not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="monarch-holder", daemon=True).start()

    def let_go(self) -> None:
        """Have the agent close those that are closed here; else that is done in a moment."""
        if os.getpid() != self._pid:
            return
        if not self._lock.acquire(timeout=_TIMEOUT_S):  # a signal struck this thread in `hold`
            return
        try:
            closed = [number for number, (fd, inode) in self._held.items() if not _is_open(fd, inode)]
            for some in _parts(closed):
                assert self._agent is not None
                self._agent.send(_LET_GO + b"".join(map(_NUMBER.pack, some)))
                for number in some:
                    del self._held[number]
        except TimeoutError:  # it is busy: they are told of later
            pass
        except OSError:
            self._leave()
        finally:
            self._lock.release()

    def _give(self, copies: dict[int, int]) -> None:
        """Hand over connections: number of a descriptor -> that of a copy, which stays open meanwhile."""
        if self._agent is None:
            self._agent = self._connect()
        for some in _parts(list(copies)):
            first, self._next = self._next, self._next + len(some)
            socket.send_fds(self._agent, [_HOLD + _NUMBER.pack(first)], [copies[fd] for fd in some])
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

    def _leave(self) -> None:
        """The agent is not there, or has no room: it holds nothing, and the next time it is asked anew."""
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


class Keeper:
    """The agent's end.

    Args:
        agent: path of the host agent's socket for messages; only its user may look into that directory.
        selector: that calls what is registered with a socket when that can be read.
    """

    def __init__(self, agent: str, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._held: dict[socket.socket, dict[int, int]] = {}  # who -> number -> our descriptor
        self._dead: list[tuple[float, list[int]]] = []  # when to close them; the next ones first
        self._deaf_until: float | None = None
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
        """Whether something is to be done in a while, by `do_what_is_due`."""
        return bool(self._dead) or self._deaf_until is not None

    def do_what_is_due(self, now: float) -> None:
        """Close what was held long enough; ``now`` is that of `time.monotonic`."""
        while self._dead and now >= self._dead[0][0]:
            _, fds = self._dead.pop(0)
            _close(fds)
        if self._deaf_until is not None and now >= self._deaf_until:
            self._deaf_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            process, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it would be there again at once
                self._selector.unregister(self._listener)
                self._deaf_until = time.monotonic() + _DEAF_S
            return
        if not _room():
            process.close()
            return
        process.setblocking(False)
        self._held[process] = {}
        self._selector.register(process, selectors.EVENT_READ, partial(self._hear, process))

    def _hear(self, process: socket.socket) -> None:
        held = self._held[process]
        try:
            # Those for which there is no room, the Linux kernel closes: the last ones.
            room = min(_MOST_AT_ONCE, _room())
            said, fds, _, _ = socket.recv_fds(process, _PACKET_NBYTES, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            said, fds = b"", []
        if not said:  # it has ended
            self._selector.unregister(process)
            process.close()
            del self._held[process]
            if held:
                self._dead.append((time.monotonic() + HOLD_S, list(held.values())))
            return
        numbers = [number for (number,) in _NUMBER.iter_unpack(said[1:])] if len(said) % _NUMBER.size == 1 else []
        if said[:1] == _HOLD and numbers:
            held |= dict(enumerate(fds, numbers[0]))
            return
        _close(fds)  # it is none of ours
        if said[:1] == _LET_GO:
            _close([held.pop(number) for number in numbers if number in held])


def _room() -> int:
    """How many connections can be held: half of all descriptors are left to what the agent has to do."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(0, free_descriptors() - (0 if limit == resource.RLIM_INFINITY else limit // 2))


def _parts(numbers: Sequence[int]) -> Iterable[Sequence[int]]:
    return (numbers[at : at + _MOST_AT_ONCE] for at in range(0, len(numbers), _MOST_AT_ONCE))


def _is_open(fd: int, inode: int) -> bool:
    """Whether a descriptor is still of the connection of which it was."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
