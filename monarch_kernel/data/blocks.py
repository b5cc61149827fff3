"""Blocks of shared memory in which large frames are handed to other processes of the machine: stored once, not copied again.

Theory of operation
===================

A sender copies a frame into a *block*, a memory file without a name, and sends a reference in its place. Receivers map the
file (`data/mappings.py`), so that nobody sees what another does with a value, as if each had been sent a copy. The head of the
block has a byte for the sender, which says whether it has let go of it, and one for each receiver, which that clears when its
last object in the block is gone. The sender fills the block with another frame when nothing in the sender refers to it, and
all these bytes are clear: its pages are mapped then, and to fill them costs a copy within memory, where fresh ones cost ten
times that.

A process that dies says nothing, so its bytes are cleared by whoever hears of its death (`Blocks.forget`). One that forks may
leave a child that still reads: its blocks are not used again (`Mark.LEFT`). A file is gone with the last process that has it
open, and its memory when its sender lets go of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Hashable
from enum import IntEnum
from typing import Any, NamedTuple

from monarch_kernel.data.memory import memory_of

__all__ = ["HEAD_NBYTES", "STORED_NBYTES", "Blocks", "Mark", "Reference"]

STORED_NBYTES = 256 << 10
"""Frames that are smaller travel in the message: to map a block costs more."""

HEAD_NBYTES = mmap.PAGESIZE


class Mark(IntEnum):
    """What a byte of the head says. The first one is the sender's: it has `RELEASED` the block, or not."""

    NONE = 0
    READS = 1
    LEFT = 2
    RELEASED = 3


_IDLE_SHARE = 32
"""At most one part in so many of the machine's memory is kept in blocks that are not used."""

_LARGE_NBYTES = 64 << 20
"""For frames from this size on it is looked whether there is room."""


class Reference(NamedTuple):
    """What is sent in place of a frame: the file, as the sender has it open, and which byte the receiver clears at the end."""

    pid: int
    fd: int
    inode: int
    nbytes: int
    turn: int


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
        self.readers: list[Hashable] = []

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses what it was filled with."""
        return not self.is_filled and not any(self._marks())

    @property
    def is_left(self) -> bool:
        """Whether a process that we do not know may still read it."""
        return Mark.LEFT in self._marks()

    def fill(self) -> None:
        """Take it for another frame."""
        self.is_filled = True
        self.readers.clear()
        self.map[0] = Mark.NONE

    def refer(self, reader: Hashable) -> int:
        """Note that somebody is to read it, and give the byte that says until when; 0 if there is none for him."""
        turn = 1 + len(self.readers)
        if turn == HEAD_NBYTES:
            return 0
        self.readers.append(reader)
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
        self._idle_most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _IDLE_SHARE

    def __len__(self) -> int:
        return len(self._segments)

    def store(self, frame: memoryview) -> memoryview:
        """Copy a frame into a block.

        Raises:
            MemoryError: there is no room for it; the text has the figures.
        """
        segment = self._take(frame.nbytes)
        block: Any = (ctypes.c_char * frame.nbytes).from_buffer(segment.map, HEAD_NBYTES)
        ctypes.memmove(block, memory_of(frame).address, frame.nbytes)  # without the GIL
        block.segment = segment
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
        return Reference(os.getpid(), segment.fd, segment.inode, frame.nbytes, turn)

    def forget(self, reader: Hashable) -> None:
        """A process has died: it reads nothing any more."""
        with self._lock:
            for segment in self._segments:
                segment.forget(reader)

    def _take(self, nbytes: int) -> _Segment:
        with self._lock:
            self._tidy()
            fits = [each for each in self._segments if each.is_idle and nbytes <= each.room <= 2 * nbytes]
            if fits:
                segment = min(fits, key=lambda each: each.room)
            else:
                _check_room(nbytes)
                segment = _Segment(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
                self._segments.append(segment)
            segment.fill()
            return segment

    def _tidy(self) -> None:
        """Let go of segments that are not to be used again: the oldest of too many, and those that others may still read."""
        idle = 0
        for segment in reversed(self._segments[:]):
            if segment.is_filled:
                continue
            if segment.is_left:
                self._drop(segment)
            elif segment.is_idle:
                idle += segment.room
                if idle > self._idle_most:
                    self._drop(segment)

    def _drop(self, segment: _Segment) -> None:
        try:
            segment.close()
        except BufferError:  # what it was filled with is on its way out at this moment
            return
        self._segments.remove(segment)


def _check_room(nbytes: int) -> None:
    if nbytes < _LARGE_NBYTES:
        return
    available = _available_nbytes()
    if nbytes > available:
        raise MemoryError(
            f"{nbytes / 2**30:.1f} GiB are to be sent, and {available / 2**30:.1f} GiB of memory are free"
        )


def _available_nbytes() -> int:
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62
