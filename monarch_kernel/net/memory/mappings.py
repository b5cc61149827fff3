"""Blocks of other processes (`net/memory/shared_blocks.py`) as memory of this one.

Theory of operation
===================

A block that the sender has let go of, and that nobody else reads, is its only reader's: it is mapped as it is
(``MAP_SHARED``), and what is written to it costs no copy. Whether it is, its head says for good: who has let go of a block
can't refer to it any more. So is a block that is for all. Any other is mapped privately (``MAP_PRIVATE``): pages are those of
the sender until they are written to, and then copies.

Senders fill the same blocks again and again, and to map one costs more than to read it: a fault for every few pages. So
mappings that are not used any more are kept, and used again when the same file comes. A private one is kept only if nothing was
written to it, which its page table says: its copies would hide what the file is filled with next. The memory is the
sender's, who takes it back (``ftruncate``) when it lets go of the file.

A child that this process forks reads what is mapped, too, when the sender has long been told that it is done. So before a fork
all that is in use becomes private, for parent and child, unless it is for all, and is marked as left, for good: such a block
is not used again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Hashable
from typing import Any

from monarch_kernel.net.memory.shared_blocks import HEAD_NBYTES, Mark, Reference, empty, idle_most

__all__ = ["Mappings"]

_IDLE_MOST = 64
_PROT = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

# Of each entry of a page table, as Linux tells it in /proc/self/pagemap, the top byte says what we need.
_ENTRY_NBYTES = 8
_TOP = _ENTRY_NBYTES - 1 if sys.byteorder == "little" else 0
_IS_THERE, _IS_FILE = 0xC0, 0x20  # in memory or swapped out; a page of the file, not a copy
_CLEAN = bytes(top for top in range(256) if not top & _IS_THERE or top & _IS_FILE)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class _Mapping:
    """A file of another process, at a place in the memory of this one.

    Attributes:
        is_shared: whether what is written here is written to the file.
        is_for_all: whether it is meant to be.
        is_left: whether a child of this process may read it as well.
        turn: which byte of the head is ours, for what the file is filled with now.
    """

    __slots__ = ("address", "fd", "is_for_all", "is_left", "is_shared", "nbytes", "sender", "turn")

    def __init__(self, reference: Reference, sender: Hashable) -> None:
        self.fd = os.open(f"/proc/{reference.pid}/fd/{reference.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(self.fd)
            if status.st_ino != reference.inode:
                raise FileNotFoundError("the sender has ended, and another process has its number")
            self.nbytes = status.st_size
            self.address: int | None = None
            self._map(is_shared=False)
        except BaseException:
            os.close(self.fd)
            raise
        self.is_for_all = False
        self.is_left = False
        self.sender = sender
        self.turn = 0

    def settle(self, reference: Reference) -> None:
        """See whose the file is, filled with what it is now, and map it accordingly."""
        if not (0 < reference.turn < HEAD_NBYTES and 0 < reference.nbytes <= self.nbytes - HEAD_NBYTES):
            raise OSError("a reference leads out of its file")
        self.turn, self.is_for_all = reference.turn, reference.is_for_all
        is_shared = self.is_for_all or self._is_ours()
        if is_shared != self.is_shared:
            self._map(is_shared)

    def leave(self) -> None:
        """Make it private, as it is, since this process forks."""
        self.is_left = True
        if self.is_shared and not self.is_for_all:
            self._map(is_shared=False)
        os.pwrite(self.fd, bytes((Mark.LEFT,)), self.turn)

    def end_use(self) -> None:
        """Tell the sender that nobody here refers to it."""
        if self.nbytes - HEAD_NBYTES > idle_most() and self._is_ours():
            empty(self.fd, self.nbytes)
        os.pwrite(self.fd, bytes((Mark.NONE,)), self.turn)

    def is_clean(self) -> bool:
        """Whether all that is seen here is what is in the file."""
        if self.is_shared:
            return True
        assert self.address is not None
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
                pagemap.seek(self.address // mmap.PAGESIZE * _ENTRY_NBYTES)
                wanted = self.nbytes // mmap.PAGESIZE * _ENTRY_NBYTES
                entries = pagemap.read(wanted)
        except OSError:
            return False
        return len(entries) == wanted and not entries[_TOP::_ENTRY_NBYTES].translate(None, _CLEAN)

    def close(self) -> None:
        """Let go of it."""
        _libc.munmap(self.address, self.nbytes)
        os.close(self.fd)

    def _is_ours(self) -> bool:
        """Whether the sender has let go of it, and nobody else reads it."""
        head = os.pread(self.fd, HEAD_NBYTES, 0)
        return head[0] == Mark.RELEASED and head.count(Mark.NONE) == HEAD_NBYTES - 2  # that, and our byte

    def _map(self, is_shared: bool) -> None:
        flags = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
        place = 0 if self.address is None else _MAP_FIXED  # in its stead, at once
        address = _libc.mmap(self.address, self.nbytes, _PROT, flags | place, self.fd, 0)
        if address in (None, _FAILED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address, self.is_shared = address, is_shared


class Mappings:
    """What this process reads of others' blocks. For any thread; one for a process."""

    def __init__(self) -> None:
        self._used: dict[int, _Mapping] = {}
        self._idle: dict[tuple[int, int], _Mapping] = {}  # by process and inode; the oldest first
        # Held while something is mapped and during a fork. What ends a use takes no lock: garbage is collected anywhere.
        self._lock = threading.Lock()
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._lock.release, after_in_child=self._lock.release
        )

    def open(self, reference: Reference, sender: Hashable) -> memoryview:
        """What a reference stands for, as memory of this process, which may be written to.

        Raises:
            OSError: the sender has ended, or the Linux kernel does not let us look at it.
        """
        key = reference.pid, reference.inode
        with self._lock:
            mapping = self._idle.pop(key, None) or _Mapping(reference, sender)
            try:
                mapping.settle(reference)
            except BaseException:
                mapping.close()
                raise
            self._used[id(mapping)] = mapping
        assert mapping.address is not None
        block: Any = (ctypes.c_char * reference.nbytes).from_address(mapping.address + HEAD_NBYTES)
        block.is_for_all = reference.is_for_all
        weakref.finalize(block, self._end_use, key, mapping).atexit = False
        return memoryview(block).cast("B")

    def forget(self, sender: Hashable) -> None:
        """A process has died: nothing comes from it any more."""
        for key, mapping in list(self._idle.items()):
            if mapping.sender == sender:
                self._drop(key)

    def _end_use(self, key: tuple[int, int], mapping: _Mapping) -> None:
        del self._used[id(mapping)]
        if mapping.is_left:
            mapping.close()
            return
        is_kept = mapping.is_clean() and self._idle.setdefault(key, mapping) is mapping
        mapping.end_use()
        if not is_kept:
            mapping.close()
        elif mapping.is_left:  # just now, by another thread
            self._drop(key)
        for oldest in list(self._idle)[:-_IDLE_MOST]:
            self._drop(oldest)

    def _drop(self, key: tuple[int, int]) -> None:
        mapping = self._idle.pop(key, None)
        if mapping is not None:
            mapping.close()

    def _before_fork(self) -> None:
        self._lock.acquire()
        for mapping in list(self._used.values()):
            mapping.leave()
        for key in list(self._idle):
            self._drop(key)
