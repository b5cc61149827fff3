"""Buffers: a process reads and writes memory of another one, but no freed memory, and a dead process leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from monarch_kernel.actor import Actor, ActorError, ProcMesh, endpoint, this_host, this_proc
from monarch_kernel.actor.channels import client_here
from monarch_kernel.errors import BufferGoneError
from monarch_kernel.rdma import Buffer, RDMAAction, RDMABuffer, Transfer
from tests.failures.machines import APART, Machines, can_be_apart, hosts_on
from tests.support.waiting import LONG_S

PROCS = {"gpus": 2}

LARGE = 3 << 20  # elements of 4 bytes; a transfer of this size has its own thread


class Store(Actor):
    """Has memory, and exports it."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    @endpoint
    def lend(self, name: str, thing: Any) -> Buffer:
        self.kept[name] = thing
        return RDMABuffer(thing)

    @endpoint
    def lend_part(self, start: int, stop: int) -> Buffer:
        self.kept["whole"] = torch.arange(100.0)
        return RDMABuffer(self.kept["whole"])[start:stop]

    @endpoint
    def lend_and_forget(self) -> Buffer:
        return Buffer(torch.full((LARGE,), 7.0))

    @endpoint
    def holds(self, name: str) -> Any:
        return self.kept[name]

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def die(self) -> None:
        os._exit(3)

    @endpoint
    def read(self, buffer: Buffer) -> tuple[Transfer, torch.Tensor]:
        into = torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype))
        return buffer.read_into(into).get(), into

    @endpoint
    def write(self, buffer: Buffer, source: torch.Tensor) -> Transfer:
        return buffer.write_from(source).get()


@pytest.fixture
def stores(procs: ProcMesh) -> Iterator[tuple[Any, Any]]:
    stores = procs.spawn("stores", Store)
    yield stores.slice(gpus=0), stores.slice(gpus=1)
    stores.stop().get(LONG_S)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(LARGE),
        lambda: torch.randn(7, 5),
        lambda: torch.randn(7, 5).t(),
        lambda: torch.arange(60).reshape(3, 4, 5)[:, ::2, 1:],
        lambda: torch.randn(40).to(torch.bfloat16),
        lambda: torch.tensor(3.0),
        lambda: torch.zeros(0, 4),
    ],
    ids=["large", "matrix", "transposed", "strided", "bfloat16", "scalar", "empty"],
)
def test_memory_of_another_rank_is_read_and_written(stores: tuple[Any, Any], make: Callable[[], torch.Tensor]) -> None:
    owner, other = stores
    tensor = make()
    buffer = owner.lend.call_one("x", tensor).get(LONG_S)
    assert (buffer.shape, buffer.dtype, buffer.nbytes) == (
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        tensor.nbytes,
    )
    transfer, read = other.read.call_one(buffer).get(LONG_S)
    assert torch.equal(read, tensor)
    assert (transfer.nbytes, transfer.path) == (tensor.nbytes, "memory")
    other.write.call_one(buffer, tensor + 1).get(LONG_S)
    assert torch.equal(owner.holds.call_one("x").get(LONG_S), tensor + 1)


def test_the_program_reads_and_exports_memory_too(stores: tuple[Any, Any]) -> None:
    owner, _ = stores
    buffer = owner.lend.call_one("x", np.arange(12, dtype="i4").reshape(3, 4)).get(LONG_S)
    into = np.zeros((3, 4), "i4")
    assert buffer.read_into(into).get(LONG_S).path == "memory"
    assert into.tolist() == np.arange(12).reshape(3, 4).tolist()
    ours = torch.arange(4.0)
    lent = Buffer(ours)
    _, read = owner.read.call_one(lent).get(LONG_S)
    assert read.tolist() == [0, 1, 2, 3]
    owner.write.call_one(lent, torch.ones(4)).get(LONG_S)
    assert ours.tolist() == [1, 1, 1, 1]
    assert lent.drop().get(LONG_S) is True


@pytest.mark.usefixtures("procs")
def test_a_transfer_within_a_process_is_one_copy() -> None:
    buffer, into = Buffer(bytearray(b"abcdef")), bytearray(6)
    assert buffer.read_into(into).get(LONG_S).path == "process"
    assert into == b"abcdef"
    assert buffer.write_from(b"ABCDEF").get(LONG_S).nbytes == 6
    assert buffer[1:4].read_into(part := bytearray(3)).get(LONG_S).nbytes == 3
    assert part == b"BCD"


def test_parts_are_views_of_the_same_memory(stores: tuple[Any, Any]) -> None:
    owner, other = stores
    part = owner.lend_part.call_one(10, 20).get(LONG_S)
    into = torch.zeros(5)
    part[5:].read_into(into).get(LONG_S)
    assert into.tolist() == [15, 16, 17, 18, 19]
    assert len(part[-3:]) == 3
    assert part[4:4].nbytes == 0
    with pytest.raises(TypeError, match=r"buf\[start:stop\]"):
        part[3]
    with pytest.raises(TypeError, match=r"buf\[start:stop\]"):
        part[::2]
    _, read = other.read.call_one(part[:2]).get(LONG_S)
    assert read.tolist() == [10, 11]


