"""Which memory a process has lent out: a table that other processes of the machine read, and lock entries of.

Whoever reads or writes lent memory holds a shared lock on its entry meanwhile; the owner frees the memory when it gets the
exclusive one. So memory is never freed under a transfer, nothing has to be asked of a busy owner, and a process that dies
in a transfer leaves no lock behind. The table is a memory file without a name: it is gone with the processes that have it
open. The locks are those of open file descriptions (``F_OFD_SETLK``, fcntl(2)): byte N of the file stands for entry N.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import select
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from monarch_kernel.net.memory.processes import is_ending, open_pidfd

__all__ = ["LENT_AT_MOST", "Lease", "Lent", "Table", "TableOf", "identity"]

LENT_AT_MOST = 1 << 16
"""Entries of a table."""

_COOKIE_NBYTES = 16
_ENTRY = struct.Struct("<Q")
_TABLE_NBYTES = _COOKIE_NBYTES + LENT_AT_MOST * _ENTRY.size
_FLOCK = struct.Struct("hhqqi4x")
_OFD_SETLK = 37


class Lease(NamedTuple):
    """An entry of a table: it is good as long as ``turn`` stands there."""

    entry: int
    turn: int


class Lent(NamedTuple):
    """Where the table of a process is, for others of the machine; ``cookie`` tells it from that of a later process."""

    machine: str
    pid: int
    fd: int
    cookie: bytes


def identity() -> str:
    """What processes that see each other's memory and pids have in common: the boot of the machine, and the namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


class Table:
    """The owner's end.

    Attributes:
        lent: what others need to find the table.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("monarch-lent", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _TABLE_NBYTES)
        self._map = mmap.mmap(self._fd, _TABLE_NBYTES)
        cookie = secrets.token_bytes(_COOKIE_NBYTES)
        self._map[:_COOKIE_NBYTES] = cookie
        self._turn = 0
        self._free: list[int] = []
        self._unused = 0
        self._lock = threading.Lock()
        self.lent = Lent(identity(), os.getpid(), self._fd, cookie)

    def lend(self) -> Lease:
        """Make an entry.

        Raises:
            MemoryError: too many are in use.
        """
        with self._lock:
            if self._free:
                entry = self._free.pop()
            elif self._unused < LENT_AT_MOST:
                entry = self._unused
                self._unused += 1
            else:
                raise MemoryError(f"{LENT_AT_MOST} buffers are in use in this process: drop() some that are not needed")
            self._turn += 1
            self._write(entry, self._turn)
            return Lease(entry, self._turn)

    def end(self, lease: Lease) -> None:
        """Let no transfer begin any more; those that go on are not disturbed."""
        with self._lock:
            if self._read(lease.entry) == lease.turn:
                self._write(lease.entry, 0)

    def is_in_use(self, lease: Lease) -> bool:
        """Whether a transfer still goes on, after `end`; if not the entry is free for another."""
        with self._lock:
            if not _lock(self._fd, fcntl.F_WRLCK, lease.entry):
                return True
            _lock(self._fd, fcntl.F_UNLCK, lease.entry)
            self._free.append(lease.entry)
            return False

    def _read(self, entry: int) -> int:
        return int(_ENTRY.unpack_from(self._map, _COOKIE_NBYTES + entry * _ENTRY.size)[0])

    def _write(self, entry: int, turn: int) -> None:
        _ENTRY.pack_into(self._map, _COOKIE_NBYTES + entry * _ENTRY.size, turn)


class TableOf:
    """The table of another process of this machine, or of this one, for transfers; open as long as somebody has it.

    Raises:
        ProcessLookupError: that process has ended.
        PermissionError: the Linux kernel does not let us look at it.
    """

    def __init__(self, lent: Lent) -> None:
        with contextlib.ExitStack() as opened:
            self._process = open_pidfd(lent.pid)
            opened.callback(os.close, self._process)
            try:
                self._fd = os.open(f"/proc/{lent.pid}/fd/{lent.fd}", os.O_RDWR | os.O_CLOEXEC)
                opened.callback(os.close, self._fd)
                is_it = os.pread(self._fd, _COOKIE_NBYTES, 0) == lent.cookie
            except PermissionError:
                if not is_ending(lent.pid):  # of one that is ending only root may open files
                    raise
                is_it = False
            except OSError:  # it has ended, or another has its number, and something else there
                is_it = False
            if not is_it:
                raise ProcessLookupError(f"process {lent.pid} has ended")
            self._holders: dict[int, int] = {}
            self._lock = threading.Lock()
            closing = weakref.finalize(self, opened.pop_all().close)  # when no transfer needs it any more
            closing.atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        end = select.poll()  # select() knows no descriptor above 1023
        end.register(self._process, select.POLLIN)
        return not end.poll(0)

    @contextlib.contextmanager
    def held(self, lease: Lease) -> Iterator[bool]:
        """Keep memory where it is; gives whether it is still lent."""
        entry = lease.entry
        with self._lock:  # all threads share one lock on an entry
            holders = self._holders.get(entry, 0)
            good = holders > 0 or _lock(self._fd, fcntl.F_RDLCK, entry)
            if good:
                self._holders[entry] = holders + 1
        if not good:
            yield False  # the owner frees it at this moment
            return
        try:
            raw = os.pread(self._fd, _ENTRY.size, _COOKIE_NBYTES + entry * _ENTRY.size)
            yield _ENTRY.unpack(raw)[0] == lease.turn
        finally:
            with self._lock:
                self._holders[entry] -= 1
                if not self._holders[entry]:
                    del self._holders[entry]
                    _lock(self._fd, fcntl.F_UNLCK, entry)


def _lock(fd: int, kind: int, entry: int) -> bool:
    try:
        fcntl.fcntl(fd, _OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, entry, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True
