"""Sharded tensors compute and train as plain ones do, with the placements of torch; on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monarch_kernel.actor import ProcMesh
from monarch_kernel.tensor import Shard

PROCS = {"dp": 2, "tp": 2}

pytestmark = pytest.mark.usefixtures("tensors_dropped")


def test_a_product_is_placed_as_torch_places_it_and_an_mlp_trains_like_a_plain_one(procs: ProcMesh) -> None:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 6, generator=draws), torch.randint(0, 4, (8,), generator=draws)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
    there: Any = procs.distribute(copy.deepcopy(plain), {"0": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}})
    there_x, there_y = procs.shard(x, dp=Shard(0)), procs.shard(y, dp=Shard(0))
    product = (there_x @ there[0].weight.detach().t()).relu() @ there[2].weight.detach().t()
    assert "dp=Shard(0), tp=Partial(sum)" in repr(product)
    expected = (x @ plain[0].weight.t()).relu() @ plain[2].weight.t()
    torch.testing.assert_close(product.full_tensor(), expected.detach(), atol=1e-4, rtol=1e-4)
    losses: list[list[float]] = []
    for model, batch, labels in ((plain, x, y), (there, there_x, there_y)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            loss = F.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