def test_a_batch_starts_all_transfers_or_none(stores: tuple[Any, Any]) -> None:
    owner, _ = stores
    buffer = owner.lend.call_one("x", torch.arange(float(LARGE))).get(LONG_S)
    whole, few = torch.zeros(LARGE), torch.zeros(10)
    batch = RDMAAction().read_into(buffer, whole).read_into(buffer[5:15], few)
    first, second = batch.submit().get(LONG_S)
    assert (first.nbytes, second.nbytes) == (4 * LARGE, 40)
    assert few.tolist() == list(range(5, 15))
    assert torch.equal(whole, torch.arange(float(LARGE)))
    few.zero_()
    with pytest.raises(ValueError, match="shape"):
        RDMAAction().read_into(buffer[:10], few).read_into(buffer, torch.zeros(3)).submit()
    assert few.sum() == 0
    assert RDMAAction().submit().get(LONG_S) == []


@pytest.mark.parametrize(
    ("dst", "error", "what"),
    [
        (torch.zeros(4, dtype=torch.float64), TypeError, "dst has dtype float64, the buffer has float32"),
        (torch.zeros(5), ValueError, r"shape \[5\], the buffer has \[2, 2\]"),
        (torch.zeros(4, 1), ValueError, r"shape \[4, 1\]"),
        (torch.zeros(1, 1).expand(2, 2), ValueError, "several elements of dst share an address"),
        (bytearray(15), ValueError, "15 bytes, the buffer has 16"),
        (b"0123456789abcdef", TypeError, "dst is read-only"),
        ([0.0] * 4, TypeError, "this list has no memory"),
    ],
)
def test_an_unsuitable_target_is_refused_at_the_call(dst: Any, error: type[Exception], what: str) -> None:
    buffer = Buffer(torch.zeros(2, 2))
    with pytest.raises(error, match=what):
        buffer.read_into(dst)
    buffer.read_into(torch.zeros(4)).get(LONG_S)  # a flat tensor fits
    buffer.read_into(bytearray(16)).get(LONG_S)


def test_read_only_memory_is_not_written() -> None:
    with pytest.raises(TypeError, match="the memory of the buffer is read-only"):
        Buffer(b"abc").write_from(b"xyz")
    with pytest.raises(ValueError, match="several elements of the buffer share an address"):
        Buffer(torch.zeros(1).expand(6)).write_from(torch.arange(6.0))


def test_a_dropped_buffer_can_not_be_read(stores: tuple[Any, Any]) -> None:
    owner, other = stores
    buffer = owner.lend_and_forget.call_one().get(LONG_S)
    _, read = other.read.call_one(buffer).get(LONG_S)  # the export keeps it, without another reference at the owner
    assert read.sum() == 7.0 * LARGE
    assert buffer.drop().get(LONG_S) is True
    assert buffer.drop().get(LONG_S) is False
    with pytest.raises(BufferGoneError, match="it was dropped"):
        buffer.read_into(torch.zeros(LARGE)).get(LONG_S)
    with pytest.raises(ActorError, match="it was dropped"):
        other.read.call_one(buffer[:5]).get(LONG_S)
    later = owner.lend_and_forget.call_one().get(LONG_S)  # reuses the entry, and perhaps the memory
    with pytest.raises(BufferGoneError, match="it was dropped"):
        buffer.write_from(torch.zeros(LARGE)).get(LONG_S)
    assert later.read_into(torch.zeros(LARGE)).get(LONG_S).nbytes == 4 * LARGE


def test_exports_of_an_actor_end_with_it(procs: ProcMesh) -> None:
    actor = procs.slice(gpus=0).spawn("ends", Store)
    buffer = actor.lend.call_one("x", torch.zeros(4)).get(LONG_S)
    actor.stop().get(LONG_S)
    with pytest.raises(BufferGoneError, match="it was dropped"):
        buffer.read_into(torch.zeros(4)).get(LONG_S)


