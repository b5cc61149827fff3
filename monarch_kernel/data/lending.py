"""Memory that this process has lent out, and memory of others that it carries from and to."""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

from monarch_kernel.data import direct
from monarch_kernel.data.leases import Lease, Lent, Table, TableOf, identity
from monarch_kernel.data.memory import Layout, Memory, Place, copy, matched, memory_of, runs_of

__all__ = ["Gone", "Lendings", "Loan", "NoRoad", "Roads", "Transfer"]

_SWEEP_S = 0.01
_SPREAD = 4  # reading this much more than is wanted is still better than asking the owner


class Gone(Exception):
    """Memory is no longer lent, or its owner has ended; the text says which."""


class NoRoad(Exception):
    """Memory can't be reached from here by any way that was tried; the text says why."""


class Loan(NamedTuple):
    """A handle on memory of a process, which travels; ``base`` is where the whole begins of which this is a part."""

    lent: Lent
    lease: Lease
    base: int
    address: int
    layout: Layout
    is_readonly: bool


class Transfer(NamedTuple):
    """How bytes were carried.

    Attributes:
        nbytes: bytes.
        seconds: how long it took, from when it was begun.
        road: "process" within one process, "memory" straight from or into memory of another process of the machine,
            "messages" by way of the connections between processes, where the owner takes part.
    """

    nbytes: int
    seconds: float
    road: str


class Lendings:
    """What this process has lent out; memory stays where it is until its loan has ended and no transfer goes on."""

    def __init__(self) -> None:
        self._table: Table | None = None
        self._held: dict[Lease, Memory] = {}
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
            owner: the actor that lends it, with which the loan ends; 0 for the program.

        Raises:
            MemoryError: too much is lent at the same time.
        """
        with self._lock:
            if self._table is None:
                self._table = Table()
                direct.allow()
            lease = self._table.lend()
            self._held[lease] = memory
            if owner:
                self._owned.setdefault(owner, set()).add(lease)
            return Loan(self._table.lent, lease, memory.address, memory.address, memory.layout, memory.is_readonly)

    def owns(self, cookie: bytes) -> bool:
        """Whether a table is the one of this process, and not of one that was here before it."""
        return self._table is not None and self._table.lent.cookie == cookie

    def memory(self, lease: Lease) -> Memory | None:
        """What was lent; None if the loan has ended."""
        return self._held.get(lease)

    def end_all_of(self, owner: int) -> None:
        """End what an actor has lent."""
        for lease in self._owned.pop(owner, ()):
            self.end(lease)

    def end(self, lease: Lease) -> bool:
        """End a loan: no transfer begins any more, and the memory is let go when none goes on. False if it had ended."""
        with self._lock:
            memory = self._held.pop(lease, None)
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


class Roads:
    """Carries bytes between memory of this process and memory that was lent, by the shortest way there is."""

    def __init__(self) -> None:
        self._identity = ""
        self._tables: dict[bytes, TableOf] = {}
        self._lock = threading.Lock()

    def leads_to(self, loan: Loan) -> bool:
        """Whether memory can be reached without its owner, as far as is known without trying."""
        self._identity = self._identity or identity()
        return loan.lent.machine == self._identity

    def read(self, loan: Loan, to: Memory) -> Transfer:
        """Copy what was lent into memory of this process, on this thread.

        Raises:
            Gone: it is no longer lent; what ``to`` holds is undefined.
            NoRoad: it can't be reached from here.
        """
        return self._carry(loan, to, is_write=False)

    def write(self, loan: Loan, source: Memory) -> Transfer:
        """Copy memory of this process into what was lent, on this thread; errors as those of `read`."""
        return self._carry(loan, source, is_write=True)

    def _carry(self, loan: Loan, here: Memory, *, is_write: bool) -> Transfer:
        begun = time.perf_counter()
        if not self.leads_to(loan):
            raise NoRoad("it is on another machine")
        ours, theirs = matched(here.layout, loan.layout)
        near, far = Place(here.address, ours), Place(loan.address, theirs)
        table = self._table_of(loan.lent)
        try:
            with table.held(loan.lease) as is_lent:
                if not is_lent:
                    raise Gone("it was dropped") if table.is_alive else Gone("its owner has ended")
                if loan.lent.pid == os.getpid():
                    road = "process"
                    copy(*((far, near) if is_write else (near, far)))
                else:
                    road = "memory"
                    (_write if is_write else _read)(loan.lent.pid, near, far)
        except direct.Vanished:
            raise Gone("its memory was unmapped" if table.is_alive else "its owner has ended") from None
        except direct.Forbidden as error:
            raise NoRoad(f"the Linux kernel does not allow it: {error.strerror}") from None
        if not table.is_alive:  # then the pid may be that of another process by now
            raise Gone("its owner has ended")
        return Transfer(loan.layout.nbytes, time.perf_counter() - begun, road)

    def _table_of(self, lent: Lent) -> TableOf:
        with self._lock:
            table = self._tables.get(lent.cookie)
            if table is not None:
                return table
            try:
                table = self._tables[lent.cookie] = TableOf(lent)
            except ProcessLookupError:
                raise Gone("its owner has ended") from None
            except PermissionError as error:
                raise NoRoad(f"the Linux kernel does not allow it: {error.strerror}") from None
            return table


def _read(pid: int, near: Place, far: Place) -> None:
    """Read from another process; short runs there by way of all that lies between them."""
    if far.layout.is_scattered:
        low, high = far.layout.span
        if high - low > _SPREAD * far.layout.nbytes:
            raise NoRoad("its elements are too far apart")
        block = bytearray(high - low)
        whole = memory_of(block).address
        direct.read(pid, [(whole, high - low)], [(far.address + low, high - low)])
        copy(near, Place(whole - low, far.layout))
    elif near.layout.is_scattered:
        block = bytearray(near.layout.nbytes)
        packed = Place(memory_of(block).address, near.layout.packed())
        direct.read(pid, runs_of(packed), runs_of(far))
        copy(near, packed)
    else:
        direct.read(pid, runs_of(near), runs_of(far))


def _write(pid: int, near: Place, far: Place) -> None:
    """Write into another process; what lies between the elements there is not touched."""
    if far.layout.is_scattered:
        raise NoRoad("its elements are not one after the other")
    if near.layout.is_scattered:
        block = bytearray(near.layout.nbytes)
        packed = Place(memory_of(block).address, near.layout.packed())
        copy(packed, near)
        near = packed
    direct.write(pid, runs_of(far), runs_of(near))
