"""A table of the memory that a process lends, which other processes of the machine read and lock.

A process that reads or writes lent memory holds a shared lock on its entry meanwhile; the owner frees the memory when it gets
the exclusive lock. So memory is never freed during a transfer, a busy owner has to answer nothing, and a process that dies in
a transfer leaves no lock behind. The table is an anonymous memory file, which disappears with the processes that have it
open. The locks are those of open file descriptions (``F_OFD_SETLK``, fcntl(2)): byte N of the file represents entry N.
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
"""Number of entries of a table."""

_COOKIE_NBYTES = 16
_ENTRY = struct.Struct("<Q")
_TABLE_NBYTES = _COOKIE_NBYTES + LENT_AT_MOST * _ENTRY.size
_FLOCK = struct.Struct("hhqqi4x")
_OFD_SETLK = 37


class Lease(NamedTuple):
    """An entry of a table; it is valid while the entry contains ``turn``."""

    entry: int
    turn: int


class Lent(NamedTuple):
    """How other processes of the machine find a process's table; ``cookie`` distinguishes it from that of a later process."""

    machine: str
    pid: int
    fd: int
    cookie: bytes


def identity() -> str:
    """Return what is equal for processes that see each other's memory and pids: the boot of the machine, and the namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


class Table:
    """The table on the owner's side.

    Attributes:
        lent: how others find the table.
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
            MemoryError: all entries are in use.
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
        """Invalidate an entry, so that no new transfer starts; transfers in progress continue."""
        with self._lock:
            if self._read(lease.entry) == lease.turn:
                self._write(lease.entry, 0)

    def is_in_use(self, lease: Lease) -> bool:
        """Whether a transfer is still in progress after `end`; if not, this frees the entry."""
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
    """The table of a process of this machine, for transfers; open while there are references to it.

    Raises:
        ProcessLookupError: that process has ended.
        PermissionError: the Linux kernel denies access to it.
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
                if not is_ending(lent.pid):  # only root may open files of a process that is ending
                    raise
                is_it = False
            except OSError:  # it has ended, or another process has its pid
                is_it = False
            if not is_it:
                raise ProcessLookupError(f"process {lent.pid} has ended")
            self._holders: dict[int, int] = {}
            self._lock = threading.Lock()
            closing = weakref.finalize(self, opened.pop_all().close)  # when no transfer needs it
            closing.atexit = False

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        end = select.poll()  # select() supports no descriptor above 1023
        end.register(self._process, select.POLLIN)
        return not end.poll(0)

    @contextlib.contextmanager
    def held(self, lease: Lease) -> Iterator[bool]:
        """Keep memory in place; yields whether it is still lent."""
        entry = lease.entry
        with self._lock:  # all threads share one file lock per entry
            holders = self._holders.get(entry, 0)
            good = holders > 0 or _lock(self._fd, fcntl.F_RDLCK, entry)
            if good:
                self._holders[entry] = holders + 1
        if not good:
            yield False  # the owner is freeing it
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
