"""Blocks of shared memory in which large frames are handed to other processes of the machine: stored once, not copied again.

Theory of operation
===================

A sender copies a frame into a *block*, a memory file without a name, and sends a reference in its place. Each receiver maps
the file privately (``MAP_PRIVATE``): it reads the pages that the sender has written, and a page that it writes to becomes its
own; so nobody sees what another does with a value, as if each had been sent a copy. When the receiver's last object in a
block is gone it says so in the block, by a byte of its own. The sender fills the block with another frame when all these
bytes say so and nothing in the sender refers to it: its pages are mapped then, and to fill them costs a copy within memory,
where fresh ones cost ten times that.

A process that dies says nothing, so its bytes are cleared by whoever hears of its death (`Blocks.forget`). One that forks may
leave a child that still reads: its blocks are not used again (``LEFT``). A file is gone with the last process that has it open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

from monarch_kernel.data.memory import memory_of

__all__ = ["STORED_NBYTES", "Blocks", "Reference", "open_block"]

STORED_NBYTES = 256 << 10
"""Frames that are smaller travel in the message: to map a block costs more."""

_HEAD_NBYTES = mmap.PAGESIZE
_DONE, _READS, _LEFT = 0, 1, 2
_IDLE_SHARE = 32
"""At most one part in so many of the machine's memory is kept in blocks that are not used."""

_LARGE_NBYTES = 64 << 20
"""For frames from this size on it is looked whether there is room."""

_forks = 0


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_parent=_note_fork)


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
            os.ftruncate(self.fd, _HEAD_NBYTES + room)
            self.map = mmap.mmap(self.fd, _HEAD_NBYTES + room)
        except BaseException:
            os.close(self.fd)
            raise
        self.inode = os.fstat(self.fd).st_ino
        self.is_filled = False
        self.readers: list[Hashable] = []

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses what it was filled with."""
        count = len(self.readers)
        return not self.is_filled and not any(self.map[:count])

    @property
    def is_left(self) -> bool:
        """Whether a process that we do not know may still read it."""
        return _LEFT in self.map[: len(self.readers)]

    def close(self) -> None:
        """Let go of it; whoever still reads it keeps it."""
        self.map.close()
        os.close(self.fd)


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
        block: Any = (ctypes.c_char * frame.nbytes).from_buffer(segment.map, _HEAD_NBYTES)
        ctypes.memmove(block, memory_of(frame).address, frame.nbytes)  # without the GIL
        block.segment = segment
        weakref.finalize(block, self._empty, segment).atexit = False
        return memoryview(block).cast("B")

    def refer(self, frame: memoryview, reader: Hashable) -> Reference | None:
        """What to send to a process of this machine in place of a frame; None if that must travel itself."""
        segment: _Segment | None = getattr(frame.obj, "segment", None)
        if segment is None:
            return None
        with self._lock:
            turn = len(segment.readers)
            if turn == _HEAD_NBYTES:
                return None
            segment.readers.append(reader)
            segment.map[turn] = _READS
        return Reference(os.getpid(), segment.fd, segment.inode, frame.nbytes, turn)

    def forget(self, reader: Hashable) -> None:
        """A process has died: it reads nothing any more."""
        with self._lock:
            for segment in self._segments:
                for turn, each in enumerate(segment.readers):
                    if each == reader and segment.map[turn] == _READS:
                        segment.map[turn] = _DONE

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
            segment.is_filled = True
            segment.readers.clear()
            return segment

    def _empty(self, segment: _Segment) -> None:
        """Nothing here refers to what a segment was filled with."""
        segment.is_filled = False

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


def open_block(reference: Reference) -> memoryview:
    """What a reference stands for, as memory of this process, which may be written to.

    Raises:
        OSError: the sender has ended, or the Linux kernel does not let us look at it.
    """
    fd = os.open(f"/proc/{reference.pid}/fd/{reference.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_ino != reference.inode:
            raise FileNotFoundError("the sender has ended, and another process has its number")
        block = mmap.mmap(fd, _HEAD_NBYTES + reference.nbytes, mmap.MAP_PRIVATE)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(block, _end_use, fd, reference.turn, _forks).atexit = False
    return memoryview(block)[_HEAD_NBYTES:]


def _end_use(fd: int, turn: int, forks: int) -> None:
    os.pwrite(fd, bytes([_DONE if forks == _forks else _LEFT]), turn)
    os.close(fd)


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
