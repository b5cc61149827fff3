"""Memory that this process has lent out."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from monarch_kernel.errors import BufferGoneError
from monarch_kernel.net.memory import process_memory
from monarch_kernel.net.memory.layout import Layout, Memory
from monarch_kernel.net.memory.leases import Lease, Lent, Table

__all__ = ["Lendings", "Loan"]

_SWEEP_S = 0.01


class Loan(NamedTuple):
    """A handle on memory of the process at place ``proc``; it travels.

    ``base`` is where the whole begins, if it is a part; ``device`` where the memory is, empty for the CPU.
    """

    proc: int
    lent: Lent
    lease: Lease
    base: int
    address: int
    layout: Layout
    is_readonly: bool
    device: str = ""


class Lendings:
    """What this process has lent out; memory stays where it is until its loan has ended and no transfer goes on.

    Args:
        proc: its place.
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

    def lend(self, memory: Memory, owner: int = 0) -> Loan:
        """Lend memory out, until `end`.

        Args:
            memory: what is lent; it is kept until then.
            owner: the actor that lends it, or another number, with which the loan ends; 0 for the program.

        Raises:
            MemoryError: too much is lent at the same time.
        """
        with self._lock:
            if self._table is None:
                self._table = Table()
                process_memory.allow()
            lease = self._table.lend()
            self._held[lease] = memory
            self._versions[lease] = _version_of(memory.keeper)
            if owner:
                self._owned.setdefault(owner, set()).add(lease)
            address, layout, is_readonly, _, device = memory
            return Loan(self._proc, self._table.lent, lease, address, address, layout, is_readonly, device)

    def owns(self, cookie: bytes) -> bool:
        """Whether a table is the one of this process, and not of one that was here before it."""
        return self._table is not None and self._table.lent.cookie == cookie

    def block(self, cookie: bytes, lease: Lease, offset: int, layout: Layout) -> Memory:
        """A part of what was lent, as others describe it; it stays where it is as long as this is kept.

        Args:
            cookie: of the table.
            lease: of the whole.
            offset: where the part begins, in bytes after the first element of the whole.
            layout: of the part; its dtype does not matter.

        Raises:
            BufferGoneError: it is not lent any more.
            ValueError: there is no such part.
        """
        memory = self.whole(cookie, lease)
        if layout.itemsize < 1 or len(layout.shape) != len(layout.strides) or min(layout.shape, default=1) < 0:
            raise ValueError("this is no block of memory")
        low, high = memory.layout.span
        if layout.nbytes and not low <= offset + layout.span[0] <= offset + layout.span[1] <= high:
            raise ValueError("the block lies beyond the end of what was lent")
        return memory._replace(address=memory.address + offset, layout=layout)

    def whole(self, cookie: bytes, lease: Lease) -> Memory:
        """All of what was lent; errors as those of `block`."""
        if not self.owns(cookie):
            raise BufferGoneError("its owner has ended, and another process has come in its place")
        memory = self._held.get(lease)
        if memory is None:
            raise BufferGoneError("it was dropped")
        return memory

    def is_lent(self, lease: Lease) -> bool:
        """Whether a loan of this process has not ended."""
        return lease in self._held

    def end_all_of(self, owner: int) -> list[Lease]:
        """End what an owner has lent; gives the loans of tensors that were written to here since they were lent."""
        leases = self._owned.pop(owner, set())
        written = [lease for lease in leases if self._is_written(lease)]
        for lease in leases:
            self.end(lease)
        return written

    def _is_written(self, lease: Lease) -> bool:
        memory = self._held.get(lease)
        return memory is not None and _version_of(memory.keeper) != self._versions.get(lease)

    def end(self, lease: Lease) -> bool:
        """End a loan: no transfer begins any more, and the memory is let go when none goes on. False if it had ended."""
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
        """Let go of what is not used any more; whether nothing is left."""
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
    """How often a tensor was written to, as torch counts; 0 of what it does not count for."""
    try:
        return int(getattr(thing, "_version", 0))
    except RuntimeError:  # of inference mode
        return 0
