"""Roads: the ways there are between memory of this process and memory that was lent; the best that leads there is taken."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from monarch_kernel.net.memory import devices
from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.memory.exports import Loan
from monarch_kernel.net.memory.layout import Memory, boxes, matched

__all__ = ["LARGE_SLAB_NBYTES", "SLAB_NBYTES", "Gone", "NoRoad", "Road", "Roads", "Transfer"]

SLAB_NBYTES = 64 << 20
"""What is larger is carried in parts of this size, each of which is counted when it is done."""

LARGE_SLAB_NBYTES = 1 << 30
"""The same for roads so fast that to begin is what takes time."""


class Gone(Exception):
    """Memory is no longer lent, or its owner has ended; the text says which."""


class NoRoad(Exception):
    """Memory can't be reached by a road, or no longer; the text says why."""


class Transfer(NamedTuple):
    """How bytes were carried.

    Attributes:
        nbytes: bytes.
        seconds: how long it took, from when it was begun.
        road: "process" within one process, "memory" straight from or into memory of another process of the machine, "cuda"
            the same with that of a device, "rdma" by hardware between two machines that have it, "network" by streams
            between two machines, "messages" by way of the connections between processes, where the owner takes part.
    """

    nbytes: int
    seconds: float
    road: str


class Road(Protocol):
    """One way to carry bytes; used by many threads at the same time.

    Attributes:
        name: as transfers tell it.
        is_direct: whether it waits for nobody, so that a thread that has other things to do may take it.
        takes_devices: whether memory of this process may be that of a device; else it is carried by way of memory of the CPU.
        slab_nbytes: what is larger is carried in parts of this size, each of which is counted when it is done.
    """

    name: str
    is_direct: bool
    takes_devices: bool
    slab_nbytes: int

    def leads_to(self, loan: Loan) -> bool:
        """Whether memory can be reached by it, as far as is known without trying."""
        ...

    def carry(self, loan: Loan, here: Memory, *, is_write: bool) -> None:
        """Copy what was lent into memory of this process, on this thread; the other way if ``is_write``.

        Args:
            loan: what was lent.
            here: memory of this process, as `matched` takes it.
            is_write: which way.

        Raises:
            Gone: it is no longer lent; what the memory holds into which was copied is undefined.
            NoRoad: this road does not lead there; the same of the memory. Another road may be taken.
        """
        ...

    def close(self) -> None:
        """Let go of what is open; whoever is under way gets an error."""
        ...


class Roads:
    """The roads of a process.

    Args:
        roads: the best first.
        meters: count what they carry.
    """

    def __init__(self, roads: Sequence[Road], meters: Meters) -> None:
        self._roads = tuple(roads)
        self._meters = meters

    def __getitem__(self, name: str) -> Road:
        """The road of this name."""
        return next(road for road in self._roads if road.name == name)

    def close(self) -> None:
        """Let go of what is open; whoever is under way gets an error."""
        for road in self._roads:
            road.close()

    def are_direct(self, loan: Loan) -> bool:
        """Whether the best road to memory waits for nobody, as far as is known without trying."""
        return next((road.is_direct for road in self._roads if road.leads_to(loan)), False)

    def carry(self, loan: Loan, here: Memory, *, is_write: bool) -> Transfer:
        """Copy by the first road that leads there; arguments as those of `Road.carry`.

        Raises:
            Gone: the memory is no longer lent.
            NoRoad: none leads there; the text says of each that was tried why not.
        """
        begun = time.perf_counter()
        why: list[str] = []
        for road in self._roads:
            if not road.leads_to(loan):
                continue
            try:
                self._carry(road, loan, here, is_write=is_write)
            except NoRoad as error:
                why.append(f"by {road.name}: {error}")
            else:
                return Transfer(loan.layout.nbytes, time.perf_counter() - begun, road.name)
        raise NoRoad("; ".join(why) or "no road leads to it")

    def _carry(self, road: Road, loan: Loan, here: Memory, *, is_write: bool) -> None:
        """Copy by one road, and count it."""
        us, owner = self._meters.proc, loan.proc
        source, target = (us, owner) if is_write else (owner, us)
        left = loan.layout.nbytes
        is_staged = bool(loan.device) != bool(here.device) or (bool(here.device) and not road.takes_devices)
        for there, ours in _slabs(loan, here, SLAB_NBYTES if is_staged else road.slab_nbytes):
            begun = time.perf_counter()
            _carry(road, there, ours, is_write)
            nbytes, seconds = there.layout.nbytes, time.perf_counter() - begun
            left -= nbytes
            self._meters.count(source, target, road.name, nbytes, operations=int(not left), seconds=seconds)


def _carry(road: Road, loan: Loan, here: Memory, is_write: bool) -> None:
    """Copy by a road, if it has to be by way of memory of the CPU."""
    if not here.device or road.takes_devices:
        road.carry(loan, here, is_write=is_write)
    elif is_write:
        road.carry(loan, devices.fetch(here), is_write=True)
    else:
        block = devices.staging(here)
        road.carry(loan, block, is_write=False)
        devices.store(here, block)


def _slabs(loan: Loan, here: Memory, nbytes: int) -> Iterator[tuple[Loan, Memory]]:
    """Cut what is large into parts of some size, the same ones at both ends."""
    if loan.layout.nbytes <= nbytes:
        yield loan, here
        return
    ours, theirs = matched(here.layout, loan.layout)
    for (near, layout), (far, box) in zip(boxes(ours, nbytes), boxes(theirs, nbytes)):
        there = loan._replace(address=loan.address + far, layout=box)
        yield there, here._replace(address=here.address + near, layout=layout)
