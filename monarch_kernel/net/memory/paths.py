"""Data paths between memory of this process and lent memory of others; a transfer takes the best one that works."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from monarch_kernel.net.memory import devices
from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.memory.exports import BufferHandle
from monarch_kernel.net.memory.layout import Memory, boxes, matched

__all__ = ["LARGE_SLAB_NBYTES", "SLAB_NBYTES", "DataPath", "DataPaths", "OwnerGone", "PathUnavailable", "Transfer"]

SLAB_NBYTES = 64 << 20
"""A larger transfer is cut into parts of this size; each part is counted when it is done."""

LARGE_SLAB_NBYTES = 1 << 30
"""The part size of data paths that are so fast that starting a copy takes most of the time."""


class OwnerGone(Exception):
    """Memory is no longer lent, or its owner has ended; the text says which."""


class PathUnavailable(Exception):
    """This data path can't reach the memory, or no longer can; the text says why."""


class Transfer(NamedTuple):
    """One completed transfer of bytes.

    Attributes:
        nbytes: number of bytes.
        seconds: duration, from the start of the transfer.
        path: the data path: "process" within one process, "memory" directly from or into memory of another process of the
            machine, "cuda" the same for memory of a device, "rdma" by hardware between two machines that have it, "network"
            by streams between two machines, "messages" over the connections between processes, where the owner takes part.
    """

    nbytes: int
    seconds: float
    path: str


class DataPath(Protocol):
    """One data path: a way to copy bytes. Many threads use it at the same time.

    Attributes:
        name: the name that transfers report.
        is_direct: whether it waits for no other process, so that a thread with other work may use it.
        takes_devices: whether memory of this process may be on a device; if not, the bytes are staged in CPU memory.
        slab_nbytes: a larger transfer is cut into parts of this size; each part is counted when it is done.
    """

    name: str
    is_direct: bool
    takes_devices: bool
    slab_nbytes: int

    def leads_to(self, handle: BufferHandle) -> bool:
        """Whether it can reach the memory, as far as is known without trying."""
        ...

    def carry(self, handle: BufferHandle, here: Memory, *, is_write: bool) -> None:
        """Copy lent memory into memory of this process, on this thread; the other way if ``is_write``.

        Args:
            handle: the lent memory.
            here: memory of this process, in the layout that `matched` returns.
            is_write: the direction.

        Raises:
            OwnerGone: the memory is no longer lent; the contents of the destination are undefined.
            PathUnavailable: this data path can't reach the memory, another may; the contents of the destination are undefined.
        """
        ...

    def close(self) -> None:
        """Release open resources; transfers in progress raise an error."""
        ...


class DataPaths:
    """The data paths of a process.

    Args:
        paths: the data paths, the best first.
        meters: counters for what they transfer.
    """

    def __init__(self, paths: Sequence[DataPath], meters: Meters) -> None:
        self._paths = tuple(paths)
        self._meters = meters

    def __getitem__(self, name: str) -> DataPath:
        """Return the data path of this name."""
        return next(path for path in self._paths if path.name == name)

    def close(self) -> None:
        """Release open resources; transfers in progress raise an error."""
        for path in self._paths:
            path.close()

    def are_direct(self, handle: BufferHandle) -> bool:
        """Whether the best data path to the memory waits for no other process, as far as is known without trying."""
        return next((path.is_direct for path in self._paths if path.leads_to(handle)), False)

    def carry(self, handle: BufferHandle, here: Memory, *, is_write: bool) -> Transfer:
        """Copy by the first data path that can reach the memory; the arguments are those of `DataPath.carry`.

        Raises:
            OwnerGone: the memory is no longer lent.
            PathUnavailable: no data path can reach it; the text gives the reason for each that was tried.
        """
        started = time.perf_counter()
        why: list[str] = []
        for path in self._paths:
            if not path.leads_to(handle):
                continue
            try:
                self._carry(path, handle, here, is_write=is_write)
            except PathUnavailable as error:
                why.append(f"by {path.name}: {error}")
            else:
                return Transfer(handle.layout.nbytes, time.perf_counter() - started, path.name)
        raise PathUnavailable("; ".join(why) or "no data path leads to it")

    def _carry(self, path: DataPath, handle: BufferHandle, here: Memory, *, is_write: bool) -> None:
        """Copy by one data path, and count the bytes."""
        us, owner = self._meters.proc, handle.proc
        source, target = (us, owner) if is_write else (owner, us)
        left = handle.layout.nbytes
        is_staged = bool(handle.device) != bool(here.device) or (bool(here.device) and not path.takes_devices)
        for there, ours in _slabs(handle, here, SLAB_NBYTES if is_staged else path.slab_nbytes):
            started = time.perf_counter()
            _carry(path, there, ours, is_write)
            nbytes, seconds = there.layout.nbytes, time.perf_counter() - started
            left -= nbytes
            self._meters.count(source, target, path.name, nbytes, operations=int(not left), seconds=seconds)


def _carry(path: DataPath, handle: BufferHandle, here: Memory, is_write: bool) -> None:
    """Copy by one data path, staged in CPU memory if necessary."""
    if not here.device or path.takes_devices:
        path.carry(handle, here, is_write=is_write)
    elif is_write:
        path.carry(handle, devices.fetch(here), is_write=True)
    else:
        block = devices.staging(here)
        path.carry(handle, block, is_write=False)
        devices.store(here, block)


def _slabs(handle: BufferHandle, here: Memory, nbytes: int) -> Iterator[tuple[BufferHandle, Memory]]:
    """Cut a large transfer into parts of at most this size, the same ones at both ends."""
    if handle.layout.nbytes <= nbytes:
        yield handle, here
        return
    ours, theirs = matched(here.layout, handle.layout)
    for (near, layout), (far, box) in zip(boxes(ours, nbytes), boxes(theirs, nbytes)):
        there = handle._replace(address=handle.address + far, layout=box)
        yield there, here._replace(address=here.address + near, layout=layout)