@pytest.mark.usefixtures("procs")
def test_a_handle_that_was_never_sent_keeps_the_export() -> None:
    tensor = torch.zeros(4)
    alive = weakref.ref(tensor.untyped_storage())
    buffer = Buffer(tensor)
    del tensor
    part = buffer[1:2]
    del buffer
    part.read_into(torch.zeros(1)).get(LONG_S)  # a part keeps the memory of the whole
    del part
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("procs")
def test_a_transfer_keeps_the_export_of_its_handle() -> None:
    lent = torch.arange(float(LARGE))
    into = [torch.zeros(LARGE // 2 * 2) for _ in range(8)]  # more than run at the same time
    futures = [Buffer(lent)[: len(each)].read_into(each) for each in into]
    assert {future.get(LONG_S).nbytes for future in futures} == {into[0].nbytes}
    assert all(torch.equal(each, lent[: len(each)]) for each in into)


def test_the_death_of_the_owner_is_an_error_with_its_cause(session: None, by_value: None) -> None:
    procs = this_host().spawn_procs({"gpus": 1}, device="cpu")
    store = procs.spawn("dies", Store)
    buffer = store.lend.call_one("x", torch.zeros(LARGE)).get(LONG_S)
    pid = store.pid.call_one().get(LONG_S)
    buffer.read_into(torch.zeros(LARGE)).get(LONG_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Exception, match="SIGKILL"):
        store.pid.call_one().get(LONG_S)
    with pytest.raises(BufferGoneError, match=r"its owner has ended .*SIGKILL"):
        buffer.read_into(torch.zeros(LARGE)).get(LONG_S)
    with pytest.raises(BufferGoneError, match="its owner has ended"):
        buffer.write_from(torch.zeros(LARGE)).get(LONG_S)
    assert buffer.drop().get(LONG_S) is False
    procs.stop().get(LONG_S)


def test_two_actors_of_the_program_share_memory_too(session: None) -> None:
    store = this_proc().spawn("here", Store)
    buffer = store.lend.call_one("x", torch.ones(4)).get(LONG_S)
    assert buffer.read_into(into := torch.zeros(4)).get(LONG_S).path == "process"
    assert into.sum() == 4
    store.stop().get(LONG_S)


@pytest.fixture(scope="module")
def apart(
    session: None, by_value: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ProcMesh, ProcMesh]]:
    """A rank here, and one on a machine whose memory neither this rank nor the program can access directly."""
    if not can_be_apart():
        pytest.skip("no process namespaces can be made here")
    near = this_host().spawn_procs({"gpus": 1}, device="cpu")
    hosts = hosts_on(Machines(tmp_path_factory.mktemp("far"), within=APART), 1)
    far = hosts.spawn_procs({"gpus": 1}, device="cpu")
    for procs in (near, far):
        procs.initialized.get(LONG_S)
    yield near, far
    near.stop(grace_s=0).get(LONG_S)
    hosts.shutdown().get(LONG_S)


def test_memory_of_another_machine_goes_through_streams(apart: tuple[ProcMesh, ProcMesh]) -> None:
    near, store = (procs.spawn("stores", Store) for procs in apart)
    tensor = torch.randn(LARGE + 1, 2)[:, 0]  # more than two pieces, the last one short; not contiguous
    buffer = store.lend.call_one("x", tensor).get(LONG_S)
    transfer = buffer.read_into(into := torch.zeros(LARGE + 1)).get(LONG_S)
    assert (transfer.path, transfer.nbytes) == ("network", tensor.numel() * 4)
    assert torch.equal(into, tensor)
    transfer, read = near.read.call_one(buffer).get(LONG_S)
    assert transfer.path == "network"
    assert torch.equal(read, tensor)
    near.write.call_one(buffer, tensor * 2).get(LONG_S)
    assert torch.equal(store.holds.call_one("x").get(LONG_S), tensor * 2)
    small = buffer[:3].read_into(torch.zeros(3)).get(LONG_S)
    assert (small.path, small.nbytes) == ("network", 12)  # there is already a stream
    client_here().paths.close()
    small = buffer[:3].read_into(torch.zeros(3)).get(LONG_S)
    assert (small.path, small.nbytes) == ("messages", 12)
    buffer.drop().get(LONG_S)
    with pytest.raises(BufferGoneError, match="it was dropped"):
        buffer.read_into(into).get(LONG_S)
    with pytest.raises(ActorError, match="it was dropped"):
        near.write.call_one(buffer[:3], torch.zeros(3)).get(LONG_S)
    client_here().paths.close()


def test_the_death_of_an_owner_out_of_reach_is_an_error_with_its_cause(apart: tuple[ProcMesh, ProcMesh]) -> None:
    store = apart[1].spawn("dies", Store)
    buffer = store.lend.call_one("x", torch.zeros(LARGE)).get(LONG_S)
    store.die.broadcast()
    with pytest.raises(BufferGoneError, match=r"its owner has ended .*exit code 3"):  # noqa: PT012
        while True:  # the owner dies during one of these
            buffer.read_into(torch.zeros(LARGE)).get(LONG_S)
    client_here().paths.close()


def test_a_transfer_that_has_failed_keeps_no_memory(session: None) -> None:
    buffer = Buffer(torch.zeros(4))
    buffer.drop().get(LONG_S)
    alive = weakref.ref(into := np.zeros(4, "f4"))
    failed = buffer.read_into(into)
    del into
    gc.disable()  # the memory must be freed without a search for cycles
    try:
        with pytest.raises(BufferGoneError):
            failed.get(LONG_S)
        assert alive() is None
    finally:
        gc.enable()
