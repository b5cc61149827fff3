"""Blocks of shared memory in which large frames are handed to other processes of the machine: stored once, not copied again.

Theory of operation
===================

A sender copies a frame into a *block*, a memory file without a name, and sends a reference in its place. Receivers map the
file (`net/memory/mappings.py`), so that nobody sees what another does with a value, as if each had been sent a copy. The head
of the block has a byte for the sender, which says whether it has let go of it, and one for each receiver, which that clears
when its last object in the block is gone. The sender fills the block with another frame when nothing in the sender refers to
it, and all these bytes are clear: its pages are mapped then, and to fill them costs a copy within memory, where fresh ones
cost ten times that.

A process that dies says nothing, so its bytes are cleared by whoever hears of its death (`Blocks.forget`). One that forks may
leave a child that still reads: its blocks are not used again (`Mark.LEFT`). A file is gone with the last process that has it
open, and its memory when its sender lets go of it.

A block that is *for all* is no copy of a frame: the sender's own value lies in it, is sent as it is, any number of times, and
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
"""Frames that are smaller travel in the message: to map a block costs more."""

HEAD_NBYTES = mmap.PAGESIZE


class Mark(IntEnum):
    """What a byte of the head says. The first one is the sender's: it has `RELEASED` the block, or not."""

    NONE = 0
    READS = 1
    LEFT = 2
    RELEASED = 3


_IDLE_COUNT = 256
"""At most so many blocks are kept that are not used: each has two descriptors."""

_IDLE_SHARE = 32
"""At most one part in so many of the machine's memory is kept in blocks that are not used."""

_LARGE_NBYTES = 64 << 20
"""For values from this size on it is looked whether there is room."""

_SPARE_SHARE = 32
"""Of the memory that is free one part in so many stays so, for page tables and for others."""


_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def idle_most() -> int:
    """How many bytes a process keeps in blocks that are not used; one that is larger is emptied by whoever uses it last."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _IDLE_SHARE


def empty(fd: int, nbytes: int) -> None:
    """Give the memory of a block back, but for its head; nobody may use it. Where that is not possible it stays for a while."""
    _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, HEAD_NBYTES, nbytes - HEAD_NBYTES)


class Reference(NamedTuple):
    """What is sent in place of a frame: the file, as the sender has it open, and which byte the receiver clears at the end."""

    pid: int
    fd: int
    inode: int
    nbytes: int
    turn: int
    is_for_all: bool = False


def is_for_all(frame: bytes | memoryview) -> bool:
    """Whether a frame is memory that its receivers are to share with us; also one that has been received so."""
    return type(frame) is memoryview and getattr(frame.obj, "is_for_all", False)


class _Segment:
    """A file that takes one block at a time."""

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
        self.has_heirs = False  # children of this process that have a value in it, and say nothing
        self.readers: list[Hashable] = []

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses what it was filled with."""
        return not self.is_filled and not self.is_left and not any(self._marks())

    @property
    def is_left(self) -> bool:
        """Whether a process that we do not know may still read it."""
        return self.has_heirs or Mark.LEFT in self._marks()

    def fill(self, is_for_all: bool) -> None:
        """Take it for another frame."""
        self.is_filled = True
        self.is_for_all = is_for_all
        self.readers.clear()
        self.map[0] = Mark.NONE

    def refer(self, reader: Hashable) -> int:
        """Note that somebody is to read it, and give the byte that says until when; 0 if there is none for him."""
        turn = 1 + len(self.readers)
        if self.is_for_all and Mark.NONE in (marks := self._marks()):  # whoever had it reads it no more
            turn = 1 + marks.index(Mark.NONE)
            self.readers[turn - 1] = reader
        elif turn < HEAD_NBYTES:
            self.readers.append(reader)
        else:
            return 0
        self.map[turn] = Mark.READS
        return turn

    def forget(self, reader: Hashable) -> None:
        """Somebody does not read it any more who can't say so."""
        for turn, each in enumerate(self.readers, 1):
            if each == reader and self.map[turn] == Mark.READS:
                self.map[turn] = Mark.NONE

    def release(self) -> None:
        """Nothing in this process refers to what it was filled with; in a child, which has our head too, that says nothing."""
        if os.getpid() == self.pid:
            self.map[0] = Mark.RELEASED
            if self.room > idle_most() and not self.is_left and not any(self._marks()):
                empty(self.fd, HEAD_NBYTES + self.room)
            self.is_filled = False

    def close(self) -> None:
        """Let go of it; whoever still reads it keeps it."""
        is_idle = self.is_idle
        self.map.close()
        if is_idle:  # others may have it mapped for the next time
            os.ftruncate(self.fd, 0)
        os.close(self.fd)

    def _marks(self) -> bytes:
        return self.map[1 : 1 + len(self.readers)]


class Blocks:
    """The blocks that a process sends from. For any thread."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._lock = threading.Lock()
        self._idle_most = idle_most()

    def __len__(self) -> int:
        return len(self._segments)

    def check(self, nbytes: int) -> None:
        """See whether there is room for values of so many bytes.

        Raises:
            MemoryError: there is not; the text has the figures.
        """
        if nbytes >= _LARGE_NBYTES:
            found = room()
            free = found.nbytes + self._idle_nbytes()
            if nbytes > free - free // _SPARE_SHARE:
                raise MemoryError(
                    f"{_gib(nbytes)} are to be sent, and {_gib(free)} of {found.of}, of which some must stay so"
                )

    def store(self, pieces: Sequence[bytes | memoryview], *, is_for_all: bool = False) -> memoryview:
        """Copy bytes into a block, one piece behind the other.

        Args:
            pieces: of memory.
            is_for_all: whether receivers are to write to the block itself, as the sender may.

        Raises:
            MemoryError: there is no room for it, or no file; the text says why.
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
        """What to send to a process of this machine in place of a frame; None if that must travel itself."""
        segment: _Segment | None = getattr(frame.obj, "segment", None)
        if segment is None:
            return None
        with self._lock:
            turn = segment.refer(reader)
        if not turn:
            return None
        return Reference(os.getpid(), segment.fd, segment.inode, frame.nbytes, turn, segment.is_for_all)

    def forget(self, reader: Hashable) -> None:
        """A process has died: it reads nothing any more."""
        with self._lock:
            for segment in self._segments:
                segment.forget(reader)

    def before_fork(self) -> None:
        """A child is about to have what is for all, too; nothing is stored until `after_fork`."""
        self._lock.acquire()
        for segment in self._segments:
            segment.has_heirs |= segment.is_for_all and segment.is_filled

    def after_fork(self) -> None:
        """The child is there; for both processes."""
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
            self._tidy(0)  # what was kept for the next value is needed for this one
        try:
            return _Segment(nbytes)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise MemoryError(
                    f"{_gib(nbytes)} are to be sent, and a file of this process may have {_gib(largest_file())} (ulimit -f)"
                ) from None
            raise MemoryError(f"there is no shared memory for {_gib(nbytes)}: {error.strerror}") from None

    def _idle_nbytes(self) -> int:
        with self._lock:
            return sum(each.room for each in self._segments if each.is_idle and each.room <= self._idle_most)

    def _tidy(self, most: int | None = None) -> None:
        """Let go of segments that are not to be used again: the oldest of too many, and those that others may still read."""
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
        except BufferError:  # what it was filled with is on its way out at this moment
            return
        self._segments.remove(segment)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
