"""Every data path copies the same bytes, of any layout, in both directions, and reports why it can't reach memory."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_kernel.actor import Actor, ProcMesh, endpoint, this_host, this_proc
from monarch_kernel.actor.channels import client_here
from monarch_kernel.net.memory.exports import BufferHandle
from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.net.memory.paths import DataPath, OwnerGone, PathUnavailable
from monarch_kernel.rdma import Buffer
from tests.net.memory.test_layout import same_kind, views
from tests.support.waiting import LONG_S, wait_until

PROCS = {"gpus": 1}
LARGE = (9 << 20) + 4  # bytes: several pieces, the last one short
WITHIN = ("process",)
"""Data paths within a process, where both ends end together."""

PATHS = (*WITHIN, "memory", "rdma", "network", "messages")


class Owner(Actor):
    """Lends memory."""

    def __init__(self) -> None:
        self.kept: Any = None

    @endpoint
    def lend(self, thing: Any) -> Buffer:
        self.kept = thing
        return Buffer(thing)

    @endpoint
    def lend_as(self, thing: np.ndarray[Any, Any], steps: tuple[int, ...], order: tuple[int, ...]) -> Buffer:
        """Lend memory with gaps between the elements and the axes in another order."""
        whole = np.zeros([size * abs(step) for size, step in zip(thing.shape, steps)], thing.dtype)
        self.kept = whole[tuple(slice(None, None, step) for step in steps)].transpose(order)
        self.kept[...] = thing.transpose(order)
        return Buffer(self.kept)

    @endpoint
    def lend_sparse(self, nbytes: int, marks: dict[int, bytes]) -> Buffer:
        """Lend sparse memory, in which only the marks occupy pages."""
        self.kept = mmap.mmap(-1, nbytes)
        for at, mark in marks.items():
            self.kept[at : at + len(mark)] = mark
        return Buffer(self.kept)

    @endpoint
    def holds(self) -> Any:
        return self.kept

    @endpoint
    def found(self, at: int, nbytes: int) -> bytes:
        return bytes(self.kept[at : at + nbytes])

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Way(NamedTuple):
    """A data path, and an owner at its other end."""

    path: DataPath
    owner: Any

    def lend(self, thing: Any) -> Buffer:
        return self.owner.lend.call_one(thing).get(LONG_S)

    def holds(self) -> Any:
        return self.owner.holds.call_one().get(LONG_S)

    def read(self, buffer: Buffer, into: Any) -> None:
        self.path.carry(buffer._handle, memory_of(into), is_write=False)

    def write(self, buffer: Buffer, source: Any) -> None:
        self.path.carry(buffer._handle, memory_of(source), is_write=True)


@pytest.fixture(autouse=True)
def nothing_open() -> Iterator[None]:
    """Close the streams that are kept for the next transfer after each test."""
    yield
    client_here().paths.close()


def way_of(name: str, procs: ProcMesh) -> Way:
    owner = (this_proc() if name in WITHIN else procs).spawn("owner", Owner)
    way = Way(client_here().paths[name], owner)
    try:
        way.read(way.lend(b"x"), bytearray(1))
    except PathUnavailable as error:
        pytest.skip(f"{name}: {error}")
    return way


@pytest.fixture(scope="module", params=PATHS)
def way(request: pytest.FixtureRequest, procs: ProcMesh) -> Iterator[Way]:
    way = way_of(request.param, procs)
    assert way.path.name == request.param
    yield way
    way.owner.stop().get(LONG_S)


@pytest.mark.parametrize("count", [0, 1, 1000, LARGE // 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_bytes_arrive_unchanged(way: Way, dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count).to(dtype)
    buffer = way.lend(tensor)
    way.read(buffer, into := torch.zeros(count, dtype=dtype))
    assert torch.equal(into, tensor)
    way.write(buffer, ~tensor if dtype == torch.bool else tensor + 1)
    assert torch.equal(way.holds(), ~tensor if dtype == torch.bool else tensor + 1)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_layout_is_copied_into_any_other(way: Way, data: st.DataObject) -> None:
    values = data.draw(views())
    steps = [data.draw(st.sampled_from([1, 2, -1])) for _ in values.shape]
    if steps and data.draw(st.booleans()):  # in one axis only: in three the gaps have gigabytes, and RDMA pins them
        steps[data.draw(st.integers(0, len(steps) - 1))] = 700
    order = tuple(data.draw(st.permutations(range(values.ndim))))
    buffer = way.owner.lend_as.call_one(values, tuple(steps), order).get(LONG_S)
    wanted = values.transpose(order)
    for into in (same_kind(data.draw, wanted), np.zeros(wanted.size, values.dtype), np.zeros(wanted.nbytes, "u1")):
        try:
            way.read(buffer, into)
        except PathUnavailable:  # a data path may refuse a layout that it handles badly
            assert not buffer._handle.layout.is_contiguous
        else:
            assert into.tobytes() == wanted.tobytes()
    source = same_kind(data.draw, wanted)
    source[...] = wanted[::-1] if wanted.ndim else wanted
    try:
        way.write(buffer, source)
    except PathUnavailable:
        assert not buffer._handle.layout.is_contiguous
    else:
        assert way.holds().tobytes() == source.tobytes()


def test_gaps_between_elements_are_not_touched(way: Way) -> None:
    whole = np.arange(4000, dtype="i8").reshape(2, 2000)
    buffer = way.lend(whole)[1:]
    way.write(buffer, np.zeros((1, 2000), "i8"))
    assert way.holds()[0].tolist() == list(range(2000))
    into = np.arange(8000, dtype="i8").reshape(2, 4000)
    way.read(buffer, into[1:, :2000])
    assert into[0].tolist() == list(range(4000))
    assert into[1].tolist() == [0] * 2000 + list(range(6000, 8000))


def test_an_empty_part_may_lie_anywhere(way: Way) -> None:
    buffer = way.lend(torch.zeros(3, 8)[:, ::4])
    way.read(buffer[3:], nothing := torch.zeros(0, 2))  # beyond the last element
    way.write(buffer[3:], nothing)


def test_many_threads_read_parts_at_the_same_time(way: Way) -> None:
    tensor = torch.randn(64, LARGE // 256)
    buffer = way.lend(tensor)
    into = torch.zeros_like(tensor)

    def read(i: int) -> None:
        way.read(buffer[i : i + 1], into[i : i + 1])

    with ThreadPoolExecutor(8) as readers:
        list(readers.map(read, range(64)))
    assert torch.equal(into, tensor)


def test_dropped_memory_is_gone(way: Way) -> None:
    buffer = way.lend(torch.ones(LARGE // 4))
    into = torch.zeros(LARGE // 4)
    way.read(buffer, into)
    assert buffer.drop().get(LONG_S) is True
    for carry in (way.read, way.write):
        for part in (buffer, buffer[:3]):
            with pytest.raises(OwnerGone, match="it was dropped"):
                carry(part, into[: len(part)])
    way.read(way.lend(torch.full((LARGE // 4,), 2.0)), into)  # uses the same table entry, perhaps the same memory
    assert (into == 2).all()


def test_offsets_beyond_2_gib_are_found(way: Way) -> None:
    at = (2 << 30) - 3
    buffer = way.owner.lend_sparse.call_one((2 << 30) + 100, {at: b"across"}).get(LONG_S)
    way.read(buffer[at : at + 6], into := bytearray(6))
    assert into == b"across"
    way.write(buffer[at + 50 : at + 54], b"over")
    assert way.owner.found.call_one(at + 50, 4).get(LONG_S) == b"over"
    buffer.drop().get(LONG_S)


@pytest.mark.slow
def test_more_than_2_gib_at_once(way: Way) -> None:
    marks = {0: b"first", (1 << 30) + 7: b"middle", (2 << 30) + 95: b"last."}
    buffer = way.owner.lend_sparse.call_one((2 << 30) + 100, marks).get(LONG_S)
    with mmap.mmap(-1, buffer.nbytes) as into:
        way.read(buffer, into)
        assert {at: into[at : at + len(mark)] for at, mark in marks.items()} == marks
    buffer.drop().get(LONG_S)


@pytest.mark.parametrize("is_write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("name", [name for name in PATHS if name not in WITHIN])
def test_an_owner_that_is_killed_during_a_transfer_is_gone(procs: ProcMesh, name: str, is_write: bool) -> None:
    doomed = this_host().spawn_procs({"gpus": 1}, device="cpu")
    way = way_of(name, doomed)
    pid = way.owner.pid.call_one().get(LONG_S)
    buffer = way.lend(torch.ones(16 << 20))
    mine = torch.ones(16 << 20)
    done: list[bool] = []
    errors: list[BaseException] = []

    def carry() -> None:
        try:
            while True:
                (way.write if is_write else way.read)(buffer, mine)
                done.append(bool((mine == 1).all()))
        except BaseException as error:
            errors.append(error)

    carrier = threading.Thread(target=carry)
    carrier.start()
    wait_until(lambda: len(done) > 1, "two transfers")
    os.kill(pid, signal.SIGKILL)
    carrier.join(LONG_S)
    assert not carrier.is_alive()
    assert all(done)
    with pytest.raises(OwnerGone, match="its owner has ended"):
        raise errors[0]
    doomed.heal().get(LONG_S)
    with pytest.raises(OwnerGone, match="its owner has ended"):  # and does not access the process that replaces it
        (way.write if is_write else way.read)(buffer, mine)
    doomed.stop(grace_s=0).get(LONG_S)


def forged(handle: BufferHandle, nbytes: int) -> BufferHandle:
    """Change the size of a lease, whatever its memory has."""
    return handle._replace(layout=handle.layout._replace(shape=(nbytes,), strides=(1,)))


@pytest.mark.parametrize("name", [name for name in PATHS if name not in (*WITHIN, "memory")])
def test_only_lent_memory_can_be_accessed(procs: ProcMesh, name: str) -> None:
    way = way_of(name, procs)
    handle = way.lend(bytearray(100))._handle
    for is_write in (False, True):
        with pytest.raises(ValueError, match="beyond the end of what was lent"):
            way.path.carry(forged(handle, 101), memory_of(bytearray(101)), is_write=is_write)
        with pytest.raises(ValueError, match="beyond the end of what was lent"):
            way.path.carry(handle._replace(address=handle.address - 1), memory_of(bytearray(100)), is_write=is_write)
    handle = way.lend(bytes(100))._handle
    with pytest.raises(TypeError, match="can only be read"):
        way.path.carry(handle, memory_of(bytearray(100)), is_write=True)
    way.read(way.lend(b"still"), into := bytearray(5))
    assert into == b"still"
    way.owner.stop().get(LONG_S)
