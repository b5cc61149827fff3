"""Maps blocks of other processes (`net/memory/shared_blocks.py`) into memory of this one.

Theory of operation
===================

A block that the sender has released, and that no other process reads, belongs to its only reader: it is mapped as it is
(``MAP_SHARED``), and writing to it costs no copy. The head of the block says so, and this is final: a sender that has released
a block can't send references to it any more. A block that is for all is mapped the same way. Any other block is mapped
privately (``MAP_PRIVATE``): its pages are those of the sender until they are written to, and copies then.

Senders fill the same blocks again and again, and mapping a block costs more than reading it: a fault for every few pages. So
unused mappings are kept, and reused when the same file arrives. A private one is kept only if nothing was written to it, which
its page table shows: its copies would hide the next content of the file. The memory belongs to the sender, which takes it back
(``ftruncate``) when it closes the file.

A child that this process forks reads the mappings, too, even after this process has reported to the sender that it is done. So
before a fork all mappings in use become private, for parent and child, unless they are for all, and are permanently marked as
left: such a block is not used again.
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

# The top byte of each page table entry, in the format of /proc/self/pagemap, has the bits of interest.
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
    """A file of another process, mapped into the memory of this one.

    Attributes:
        is_shared: whether writes go to the file.
        is_for_all: whether writes are meant to go to the file.
        is_left: whether a child of this process may read it as well.
        is_orphan: whether its sender has died, so that the file is not used again.
        turn: index of this process's byte in the head, for the current content of the file.
    """

    __slots__ = ("address", "fd", "is_for_all", "is_left", "is_orphan", "is_shared", "nbytes", "sender", "turn")

    def __init__(self, reference: Reference, sender: Hashable) -> None:
        self.fd = os.open(f"/proc/{reference.pid}/fd/{reference.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(self.fd)
            if status.st_ino != reference.inode:
                raise FileNotFoundError("the sender has ended, and another process has its pid")
            self.nbytes = status.st_size
            self.address: int | None = None
            self._map(is_shared=False)
        except BaseException:
            os.close(self.fd)
            raise
        self.is_for_all = False
        self.is_left = False
        self.is_orphan = False
        self.sender = sender
        self.turn = 0

    def settle(self, reference: Reference) -> None:
        """Determine which process owns the current content of the file, and map it accordingly."""
        if not (0 < reference.turn < HEAD_NBYTES and 0 < reference.nbytes <= self.nbytes - HEAD_NBYTES):
            raise OSError("a reference points outside its file")
        self.turn, self.is_for_all = reference.turn, reference.is_for_all
        is_shared = self.is_for_all or self._is_ours()
        if is_shared != self.is_shared:
            self._map(is_shared)

    def leave(self) -> None:
        """Make the mapping private, with its content, because this process forks."""
        self.is_left = True
        if self.is_shared and not self.is_for_all:
            self._map(is_shared=False)
        os.pwrite(self.fd, bytes((Mark.LEFT,)), self.turn)

    def end_use(self) -> None:
        """Report to the sender that this process no longer refers to the content."""
        if self.nbytes - HEAD_NBYTES > idle_most() and self._is_ours():
            empty(self.fd, self.nbytes)
        os.pwrite(self.fd, bytes((Mark.NONE,)), self.turn)

    def is_clean(self) -> bool:
        """Whether the mapping shows exactly the content of the file."""
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
        """Unmap the file, and close it."""
        _libc.munmap(self.address, self.nbytes)
        os.close(self.fd)

    def _is_ours(self) -> bool:
        """Whether the sender has released the block, and no other process reads it."""
        head = os.pread(self.fd, HEAD_NBYTES, 0)
        return head[0] == Mark.RELEASED and head.count(Mark.NONE) == HEAD_NBYTES - 2  # all but the first and ours

    def _map(self, is_shared: bool) -> None:
        flags = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
        place = 0 if self.address is None else _MAP_FIXED  # replaces the old mapping atomically
        address = _libc.mmap(self.address, self.nbytes, _PROT, flags | place, self.fd, 0)
        if address in (None, _FAILED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address, self.is_shared = address, is_shared


class Mappings:
    """The blocks of other processes that this process reads. Any thread may use it; there is one per process."""

    def __init__(self) -> None:
        self._used: dict[int, _Mapping] = {}
        self._idle: dict[tuple[int, int], _Mapping] = {}  # by process and inode, oldest first
        # Held while a file is mapped and during a fork. Ending a use takes no lock: garbage collection may run anywhere.
        self._lock = threading.Lock()
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._lock.release, after_in_child=self._lock.release
        )

    def open(self, reference: Reference, sender: Hashable) -> memoryview:
        """Return the memory that a reference refers to; it may be written to.

        Raises:
            OSError: the sender has ended, or the Linux kernel denies access to it.
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
        """Unmap the files of a process that has died: idle ones now, the others when their content is no longer used."""
        for mapping in list(self._used.values()):
            mapping.is_orphan |= mapping.sender == sender
        for key, mapping in list(self._idle.items()):
            if mapping.sender == sender:
                self._drop(key)

    def _end_use(self, key: tuple[int, int], mapping: _Mapping) -> None:
        del self._used[id(mapping)]
        if mapping.is_left:
            mapping.close()
            return
        is_kept = not mapping.is_orphan and mapping.is_clean() and self._idle.setdefault(key, mapping) is mapping
        mapping.end_use()
        if not is_kept:
            mapping.close()
        elif mapping.is_left or mapping.is_orphan:  # in the meantime, by another thread
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
