"""The memory that this process lends to others."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, NamedTuple

from monarch_kernel.errors import BufferGoneError
from monarch_kernel.net.memory import process_memory
from monarch_kernel.net.memory.layout import Layout, Memory
from monarch_kernel.net.memory.leases import Lease, Lent, Table

__all__ = ["BufferHandle", "ExportTable"]

_SWEEP_S = 0.01


class BufferHandle(NamedTuple):
    """A handle on memory of process ``proc``, which can be sent to other processes.

    ``base`` is the address of the whole, if this is a part; ``device`` is the device of the memory, empty for the CPU.
    """

    proc: int
    lent: Lent
    lease: Lease
    base: int
    address: int
    layout: Layout
    is_readonly: bool
    device: str = ""


class ExportTable:
    """The memory that this process lends; it stays in place until its lease has ended and no transfer is in progress.

    Args:
        proc: number of this process.
    """

    def __init__(self, proc: int) -> None:
        self._proc = proc
        self._table: Table | None = None
        self._held: dict[Lease, Memory] = {}
        self._versions: dict[Lease, int] = {}
        self._owned: dict[int, set[Lease]] = {}
        self._ending: dict[Lease, Memory] = {}
        self._lock = threading.Lock()
        self._is_sweeping = False

    def __len__(self) -> int:
        return len(self._held) + len(self._ending)

    def lend(self, memory: Memory, owner: int = 0) -> BufferHandle:
        """Lend memory until `end` is called.

        Args:
            memory: the memory; it is kept until then.
            owner: number of the actor that lends it, or another number, with which the lease ends; 0 for the program.

        Raises:
            MemoryError: too many leases exist at the same time.
        """
        with self._lock:
            if self._table is None:
                self._table = Table()
                # Ranks are children of their host agent, and on its machine descendants of the program, which has number 0.
                process_memory.allow(os.getppid() if self._proc else os.getpid())
            lease = self._table.lend()
            self._held[lease] = memory
            self._versions[lease] = _version_of(memory.keeper)
            if owner:
                self._owned.setdefault(owner, set()).add(lease)
            address, layout, is_readonly, _, device = memory
            return BufferHandle(self._proc, self._table.lent, lease, address, address, layout, is_readonly, device)

    def owns(self, cookie: bytes) -> bool:
        """Whether a table belongs to this process, and not to an earlier one with the same number."""
        return self._table is not None and self._table.lent.cookie == cookie

    def block(self, cookie: bytes, lease: Lease, offset: int, layout: Layout) -> Memory:
        """Return a part of lent memory, as another process describes it; the memory stays in place while the result exists.

        Args:
            cookie: of the table.
            lease: of the whole.
            offset: where the part starts, in bytes after the first element of the whole.
            layout: of the part; its dtype is ignored.

        Raises:
            BufferGoneError: the memory is no longer lent.
            ValueError: there is no such part.
        """
        memory = self.whole(cookie, lease)
        if layout.itemsize < 1 or len(layout.shape) != len(layout.strides) or min(layout.shape, default=1) < 0:
            raise ValueError("this is not a block of memory")
        low, high = memory.layout.span
        if layout.nbytes and not low <= offset + layout.span[0] <= offset + layout.span[1] <= high:
            raise ValueError("the block lies beyond the end of what was lent")
        return memory._replace(address=memory.address + offset, layout=layout)

    def whole(self, cookie: bytes, lease: Lease) -> Memory:
        """Return all of the lent memory; raises the errors of `block`."""
        if not self.owns(cookie):
            raise BufferGoneError("its owner has ended, and another process has replaced it")
        memory = self._held.get(lease)
        if memory is None:
            raise BufferGoneError("it was dropped")
        return memory

    def is_lent(self, lease: Lease) -> bool:
        """Whether the lease has not ended."""
        return lease in self._held

    def end_all_of(self, owner: int) -> list[Lease]:
        """End an owner's leases; returns the leases of tensors that this process has written to since they were lent."""
        leases = self._owned.pop(owner, set())
        written = [lease for lease in leases if self._is_written(lease)]
        for lease in leases:
            self.end(lease)
        return written

    def _is_written(self, lease: Lease) -> bool:
        memory = self._held.get(lease)
        return memory is not None and _version_of(memory.keeper) != self._versions.get(lease)

    def end(self, lease: Lease) -> bool:
        """End a lease: no new transfer starts, and the memory is released after the last. Returns False if it had ended."""
        with self._lock:
            memory = self._held.pop(lease, None)
            self._versions.pop(lease, None)
            if memory is None:
                return False
            assert self._table is not None
            self._table.end(lease)
            self._ending[lease] = memory
        if not self._sweep() and not self._is_sweeping:
            self._is_sweeping = True
            threading.Thread(target=self._sweep_on, name="monarch-lent", daemon=True).start()
        return True

    def _sweep(self) -> bool:
        """Release memory that is no longer in use; returns whether none is left."""
        with self._lock:
            assert self._table is not None
            for lease in [each for each in self._ending if not self._table.is_in_use(each)]:
                del self._ending[lease]
            return not self._ending

    def _sweep_on(self) -> None:
        while not self._sweep():
            time.sleep(_SWEEP_S)
        self._is_sweeping = False


def _version_of(thing: Any) -> int:
    """Return how often a tensor was written to, by torch's count; 0 for objects without a count."""
    try:
        return int(getattr(thing, "_version", 0))
    except RuntimeError:  # a tensor of inference mode
        return 0
