"""Blocks of shared memory that carry large frames to other processes of the machine: stored once, not copied again.

Theory of operation
===================

A sender copies a frame into a *block*, an anonymous memory file, and sends a reference in its place. Receivers map the file
(`net/memory/mappings.py`), so that no process sees what another does with a value, as if each had received a copy. The head of
the block has a byte for the sender, which says whether it has released the block, and one for each receiver, which the receiver
clears when its last object in the block is gone. The sender fills the block with another frame when it has no references to the
content, and all these bytes are clear: the block's pages are already mapped, and filling them costs a copy within memory,
while fresh pages cost ten times that.

A process that dies clears nothing, so the processes that learn of its death clear its bytes (`Blocks.forget`). A process that
forks may leave a child that still reads: its blocks are not used again (`Mark.LEFT`). A file disappears with the last process
that has it open, and its memory when its sender releases it.

A block that is *for all* is not a copy of a frame: the sender's own value is in it, is sent as it is, any number of times, and
receivers write to it as the sender does.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.net.memory.limits import largest_file, room

__all__ = ["HEAD_NBYTES", "STORED_NBYTES", "Blocks", "Mark", "Reference", "empty", "idle_most", "is_for_all"]

STORED_NBYTES = 256 << 10
"""Smaller frames travel in the message: mapping a block costs more."""

HEAD_NBYTES = mmap.PAGESIZE


class Mark(IntEnum):
    """States of a byte of the head. The first byte is the sender's: it has `RELEASED` the block, or not."""

    NONE = 0
    READS = 1
    LEFT = 2
    RELEASED = 3


_IDLE_COUNT = 256
"""Maximum number of unused blocks that are kept: each has two descriptors."""

_IDLE_SHARE = 32
"""Unused blocks may take at most one part in this many of the machine's memory."""

_LARGE_NBYTES = 64 << 20
"""For values of at least this size, check whether there is enough memory."""

_SPARE_SHARE = 32
"""One part in this many of the free memory stays free, for page tables and for other processes."""


_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def idle_most() -> int:
    """Return how many bytes a process keeps in unused blocks; the last user of a larger block empties it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _IDLE_SHARE


def empty(fd: int, nbytes: int) -> None:
    """Free the memory of an unused block, except its head. Where that is not possible, the memory stays for a while."""
    _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, HEAD_NBYTES, nbytes - HEAD_NBYTES)


class Reference(NamedTuple):
    """What is sent in place of a frame: the sender's file descriptor, and the byte that the receiver clears at the end."""

    pid: int
    fd: int
    inode: int
    nbytes: int
    turn: int
    is_for_all: bool = False


def is_for_all(frame: bytes | memoryview) -> bool:
    """Whether a frame is memory that its receivers share with this process; also true for such a frame when received."""
    return type(frame) is memoryview and getattr(frame.obj, "is_for_all", False)


