"""Data paths within a machine: one copy, in which the owner takes no part."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator

from monarch_kernel.net.memory import devices, process_memory
from monarch_kernel.net.memory.exports import BufferHandle, ExportTable
from monarch_kernel.net.memory.layout import Memory, ProcessBlock, copy, matched, memory_of, runs_of
from monarch_kernel.net.memory.leases import Lent, TableOf, identity
from monarch_kernel.net.memory.paths import LARGE_SLAB_NBYTES, SLAB_NBYTES, OwnerGone, PathUnavailable

__all__ = ["MemoryPath", "ProcessPath", "Tables"]

_SPREAD = 4  # reading this many times the wanted bytes is still faster than a request to the owner


class Tables:
    """Tables of the memory that processes of this machine lend, this process included."""

    def __init__(self) -> None:
        self._identity = ""
        self._tables: dict[bytes, TableOf] = {}
        self._lock = threading.Lock()

    def is_local(self, lent: Lent) -> bool:
        """Whether a table belongs to a process of this machine."""
        self._identity = self._identity or identity()
        return lent.machine == self._identity

    @contextlib.contextmanager
    def held(self, handle: BufferHandle) -> Iterator[TableOf]:
        """Keep lent memory in place within a ``with`` block.

        Raises:
            OwnerGone: on entry, the memory is no longer lent; on exit, its owner has ended meanwhile.
            PathUnavailable: the table can't be opened.
        """
        table = self._table_of(handle.lent)
        with table.held(handle.lease) as is_lent:
            if not is_lent:
                raise OwnerGone("it was dropped") if table.is_alive else OwnerGone("its owner has ended")
            yield table
        if not table.is_alive:  # then another process may have the pid by now
            raise OwnerGone("its owner has ended")

    def _table_of(self, lent: Lent) -> TableOf:
        with self._lock:
            table = self._tables.get(lent.cookie)
            if table is not None:
                return table
            self._tables = {cookie: each for cookie, each in self._tables.items() if each.is_alive}
            try:
                table = self._tables[lent.cookie] = TableOf(lent)
            except ProcessLookupError:
                raise OwnerGone("its owner has ended") from None
            except PermissionError as error:
                raise PathUnavailable(f"the Linux kernel does not allow it: {error.strerror}") from None
            return table


class ProcessPath:
    """Data path within this process, also from and to its devices."""

    name = "process"
    is_direct = True
    takes_devices = True
    slab_nbytes = LARGE_SLAB_NBYTES

    def __init__(self, tables: Tables, exports: ExportTable) -> None:
        self._tables = tables
        self._exports = exports

    def leads_to(self, handle: BufferHandle) -> bool:
        return handle.lent.pid == os.getpid() and self._tables.is_local(handle.lent)

    def carry(self, handle: BufferHandle, here: Memory, *, is_write: bool) -> None:
        near, far = _matched(handle, here)
        with self._tables.held(handle):
            if handle.device or here.device:
                theirs = self._exports.block(handle.lent.cookie, handle.lease, handle.address - handle.base, far.layout)
                ours = here._replace(layout=near.layout)
                devices.copy(*((theirs, ours) if is_write else (ours, theirs)))
            else:
                copy(*((far, near) if is_write else (near, far)))

    def close(self) -> None:
        """Do nothing: tables stay open, because other threads may hold memory by them."""


class MemoryPath:
    """Data path that reads or writes memory of another process of the machine directly, where the Linux kernel allows it."""

    name = "memory"
    is_direct = True
    takes_devices = False
    slab_nbytes = SLAB_NBYTES

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def leads_to(self, handle: BufferHandle) -> bool:
        return self._tables.is_local(handle.lent) and not handle.device

    def carry(self, handle: BufferHandle, here: Memory, *, is_write: bool) -> None:
        near, far = _matched(handle, here)
        with self._tables.held(handle) as table:
            try:
                (_write if is_write else _read)(handle.lent.pid, near, far)
            except process_memory.Vanished as error:
                has_ended = error.errno == errno.ESRCH or not table.is_alive  # an ending process has no memory
                raise OwnerGone("its owner has ended" if has_ended else "its memory was unmapped") from None
            except process_memory.Forbidden as error:
                raise PathUnavailable(f"the Linux kernel does not allow it: {error.strerror}") from None

    def close(self) -> None:
        """Do nothing: tables stay open, because other threads may hold memory by them."""


def _matched(handle: BufferHandle, here: Memory) -> tuple[ProcessBlock, ProcessBlock]:
    ours, theirs = matched(here.layout, handle.layout)
    return ProcessBlock(here.address, ours), ProcessBlock(handle.address, theirs)


def _read(pid: int, near: ProcessBlock, far: ProcessBlock) -> None:
    """Read from another process; where the runs are short, read the gaps between them too."""
    if far.layout.is_scattered:
        low, high = far.layout.span
        if high - low > _SPREAD * far.layout.nbytes:
            raise PathUnavailable("its elements are too far apart")
        block = bytearray(high - low)
        whole = memory_of(block).address
        process_memory.read(pid, [(whole, high - low)], [(far.address + low, high - low)])
        copy(near, ProcessBlock(whole - low, far.layout))
    elif near.layout.is_scattered:
        block = bytearray(near.layout.nbytes)
        packed = ProcessBlock(memory_of(block).address, near.layout.packed())
        process_memory.read(pid, runs_of(packed), runs_of(far))
        copy(near, packed)
    else:
        process_memory.read(pid, runs_of(near), runs_of(far))


def _write(pid: int, near: ProcessBlock, far: ProcessBlock) -> None:
    """Write into another process, without touching the gaps between the elements there."""
    if far.layout.is_scattered:
        raise PathUnavailable("its elements are not contiguous")
    if near.layout.is_scattered:
        block = bytearray(near.layout.nbytes)
        packed = ProcessBlock(memory_of(block).address, near.layout.packed())
        copy(packed, near)
        near = packed
    process_memory.write(pid, runs_of(far), runs_of(near))
