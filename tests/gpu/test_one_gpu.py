"""Training, errors, interrupts and transfers on one NVIDIA GPU, which two meshes share.

Without a GPU the tests are skipped. ``MONARCH_GPU_TESTS=cpu`` runs all but what only a GPU has on the CPU, to try them out.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from monarch_kernel.actor import Actor, ProcMesh, endpoint, this_host
from monarch_kernel.errors import MonarchError, RemoteError
from monarch_kernel.rdma import Buffer
from monarch_kernel.runtime.host.gpus import GpuMeters
from monarch_kernel.train.process_group.worker import GroupStore
from monarch_kernel.train.snapshots.rewind import roll_back
from tests.support.waiting import LONG_S, wait_until

HAS_GPU = torch.cuda.is_available()
DEVICE: Literal["cuda", "cpu"] = "cuda" if os.environ.get("MONARCH_GPU_TESTS", "cuda") == "cuda" else "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cuda" and not HAS_GPU, reason="there is no CUDA device")]
only_gpu = pytest.mark.skipif(not HAS_GPU or DEVICE == "cpu", reason="there is no CUDA device")

PRELUDE = """
import torch, torch.distributed as dist
from torch import nn
device = torch.device(kind)
"""


@pytest.fixture(scope="module")
def meshes(session: None, by_value: None) -> Iterator[tuple[ProcMesh, ProcMesh]]:
    """Two meshes of one rank each, with process groups."""
    store = GroupStore()
    both = [this_host().spawn_procs({"gpus": 1}, name=name, device=DEVICE) for name in ("trainer", "generator")]
    for mesh in both:
        mesh["kind"] = DEVICE
        mesh.run(PRELUDE).get(LONG_S)
        store.form(mesh).get(LONG_S)
    yield both[0], both[1]
    for mesh in both:
        mesh.stop(grace_s=0).get(LONG_S)
    store.close()


@pytest.fixture
def mesh(meshes: tuple[ProcMesh, ProcMesh]) -> ProcMesh:
    return meshes[0]


def run(mesh: ProcMesh, code: str) -> Any:
    """Run a cell on a rank; gives its value."""
    return mesh.run(code).get(LONG_S).values()[0]


@only_gpu
def test_the_group_uses_nccl_for_tensors_of_the_gpu_and_gloo_for_those_of_the_cpu(mesh: ProcMesh) -> None:
    code = """
group = dist.distributed_c10d._get_default_group()
[type(group._get_backend(torch.device(each))).__name__ for each in ("cuda", "cpu")]
"""
    assert run(mesh, code) == ["ProcessGroupNCCL", "ProcessGroupGloo"]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_collectives_run_on_tensors_of_both_devices(mesh: ProcMesh, kind: str) -> None:
    code = f"""
x = torch.arange(4.0, device={kind if kind == "cpu" else DEVICE!r})
dist.all_reduce(x)
parts = [torch.empty_like(x)]
dist.all_gather(parts, x)
objects = [None]
dist.all_gather_object(objects, "text")
dist.barrier()
parts[0].tolist(), objects
"""
    assert run(mesh, code) == ([0.0, 1.0, 2.0, 3.0], ["text"])


@only_gpu
def test_the_reading_of_a_rank_is_that_of_the_driver(mesh: ProcMesh) -> None:
    """The view shows the memory of the GPU that all its processes use."""
    run(mesh, "big = torch.zeros(3 << 30, dtype=torch.uint8, device=device); torch.cuda.synchronize()")
    driver = GpuMeters().read({"CUDA_VISIBLE_DEVICES": "0"})
    wait_until(
        lambda: abs(mesh.view().ranks[0].gpu_nbytes - driver.used_nbytes) < 64 << 20, "a reading with the new tensor"
    )
    assert mesh.view().ranks[0].gpu_total_nbytes == driver.total_nbytes
    assert driver.used_nbytes >= 3 << 30
    run(mesh, "del big; torch.cuda.empty_cache()")


@only_gpu
def test_running_out_of_memory_is_an_error_and_the_rank_goes_on(mesh: ProcMesh) -> None:
    with pytest.raises(RemoteError, match="OutOfMemoryError") as caught:
        run(mesh, "torch.empty(1 << 42, dtype=torch.uint8, device=device)")
    assert "4096.00 GiB" in str(caught.value)
    folder = re.search(r"what the GPU held is in (\S+), in a file named by the pid", str(caught.value))
    assert folder is not None
    snapshot = Path(folder[1], f"{run(mesh, 'import os; os.getpid()')}.pickle")
    assert "segments" in pickle.loads(snapshot.read_bytes())
    assert run(mesh, "torch.ones(2, device=device).sum().item()") == 2
    shutil.rmtree(folder[1])


@only_gpu
def test_an_interrupt_during_a_kernel_ends_the_cell_when_the_kernel_ends(mesh: ProcMesh) -> None:
    future = mesh.run(
        "print('up', flush=True)\ntorch.cuda._sleep(int(6e9))\ntorch.cuda.synchronize()\n'not interrupted'"
    )
    wait_until(lambda: "synchronize" in str(mesh.doing().get(LONG_S)), "the rank to wait for the kernel")
    future.interrupt()
    with pytest.raises(RemoteError) as caught:
        future.get(LONG_S)
    assert "interrupt" in str(caught.value).lower()
    assert run(mesh, "1 + 1") == 2


def test_training_on_the_gpu_gives_the_losses_of_the_same_code_by_hand(mesh: ProcMesh) -> None:
    code = """
