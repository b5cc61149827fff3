"""Sharded tensors compute and train as plain ones do, with the placements of torch; on real ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monarch_kernel.actor import Actor, ProcMesh, endpoint
from monarch_kernel.tensor import Replicate, Shard, record, remote
from monarch_kernel.tensor.reading import values

PROCS = {"dp": 2, "tp": 2}

pytestmark = pytest.mark.usefixtures("tensors_dropped")


class Collectives(Actor):
    """Counts them."""

    @endpoint
    def count(self) -> int:
        """Return the number of collectives that this process has started."""
        groups: Any = torch.distributed.distributed_c10d._world.pg_map
        return sum(int(group._get_sequence_number_for_group()) for group in groups)


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


@pytest.mark.parametrize("name", ["norm", "sum", "mean", "amax", "std"])
def test_the_value_of_a_reduction_along_all_axes_is_that_of_the_whole(procs: ProcMesh, name: str) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    reduced = getattr(procs.shard(x, dp=Shard(0), tp=Shard(1)), name)()
    assert reduced.item() == pytest.approx(getattr(x, name)().item(), abs=1e-5)
    everywhere = reduced.redistribute(dp=Replicate(), tp=Replicate())
    torch.testing.assert_close(everywhere.full_tensor(), getattr(x, name)())


def test_an_optimizer_steps_outside_of_a_recorded_backward_pass(procs: ProcMesh) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    there: Any = procs.distribute(copy.deepcopy(plain), {})
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    there_x = procs.shard(x, dp=Shard(0))
    losses: list[list[float]] = []
    for model, batch, wrap in ((plain, x, lambda function: function), (there, there_x, record)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

        def gradients(x: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        step = wrap(gradients)
        losses.append([])
        for _ in range(5):  # the ranks repeat it from the third call on
            losses[-1].append(step(batch).item())
            optimizer.step()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_addends_are_added_up_once_until_something_else_can_change_them(procs: ProcMesh) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    there, plain = procs.shard(x, dp=Shard(0)), x.sum(0)
    ranks = procs.spawn("collectives", Collectives)

    def count() -> int:
        values(procs, there)  # all ranks have done what was issued
        [found] = set(ranks.count.call().get().values())
        return found

    @record
    def thrice(x: Any) -> Any:
        sums = x.sum(0)
        return sums.square(), sums.abs(), sums.exp()

    for _ in range(2):
        thrice(there)
    before = count()
    found = thrice(there)
    assert count() - before == 1
    for mine, its in zip(found, (plain.square(), plain.abs(), plain.exp())):
        torch.testing.assert_close(mine.full_tensor(), its, atol=1e-4, rtol=1e-4)

    changes: list[tuple[int, Any]] = [
        (1, lambda sums: ranks.count.call().get()),
        (2, lambda sums: sums.mul_(2)),
        (2, lambda sums: sums.view(2, 3).mul_(2)),
        (2, lambda sums: sums.local().mul_(2)),
        (2, lambda sums: sums.view(2, 3).local().mul_(2)),
        (2, lambda sums: sums.detach().local().mul_(2)),
    ]
    for factor, change in changes:
        for _ in range(2):  # all is learned in the first turn
            sums = there.sum(0)
            assert "dp=Partial(sum)" in repr(sums)
            before = count()
            first = sums.square()
            change(sums)
            second = sums.abs()
            after = count()
        assert after - before == 2
        torch.testing.assert_close(first.full_tensor(), plain.square(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(second.full_tensor(), (factor * plain).abs(), atol=1e-4, rtol=1e-4)
    ranks.stop().get()


def test_addends_are_added_up_again_after_a_write_through_a_view_that_is_a_copy(procs: ProcMesh) -> None:
    x = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(0))
    there = procs.shard(x, dp=Shard(0), tp=Shard(2))
    for is_read_through_view in (False, True) * 2:  # all is learned in the first turn
        plain, sums = x.sum(0), there.sum(0)
        assert "dp=Partial(sum), tp=Shard(1)" in repr(sums)
        results = []
        for each in (plain, sums):
            copied: Any = each.unsqueeze(0)[:, :, 1:3]  # has elements of other ranks
            read, written = (copied.transpose(1, 2), each) if is_read_through_view else (each, copied)
            before = read.square()
            written.mul_(2)
            results.append((before, read.exp()))
        for its, mine in zip(*results):
            torch.testing.assert_close(mine.full_tensor(), its, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("function", "shape", "dim"),
    [
        (lambda x: F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3), (2, 5, 1, 2), 2),
        (lambda x: F.interpolate(x, scale_factor=2), (3, 1, 5), 1),
        (lambda x: torch._foreach_max([x, x * 2])[1], (1, 3), 0),
        (lambda x: torch.fft.rfft(x, dim=0).abs(), (5, 1), 1),
        (lambda x: F.group_norm(x.to(memory_format=torch.channels_last), 2).exp(), (3, 4, 5, 6), 1),
        (lambda x: x.select(-1, 1), (4, 3), 0),
    ],
    ids=["attention", "interpolate", "foreach_max", "fft", "group_norm", "select"],
)
def test_parts_without_elements_or_in_another_order_give_what_the_whole_gives(
    procs: ProcMesh, function: Any, shape: tuple[int, ...], dim: int
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = []
    for leaf in (x.clone().requires_grad_(), procs.shard(x, dp=Shard(dim)).requires_grad_()):
        y = function(leaf)
        found.append((y.detach(), *torch.autograd.grad((y * y).sum(), leaf)))
    for its, mine in zip(*found):
        torch.testing.assert_close(mine.full_tensor(), its, atol=1e-4, rtol=1e-4)


def test_ranks_agree_about_a_sum_after_a_call_whose_argument_one_of_them_has_lost(procs: ProcMesh) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    there, outside = procs.shard(x, dp=Shard(0)), procs.rank_tensor("dp") * 9
    clone = remote(torch.clone, propagate=torch.clone)
    for _ in range(2):  # all is learned in the first turn
        sums = there.sum(0)
        lost = sums.local().index_select(0, outside.view(1))
        sums.square()
        clone(lost)
        torch.testing.assert_close(sums.exp().full_tensor(), x.sum(0).exp(), atol=1e-4, rtol=1e-4)
