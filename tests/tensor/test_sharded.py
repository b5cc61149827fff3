"""Sharded tensors: placements, values, gradients and training equal those of plain tensors; on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monarch_kernel.actor import ProcMesh
from monarch_kernel.tensor import Partial, Replicate, Shard, TensorError, fetch_shard, inspect, record
from tests.support.waiting import LONG_S

PROCS = {"dp": 2, "tp": 2}
# Four ranks import torch.distributed.tensor, which takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_products_are_placed_as_torch_places_them(procs: ProcMesh) -> None:
    x, w1, w2 = numbers(8, 6), numbers(6, 10), numbers(10, 4)
    there_x = procs.shard(x, dp=Shard(0))
    first, second = procs.shard(w1, tp=Shard(1)), procs.shard(w2, tp=Shard(0))
    y = (there_x @ first).relu() @ second
    assert "shape=(8, 4), dtype=float32, device=cpu, mesh=t {'dp': 2, 'tp': 2}, dp=Shard(0), tp=Partial(sum)" in repr(y)
    torch.testing.assert_close(y.full_tensor(), (x @ w1).relu() @ w2, atol=1e-4, rtol=1e-4)
    assert inspect(there_x, dp=1).shape == (4, 6)
    whole = y.redistribute(tp=Replicate())
    assert "dp=Shard(0), tp=Replicate()" in repr(whole)
    total = whole.sum()
    assert total.item() == pytest.approx(((x @ w1).relu() @ w2).sum().item(), abs=1e-3)


def test_the_second_time_nothing_waits(procs: ProcMesh) -> None:
    x = procs.shard(numbers(4, 4), dp=Shard(0))
    first = (x * 2 + x).sum(0)
    before = x._part.device.stream.next_id
    second = (x * 2 + x).sum(0)
    assert x._part.device.stream.next_id == before + 3  # and not the ids of a result that is not known
    assert torch.equal(first.full_tensor(), second.full_tensor())


def test_uneven_parts_and_new_tensors(procs: ProcMesh) -> None:
    x = procs.shard(torch.arange(5.0), dp=Shard(0))
    assert [inspect(x, dp=dp).tolist() for dp in (0, 1)] == [[0, 1, 2], [3, 4]]
    assert (x + procs.ones(5, dp=Shard(0))).full_tensor().tolist() == [1, 2, 3, 4, 5]
    assert procs.zeros((2, 3), tp=Shard(1)).full_tensor().tolist() == [[0] * 3] * 2
    assert procs.full(4, 7, dtype=torch.int64, tp=Shard(0)).full_tensor().tolist() == [7] * 4
    with pytest.raises(TensorError, match="returns other tensors on other ranks"):
        x.local()


def test_the_views_change_into_each_other(procs: ProcMesh) -> None:
    place = (procs.rank_tensor("dp") * 2 + procs.rank_tensor("tp")).view(1).float()
    whole = procs.from_local(place, dp=Shard(0), tp=Partial())
    assert whole.shape == (2,)
    assert whole.full_tensor().tolist() == [1, 5]
    assert [value.tolist() for value in procs.values(whole.local() * 10).values()] == [[0], [10], [20], [30]]


def test_gradients_equal_those_of_plain_tensors(procs: ProcMesh) -> None:
    x, w = numbers(8, 6), numbers(6, 4)
    mine = w.clone().requires_grad_()
    (x @ mine).square().mean().backward()
    there = procs.shard(w, tp=Shard(1)).requires_grad_()
    loss = (procs.shard(x, dp=Shard(0)) @ there).redistribute(tp=Replicate()).square().mean()
    loss.backward()
    assert mine.grad is not None
    torch.testing.assert_close(there.grad.full_tensor(), mine.grad)


class Block(nn.Module):
    """Two layers, which tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_distributed_module_trains_like_a_plain_one(procs: ProcMesh, kind: Any) -> None:
    torch.manual_seed(0)
    plain = Block()
    plan = {"up": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
    model = procs.distribute(copy.deepcopy(plain), plan)
    assert "tp=Shard(0)" in repr(model.up.bias)
    mine, theirs = kind(plain.parameters(), lr=0.01), kind(model.parameters(), lr=0.01)
    for step in range(4):
        x, y = numbers(8, 6) + step, torch.arange(8) % 3
        losses = []
        for module, optimizer, batch, labels in (
            (plain, mine, x, y),
            (model, theirs, procs.shard(x, dp=Shard(0)), procs.shard(y, dp=Shard(0))),
        ):
            loss = F.cross_entropy(module(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    for here, there in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(there.detach().full_tensor(), here.detach(), atol=1e-5, rtol=1e-4)


def test_a_recorded_function_of_sharded_tensors(procs: ProcMesh) -> None:
    w = procs.shard(numbers(6, 4), tp=Shard(1))

    @record
    def forward(x: Any) -> Any:
        return (x @ w).redistribute(tp=Replicate()).sum()

    for step in range(5):
        x = numbers(8, 6) + step
        assert forward(procs.shard(x, dp=Shard(0))).item() == pytest.approx((x @ numbers(6, 4)).sum().item(), abs=1e-3)
    assert "recorded;" in forward.describe()


def test_sharded_tensors_are_dtensors_in_cells(procs: ProcMesh) -> None:
    procs["w"] = procs.shard(torch.arange(8.0).view(4, 2), dp=Shard(0))
    code = "type(w).__name__, w.to_local().shape[0], tuple(map(str, w.placements)), w.device_mesh.mesh_dim_names"
    assert procs.run(code).get(LONG_S).values() == (("DTensor", 2, ("S(0)", "R"), ("dp", "tp")),) * 4
    procs.run("w2 = w * 2").get(LONG_S)
    doubled = procs.tensor("w2")
    assert "dp=Shard(0), tp=Replicate()" in repr(doubled)
    assert doubled.full_tensor().sum() == 56


def test_wrong_use_is_an_error_at_its_line(procs: ProcMesh) -> None:
    x = procs.shard(numbers(4, 2), dp=Shard(0))
    with pytest.raises(TensorError, match=r"(?s)torch.mm failed on .*\[4, 2\] X \[4, 2\]") as caught:
        x @ x
    assert "propagation" not in str(caught.value)
    with pytest.raises(KeyError, match="pp"):
        procs.shard(numbers(2), pp=Shard(0))
    with pytest.raises(TensorError, match=r"dp=Shard\(2\) is not possible: the tensor has 2 dimensions"):
        x.redistribute(dp=Shard(2))
    with pytest.raises(TensorError, match="can't be placed as Partial"):
        procs.shard(numbers(2), dp=Partial())
    with pytest.raises(TensorError, match="sharded tensors need all ranks of a mesh"):
        procs.slice(dp=0).shard(numbers(2), tp=Shard(0))
    with pytest.raises(TensorError, match="draws random numbers"):
        x.normal_()
    with pytest.raises(TensorError, match="no parameter of the module matches 'nothing'"):
        procs.distribute(nn.Linear(1, 1), {"nothing": {}})
    with pytest.raises(TensorError, match=r"local\(\) is for sharded tensors"):
        procs.rank_tensor("dp").local()
    assert fetch_shard(x).result(LONG_S).shape == (2, 2)
