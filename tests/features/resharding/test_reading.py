"""A rank chooses the source that it reads from if several have the same elements."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, cast

import torch

from monarch_kernel.features.resharding.plan import Part
from monarch_kernel.features.resharding.reading import Held, TensorReading
from monarch_kernel.net.memory.exports import BufferHandle
from monarch_kernel.net.memory.layout import Memory, memory_of
from monarch_kernel.net.memory.leases import Lease, Lent, identity

FULL = Part(((0, 4),), (0,))
NOBODY = cast(Any, None)  # nothing is carried here


def held(memory: Memory, machine: str, pid: int) -> Held:
    lent = Lent(machine, pid, 0, b"")
    return Held(
        "float32",
        (4,),
        (FULL,),
        BufferHandle(1, lent, Lease(0, 1), memory.address, memory.address, memory.layout, False),
    )


def chosen(sources: list[tuple[str, int]], turn: int, paths: int = 1) -> list[int]:
    """The pids of the sources that tensors are read from; each source has all tensors in full."""
    theirs = memory_of(torch.zeros(4))
    leaves = [{str(path): held(theirs, machine, pid) for path in range(paths)} for machine, pid in sources]
    reading = TensorReading(NOBODY, leaves, turn)
    for path in range(paths):
        mine = torch.zeros(4)
        reading.want(str(path), mine, memory_of(mine), [FULL])
    return [job.handle.lent.pid for job in reading._jobs]


def test_the_nearest_source_is_chosen() -> None:
    here, me = identity(), os.getpid()
    assert chosen([("elsewhere", 1), (here, 2), (here, me)], 0) == [me]
    assert chosen([("elsewhere", 1), (here, 2), ("elsewhere", 3)], 2) == [2]


def test_readers_and_tensors_are_spread_over_replicas() -> None:
    here = identity()
    replicas = [(here, 1), (here, 2), (here, 3)]
    assert [chosen(replicas, turn) for turn in range(4)] == [[1], [2], [3], [1]]
    assert set(Counter(chosen(replicas, 1, paths=9)).values()) == {3}
