"""Memory of devices is staged in CPU memory on every data path; here CPU memory stands in for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.actor import Actor, ProcMesh, endpoint, this_host, this_proc
from monarch_kernel.actor.channels import client_here
from monarch_kernel.errors import BufferGoneError
from monarch_kernel.net.memory import devices, paths
from monarch_kernel.net.memory.exports import BufferHandle
from monarch_kernel.net.memory.layout import Layout, Memory, memory_of
from monarch_kernel.rdma import Buffer
from tests.net.memory.test_layout import same_kind, views
from tests.support.waiting import LONG_S

PROCS = {"gpus": 1}
DEVICE = "cuda:0"
SLAB_NBYTES = 1000  # several pieces


def elsewhere(tensor: torch.Tensor) -> Memory:
    """Return a tensor's memory as if it were on a device."""
    return memory_of(tensor)._replace(device=DEVICE)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any axes, steps and order."""
    return torch.from_numpy(np.abs(draw(views().filter(lambda view: min(view.strides, default=0) >= 0))))


@given(st.data())
def test_any_block_of_a_device_is_fetched_and_stored(data: st.DataObject) -> None:
    source = data.draw(tensors())
    into = torch.zeros_like(source)
    block = devices.fetch(elsewhere(source))
    assert (block.device, block.layout.is_contiguous or not source.numel()) == ("", True)
    devices.store(elsewhere(into), block)
    assert torch.equal(into, source)


@given(st.data())
def test_blocks_are_copied_from_and_to_any_memory(data: st.DataObject) -> None:
    source = data.draw(tensors())
    plain = same_kind(data.draw, source.numpy())  # backwards, too
    devices.copy(memory_of(plain), elsewhere(source))
    assert plain.tobytes() == source.numpy().tobytes()
    back, again = torch.zeros_like(source), torch.zeros_like(source)
    devices.copy(elsewhere(back), memory_of(plain))
    devices.copy(elsewhere(again), elsewhere(back))
    assert torch.equal(again, source)


def test_a_part_of_a_block_may_have_elements_of_another_size() -> None:
    words = torch.arange(8, dtype=torch.int32)
    part = elsewhere(words)._replace(address=words.data_ptr() + 6, layout=Layout("", 2, (3, 2), (8, 2)))
    assert bytes(devices.fetch(part).keeper.numpy()) == words.numpy().view("i2")[3:15].reshape(3, 4)[:, :2].tobytes()


def test_memory_of_other_devices_than_cpu_and_cuda_is_refused() -> None:
    with pytest.raises(TypeError, match=r"is on meta, and only memory of the CPU and of CUDA devices"):
        memory_of(torch.zeros(3, device="meta"))


class Owner(Actor):
    """Lends memory as if it were on a device."""

    @endpoint
    def lend(self, thing: torch.Tensor) -> Buffer:
        self.kept = thing
        buffer = Buffer(thing)
        exports, lease = client_here().exports, buffer._handle.lease
        exports._held[lease] = elsewhere(thing)
        buffer._handle = buffer._handle._replace(device=DEVICE)
        return buffer

    @endpoint
    def lend_plainly(self, thing: torch.Tensor) -> Buffer:
        self.kept = thing
        return Buffer(thing)

    @endpoint
    def lend_on(self, device: str, count: int) -> Buffer:
        """Lend memory that is still being computed."""
        side = 4096 if device == "cuda" else 16
        tensor = torch.ones(side, side, device=device)
        for _ in range(50):
            tensor = tensor @ tensor / side
        self.kept = torch.arange(count, device=device, dtype=torch.float64) * tensor[0, 0]
        return Buffer(self.kept)

    @endpoint
    def holds(self) -> torch.Tensor:
        return self.kept


@pytest.fixture(scope="module")
def owners(procs: ProcMesh) -> Iterator[dict[str, Any]]:
    owners = {"here": this_proc().spawn("here", Owner), "there": procs.spawn("there", Owner)}
    for owner in owners.values():
        owner.lend_plainly.call_one(torch.zeros(1)).get(LONG_S)
    yield owners
    owners["here"].stop().get(LONG_S)


class Always:
    """A data path that claims to reach everything, like one to another machine."""

    is_direct = False

    def __init__(self, path: paths.DataPath) -> None:
        self.name, self.takes_devices = path.name, path.takes_devices
        self.carry, self.close = path.carry, path.close
        self.slab_nbytes = SLAB_NBYTES

    def leads_to(self, handle: BufferHandle) -> bool:
        return True


@pytest.mark.parametrize(("far", "near"), [("device", "device"), ("device", "plain"), ("plain", "device")])
@pytest.mark.parametrize("path", ["process", "memory", "network", "messages"])
def test_each_end_may_be_on_a_device(
    owners: dict[str, Any], path: str, far: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SLAB_NBYTES", SLAB_NBYTES)
    owner = owners["here" if path == "process" else "there"]
    ways = client_here().paths
    tensor = torch.arange(2400.0).reshape(3, 800)[:, ::2]
    buffer = (owner.lend if far == "device" else owner.lend_plainly).call_one(tensor).get(LONG_S)
    assert (f" on {DEVICE} " in repr(buffer)) == (far == "device")
    if path == "memory" and far == "device":
        assert not ways[path].leads_to(buffer._handle)
        return

    def carry(mine: torch.Tensor, *, is_write: bool) -> None:
        memory = elsewhere(mine) if near == "device" else memory_of(mine)
        only = paths.DataPaths((Always(ways[path]),), client_here().meters)
        assert only.carry(buffer._handle, memory, is_write=is_write) == (mine.nbytes, ANY, path)

    carry(into := torch.zeros(1200), is_write=False)
    assert torch.equal(into, tensor.reshape(-1))
    if path != "memory":  # the owner writes elements that are not adjacent
        carry((tensor + 1).contiguous(), is_write=True)
        assert torch.equal(owner.holds.call_one().get(LONG_S), tensor + 1)
    ways.close()


@pytest.fixture
def gpu_owners(session: None, by_value: None) -> Iterator[dict[str, Any]]:
    """Owners in this process and in a rank that has the GPU, for one test: CUDA keeps files while the rank shares memory."""
    mesh = this_host().spawn_procs(PROCS, name="gpu", device="cuda")
    owners = {"here": this_proc().spawn("here", Owner), "there": mesh.spawn("there", Owner)}
    for owner in owners.values():
        owner.lend_plainly.call_one(torch.zeros(1)).get(LONG_S)
    yield owners
    owners["here"].stop().get(LONG_S)
    mesh.stop(grace_s=0).get(LONG_S)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("far", "near"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("place", ["here", "there"])
def test_memory_of_a_device_is_read_and_written(gpu_owners: dict[str, Any], place: str, far: str, near: str) -> None:
    count = (100 << 20) // 8  # larger than the staging memory
    owner = gpu_owners[place]
    buffer = owner.lend_on.call_one(far, count).get(LONG_S)
    into = torch.zeros(count, device=near, dtype=torch.float64)
    transfer = buffer.read_into(into).get(LONG_S)
    if place == "there" and far == near == "cuda":
        assert transfer.path == "cuda"
    assert torch.equal(into.cpu(), torch.arange(count, dtype=torch.float64))
    for _ in range(100):
        into += 1  # still being computed when it is read
    buffer[10:].write_from(into[:-10]).get(LONG_S)
    assert torch.equal(
        owner.holds.call_one().get(LONG_S).cpu()[10:], torch.arange(100.0, count + 90, dtype=torch.float64)
    )
    buffer.drop().get(LONG_S)
    with pytest.raises(BufferGoneError, match="it was dropped"):
        buffer.read_into(into).get(LONG_S)