from torch.distributed.fsdp import fully_shard
from monarch_kernel.parallel import parallelize

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)

def losses(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(8):
        torch.manual_seed(step)
        x = torch.randn(16, 64, device=device)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found

hand = make()
fully_shard(hand)
torch.manual_seed(0)
ours = parallelize(make(), mesh, "fsdp", example=torch.randn(2, 64, device=device), quiet=True)
losses(hand), losses(ours)
"""
    hand, ours = run(mesh, code)
    assert hand == pytest.approx(ours, rel=1e-6)
    assert hand[-1] < hand[0]


def test_a_rollback_restores_weights_and_the_generator_of_the_gpu(mesh: ProcMesh) -> None:
    code = """
model = nn.Linear(8, 8, device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

def train(n):
    live.snapshot(model=model, optimizer=optimizer, every=2)
    seen = {}
    for step in live.loop(n):
        optimizer.zero_grad()
        model(torch.randn(4, 8, device=device)).square().mean().backward()
        optimizer.step()
        seen[step] = float(model.weight.double().sum()), float(torch.rand((), device=device))
    return seen

train(7)
"""
    first = run(mesh, code)
    step = roll_back(mesh)
    again = run(mesh, "train(7)")
    assert set(again) == set(range(step, 7))
    assert again == {number: first[number] for number in again}


def test_a_checkpoint_of_the_gpu_is_loaded_onto_it(mesh: ProcMesh, tmp_path: Any) -> None:
    mesh["folder"] = str(tmp_path / "checkpoint")
    code = """
from monarch_kernel import checkpoint
torch.manual_seed(3)
model = nn.Linear(16, 16, device=device)
checkpoint.save(folder, model=model)
before = model.weight.detach().clone()
model.weight.data.zero_()
checkpoint.load(folder, model=model)
model.weight.device.type, torch.equal(model.weight, before)
"""
    assert run(mesh, code) == (DEVICE, True)


class Echo(Actor):
    """Sends back what it gets, and says where it was."""

    @endpoint
    def echo(self, value: Any) -> tuple[str, Any]:
        return str(next(iter(torch.utils._pytree.tree_leaves(value))).device), value


@pytest.fixture(scope="module")
def echo(meshes: tuple[ProcMesh, ProcMesh]) -> Any:
    return meshes[1].spawn("echo", Echo)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(1 << 22, device=DEVICE),
        lambda: torch.arange(6.0, device=DEVICE).reshape(2, 3).t(),
        lambda: torch.arange(100.0, device=DEVICE)[::3],
        lambda: torch.randn(9, device=DEVICE).to(torch.bfloat16),
        lambda: torch.ones((), device=DEVICE),
        lambda: torch.ones((0, 3), device=DEVICE),
        lambda: torch.ones(6, device=DEVICE, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(50_000, device=DEVICE)),
    ],
    ids=["large", "transposed", "strided", "bfloat16", "scalar", "empty", "grad", "parameter"],
)
def test_a_tensor_travels_from_gpu_to_gpu(echo: Any, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    where, back = echo.echo.call_one(tensor).get(LONG_S)
    assert (where, back.device) == (str(tensor.device), tensor.device)
    assert (type(back), back.dtype, back.requires_grad) == (type(tensor), tensor.dtype, tensor.requires_grad)
    assert torch.equal(back, tensor)
    if tensor.is_contiguous():
        assert back.is_contiguous()


@only_gpu
def test_a_tensor_of_a_gpu_is_refused_where_there_is_none(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    mesh = this_host().spawn_procs({"r": 1}, name="cpu", device="cpu")
    with pytest.raises(MonarchError, match=r"a tensor on cuda:0 was sent to a process that can use no GPU"):
        mesh["x"] = torch.ones(3, device="cuda")
    mesh.stop(grace_s=0).get(LONG_S)


class Owner(Actor):
    """Exports a tensor that a kernel is still computing."""

    @endpoint
    def lend(self, kind: str, count: int) -> Buffer:
        factor = torch.ones(4096, 4096, device=kind)
        for _ in range(50 if kind == "cuda" else 0):
            factor = factor @ factor / 4096
        self.kept = torch.arange(count, device=kind, dtype=torch.float64) * factor[0, 0]
        return Buffer(self.kept)


class Reader(Actor):
    """Reads the tensor of another process into memory of the GPU."""

    @endpoint
    def read(self, buffer: Buffer, kind: str) -> tuple[str, bool]:
        into = torch.zeros(buffer.shape, device=kind, dtype=torch.float64)
        transfer = buffer.read_into(into).get(LONG_S)
        return transfer.path, bool(torch.equal(into.cpu(), torch.arange(len(into), dtype=torch.float64)))


@pytest.fixture
def pair(session: None, by_value: None) -> Iterator[tuple[ProcMesh, ProcMesh]]:
    """Two meshes that share a GPU for one test: what CUDA keeps for memory that is shared goes away with the processes."""
    both = [this_host().spawn_procs({"gpus": 1}, name=name, device=DEVICE) for name in ("trainer", "generator")]
    for mesh in both:
        mesh["kind"] = DEVICE
        mesh.run(PRELUDE).get(LONG_S)
    yield both[0], both[1]
    for mesh in both:
        mesh.stop(grace_s=0).get(LONG_S)


def test_weights_are_copied_from_the_trainer_to_the_generator(pair: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = pair
    make = "torch.manual_seed({seed}); model = nn.Linear(2048, 2048, device=device); model.weight.sum().item()"
    wanted = run(trainer, make.format(seed=1))
    assert run(generator, make.format(seed=2)) != wanted
    moved = generator.copy_state(trainer, "model")
    assert run(generator, "model.weight.sum().item()") == wanted
    assert moved.nbytes == (2048 * 2048 + 2048) * 4


def test_a_rank_reads_memory_of_another_rank_that_is_still_being_computed(pair: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = pair
    owner, reader = trainer.spawn("owner", Owner), generator.spawn("reader", Reader)
    buffer = owner.lend.call_one(DEVICE, 1 << 22).get(LONG_S)
    assert reader.read.call_one(buffer, DEVICE).get(LONG_S) == ("cuda" if DEVICE == "cuda" else "memory", True)


@only_gpu
def test_an_error_that_spoils_the_gpu_ends_with_a_restart_of_the_rank(session: None) -> None:
    """A device-side assert leaves the CUDA context of a process unusable; a new process has its own."""
    mesh = this_host().spawn_procs({"gpus": 1}, name="spoiled", device="cuda")
    index = "import torch\ntorch.zeros(10, device='cuda')[torch.tensor([100], device='cuda')].sum().item()"
    with pytest.raises(RemoteError, match="device-side assert"):
        run(mesh, index)
    with pytest.raises(RemoteError, match="device-side assert"):
        run(mesh, "torch.ones(3, device='cuda').sum().item()")
    mesh.restart().get(LONG_S)
    assert run(mesh, "import torch\ntorch.ones(3, device='cuda').sum().item()") == 3
    mesh.stop(grace_s=0).get(LONG_S)