class _Segment:
    """A file that holds one block at a time."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.fd = os.memfd_create("monarch-block", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, HEAD_NBYTES + room)
            self.map = mmap.mmap(self.fd, HEAD_NBYTES + room)
        except BaseException:
            os.close(self.fd)
            raise
        self.inode = os.fstat(self.fd).st_ino
        self.pid = os.getpid()
        self.is_filled = False
        self.is_for_all = False
        self.has_heirs = False  # children of this process may use a value in it without a mark
        self.has_lost_reader = False
        self.readers: list[Hashable] = []

    @property
    def is_idle(self) -> bool:
        """Whether no process uses the content."""
        return not self.is_filled and not self.is_left and not any(self._marks())

    @property
    def is_left(self) -> bool:
        """Whether an unknown process may still read it."""
        return self.has_heirs or Mark.LEFT in self._marks()

    def fill(self, is_for_all: bool) -> None:
        """Reserve the file for another frame."""
        self.is_filled = True
        self.is_for_all = is_for_all
        self.has_lost_reader = False
        self.readers.clear()
        self.map[0] = Mark.NONE

    def refer(self, reader: Hashable) -> int:
        """Record a reader, and return the index of its byte in the head; 0 if there is no free byte."""
        turn = 1 + len(self.readers)
        if self.is_for_all and Mark.NONE in (marks := self._marks()):  # its former reader no longer reads it
            turn = 1 + marks.index(Mark.NONE)
            self.readers[turn - 1] = reader
        elif turn < HEAD_NBYTES:
            self.readers.append(reader)
        else:
            return 0
        self.map[turn] = Mark.READS
        return turn

    def forget(self, reader: Hashable) -> None:
        """Clear the bytes of a reader that has died."""
        self.has_lost_reader |= reader in self.readers
        for turn, each in enumerate(self.readers, 1):
            if each == reader and self.map[turn] == Mark.READS:
                self.map[turn] = Mark.NONE

    def release(self) -> None:
        """Mark the content as released by this process; in a child, which shares the head, this does nothing."""
        if os.getpid() == self.pid:
            self.map[0] = Mark.RELEASED
            if (self.room > idle_most() or self.has_lost_reader) and not self.is_left and not any(self._marks()):
                empty(self.fd, HEAD_NBYTES + self.room)
            self.is_filled = False

    def close(self) -> None:
        """Close the file; processes that still read it keep it open."""
        is_idle = self.is_idle
        self.map.close()
        if is_idle:  # other processes may keep it mapped for reuse
            os.ftruncate(self.fd, 0)
        os.close(self.fd)

    def _marks(self) -> bytes:
        return self.map[1 : 1 + len(self.readers)]


class Blocks:
    """The blocks that a process sends from. Any thread may use it."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._lock = threading.Lock()
        self._idle_most = idle_most()

    def __len__(self) -> int:
        return len(self._segments)

    def check(self, nbytes: int) -> None:
        """Check whether there is enough memory for values of this size.

        Raises:
            MemoryError: there is not; the text has the figures.
        """
        if nbytes >= _LARGE_NBYTES:
            found = room()
            free = found.nbytes + self._idle_nbytes()
            if nbytes > free - free // _SPARE_SHARE:
                raise MemoryError(
                    f"{_gib(nbytes)} are needed, and there are {_gib(free)} of {found.of}, some of which must stay free"
                )

    def store(self, pieces: Sequence[bytes | memoryview], *, is_for_all: bool = False) -> memoryview:
        """Copy bytes into a block, piece after piece.

        Args:
            pieces: of memory.
            is_for_all: whether receivers write to the block itself, as the sender may.

        Raises:
            MemoryError: there is not enough memory, or no file; the text says why.
        """
        nbytes = sum(map(len, pieces))
        segment = self._take(nbytes, is_for_all)
        block: Any = (ctypes.c_char * nbytes).from_buffer(segment.map, HEAD_NBYTES)
        address = ctypes.addressof(block)
        for piece in pieces:
            ctypes.memmove(address, memory_of(piece).address, len(piece))  # without the GIL
            address += len(piece)
        block.segment, block.is_for_all = segment, is_for_all
        weakref.finalize(block, segment.release).atexit = False
        return memoryview(block).cast("B")

    def refer(self, frame: memoryview, reader: Hashable) -> Reference | None:
        """Return the reference to send to a process of this machine in place of a frame; None if the frame must be sent."""
        segment: _Segment | None = getattr(frame.obj, "segment", None)
        if segment is None:
            return None
        with self._lock:
            turn = segment.refer(reader)
        if not turn:
            return None
        return Reference(os.getpid(), segment.fd, segment.inode, frame.nbytes, turn, segment.is_for_all)

    def forget(self, reader: Hashable) -> None:
        """Clear the marks of a process that has died, and close the unused blocks that it has read.

        A program that ends a mesh may never send such values again. A block in use is emptied at its release.
        """
        with self._lock:
            for segment in self._segments[:]:
                segment.forget(reader)
                if segment.has_lost_reader and segment.is_idle:
                    self._drop(segment)

    def before_fork(self) -> None:
        """Prepare for a child, which shares the blocks that are for all; nothing is stored until `after_fork`."""
        self._lock.acquire()
        for segment in self._segments:
            segment.has_heirs |= segment.is_for_all and segment.is_filled

    def after_fork(self) -> None:
        """Continue after a fork, in both processes."""
        self._lock.release()

    def _take(self, nbytes: int, is_for_all: bool = False) -> _Segment:
        with self._lock:
            self._tidy()
            most = max(2 * nbytes, mmap.PAGESIZE)
            fits = [each for each in self._segments if each.is_idle and nbytes <= each.room <= most]
            if fits:
                segment = min(fits, key=lambda each: each.room)
            else:
                segment = self._new(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
                self._segments.append(segment)
            segment.fill(is_for_all)
            return segment

    def _new(self, nbytes: int) -> _Segment:
        if nbytes >= _LARGE_NBYTES and nbytes > room().nbytes:
            self._tidy(0)  # memory kept for the next value is needed for this one
        try:
            return _Segment(nbytes)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise MemoryError(
                    f"{_gib(nbytes)} are needed, and a file of this process may have at most {_gib(largest_file())} (ulimit -f)"
                ) from None
            raise MemoryError(f"there is no shared memory for {_gib(nbytes)}: {error.strerror}") from None

    def _idle_nbytes(self) -> int:
        with self._lock:
            return sum(each.room for each in self._segments if each.is_idle and each.room <= self._idle_most)

    def _tidy(self, most: int | None = None) -> None:
        """Close segments that will not be reused: the oldest of too many, and those that unknown processes may still read."""
        most = self._idle_most if most is None else most
        idle = count = 0
        for segment in reversed(self._segments[:]):
            if segment.is_filled:
                continue
            if segment.is_left:
                self._drop(segment)
            elif segment.is_idle:
                idle += segment.room
                count += 1
                if idle > most or count > _IDLE_COUNT:
                    self._drop(segment)

    def _drop(self, segment: _Segment) -> None:
        try:
            segment.close()
        except BufferError:  # its content is being released right now
            return
        self._segments.remove(segment)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
