"""What a user of PyTorch Monarch's tensor engine expects of a mesh of two by two ranks, where no other test shows it.

docs/tensors-conformance.md lists the tests of Monarch, and for each the test here that shows the same, or what differs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monarch_kernel.actor import Actor, ProcMesh, ValueMesh, as_endpoint, endpoint
from monarch_kernel.tensor import (
    Stream,
    TensorError,
    fetch_shard,
    get_active_stream,
    inspect,
    no_mesh,
    record,
    remote,
    slice_mesh,
    to_mesh,
)
from tests.support.waiting import LONG_S

ROOT = Path(__file__).parents[2]
PROCS = {"host": 2, "gpu": 2}
pytestmark = pytest.mark.usefixtures("tensors_dropped")


def listed(values: ValueMesh[torch.Tensor]) -> list[Any]:
    return [value.tolist() for value in values.values()]


def test_the_index_along_several_axes(procs: ProcMesh) -> None:
    assert listed(procs.values(procs.rank_tensor(("host", "gpu")))) == [0, 1, 2, 3]
    assert listed(procs.values(procs.rank_tensor(["gpu", "host"]))) == [0, 2, 1, 3]
    assert procs.size(["host", "gpu"]) == 4
    with pytest.raises(ValueError, match="an axis is named twice: gpu, gpu"):
        procs.rank_tensor(("gpu", "gpu"))
    with pytest.raises(KeyError, match="pp"):
        procs.rank_tensor(("gpu", "pp"))


def test_slices_and_the_whole_are_used_in_turns(procs: ProcMesh) -> None:
    first, last = procs.slice(host=0), procs.slice(host=1)
    with procs.activate():
        with first.activate():
            x = torch.full((3,), 2.0)
        with last.activate():
            y = torch.full((3,), 3.0) * 5
            x.neg_()  # follows its tensor, not the active mesh
        z = torch.ones(3)
    assert listed(first.values(x * 5)) == [[-10] * 3] * 2
    assert listed(last.values(y)) == [[15] * 3] * 2
    assert listed(procs.values(z)) == [[1] * 3] * 4
    assert inspect(y).device.type == "cpu"


def test_axes_of_size_one_and_one_axis_for_all(procs: ProcMesh) -> None:
    deep = procs.split(host=("outer", "inner"), inner=1)
    with deep.activate():
        x = deep.rank_tensor("outer") * 2 + deep.rank_tensor("gpu") + torch.zeros(1)
    assert fetch_shard(x, outer=1, inner=0, gpu=1).result().tolist() == [3]
    assert listed(deep.values(x.reduce(("inner", "gpu"), "sum"))) == [[1], [1], [5], [5]]
    assert listed(deep.values(x.reduce(("outer", "gpu"), "sum"))) == [[6]] * 4
    flat = procs.flatten("all")
    assert inspect(flat.rank_tensor("all") * 2, all=3) == 6


def test_a_copy_from_one_rank_reaches_all(procs: ProcMesh) -> None:
    for part in (procs.slice(host=1), procs.slice(gpu=1), procs.slice(host=1, gpu=1)):
        with part.activate():
            x = torch.rand(3)
        there = x.to_mesh(procs)
        (axis, *_) = part.extent or ("host",)
        expected = part.values(x).values()
        copies = procs.values(there).values()
        assert {str(copy) for copy in copies} == {str(value) for value in expected}, axis


def test_a_backward_pass_needs_no_active_mesh(procs: ProcMesh) -> None:
    with procs.activate():
        x, y, z = (torch.ones(shape, requires_grad=True) for shape in ((3, 4), (4, 3), (3,)))
        loss = (x @ y + z).sum()
        with no_mesh.activate():
            loss.backward()
    assert [inspect(each.grad).sum().item() for each in (x, y, z)] == [36, 36, 9]


class Move(torch.autograd.Function):
    """Moves a tensor to another mesh, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Any, mesh: ProcMesh) -> Any:
        ctx.mesh = x.mesh
        return x.detach().to_mesh(mesh)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.to_mesh(ctx.mesh), None


def test_a_model_on_two_meshes_trains_with_an_autograd_function(procs: ProcMesh) -> None:
    first, last = procs.slice(host=0), procs.slice(host=1)
    with first.activate():
        x = torch.full((3, 4), 2.0, requires_grad=True)
        y = torch.full((4, 3), 3.0, requires_grad=True)
    moved = Move.apply(x @ y, last)  # type: ignore[no-untyped-call]
    with last.activate():
        z = torch.ones(3, requires_grad=True)
    (moved * z).sum().backward()
    assert listed(first.values(x.grad)) == [[[9.0] * 4] * 3] * 2
    assert listed(first.values(y.grad)) == [[[6.0] * 3] * 4] * 2
    assert listed(last.values(z.grad)) == [[72.0] * 3] * 2


def test_thousands_of_operations_in_a_row(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.zeros(3, 4)
        for _ in range(2048):
            x = x + torch.ones(3, 4)
    assert inspect(x, host=1, gpu=1).sum() == 2048 * 12


def test_a_lent_tensor_moves_in_its_stream(procs: ProcMesh) -> None:
    first, last, link = procs.slice(gpu=0), procs.slice(gpu=1), Stream("link")
    with first.activate():
        x = torch.arange(3.0)
    lent, borrow = link.borrow(x)
    with link.activate():
        there = lent.to_mesh(last)
    borrow.drop()
    back, borrow = get_active_stream().borrow(there)
    assert inspect(back * 2).tolist() == [0, 2, 4]
    borrow.drop()


@pytest.mark.parametrize("has_values", [True, False])
def test_arguments_that_may_be_none(procs: ProcMesh, has_values: bool) -> None:
    with procs.activate():
        x = torch.arange(12.0).view(3, 4)
        norm = nn.LayerNorm(4, bias=has_values, elementwise_affine=has_values)
        made = norm(x)
    torch.testing.assert_close(inspect(made), nn.functional.layer_norm(torch.arange(12.0).view(3, 4), (4,)))


def test_parts_of_nested_tensors_move_and_are_changed(procs: ProcMesh) -> None:
    tensors = {"a": procs.rank_tensor("host") + 0.0, "b": procs.rank_tensor("host") + 1.0}
    last = procs.slice(host=1)
    there = to_mesh(slice_mesh(tensors, host=0), last)
    for each in there.values():
        each.add_(1)
    assert [listed(last.values(each)) for each in there.values()] == [[1, 1], [2, 2]]
    assert listed(procs.values(tensors["a"])) == [0, 0, 1, 1]


# -- actors


class Adder(Actor):
    """Adds a tensor that it has from its spawn, and counts."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.calls = 0

    @endpoint
    def forward(self, x: Any) -> Any:
        return x + self.state

    @endpoint
    def count(self, x: Any) -> int:
        self.calls += 1
        return self.calls - 1

    @endpoint(propagate="inspect")
    def update(self, x: Any) -> None:
        self.state += x

    def product(self, x: Any) -> Any:
        return x @ self.state


def test_actors_have_tensors_from_their_spawn_and_calls_keep_their_order(procs: ProcMesh) -> None:
    with procs.activate():
        state, x = torch.ones(2, 2), torch.ones(2, 2)
        adder: Any = procs.spawn("adder", Adder, state)
        sums = adder.forward.call(x).get(LONG_S)
        assert [each.tolist() for each in sums.values()] == [[[2, 2], [2, 2]]] * 4
        counts = [adder.count.call(x if number % 2 else number) for number in range(10)]
        assert [each.get(LONG_S).item(host=1, gpu=1) for each in counts] == list(range(10))
        products = as_endpoint(adder.product, propagate=lambda x: x)
        before = products.rref(x)
        adder.update.rref(x)
        after = products.rref(x)
        assert (inspect(before.sum()).item(), inspect(after.sum()).item()) == (8, 16)
    adder.stop().get(LONG_S)


# -- recorded functions


def test_a_recorded_function_without_arguments_runs_on_the_active_mesh(procs: ProcMesh) -> None:
    with procs.activate():
        total = torch.zeros(())

        @record
        def step() -> Any:
            one = torch.ones(())
            total.add_(one)
            return one

        made = [step() for _ in range(5)]
    assert inspect(total) == 5
    assert [inspect(each).item() for each in made] == [1] * 5
    assert "recorded" in step.describe()
    with pytest.raises(TensorError, match=r"its mesh has to be active: call it in mesh\.activate\(\)"):
        step()


def test_results_of_a_recorded_function_may_be_its_arguments_and_views_of_them(procs: ProcMesh) -> None:
    with procs.activate():
        kept = torch.zeros(2)

    @record
    def choose(x: Any, y: Any, takes_first: bool) -> Any:
        return x if takes_first else y, x[0], kept[1]

    for number in range(4):
        with procs.activate():
            x, y = torch.full((2,), float(number)), torch.full((2,), 10.0 + number)
        chosen, view, of_kept = choose(x, y, True)
        other, _, _ = choose(x, y, False)
        for each in (chosen, view, of_kept):
            each.add_(1)  # the same memory
        assert inspect(x).tolist() == [number + 2, number + 1]
        assert inspect(other).tolist() == [10 + number] * 2
        assert inspect(kept).tolist() == [0, number + 1]


def test_a_recorded_function_changes_its_arguments_and_what_shares_their_memory(procs: ProcMesh) -> None:
    @record
    def step(x: Any, row: Any) -> Any:
        x.add_(1)
        row.mul_(2)
        return x * 1

    with procs.activate():
        x = torch.ones(2, 2)
    for _ in range(4):
        made = step(x, x[0])
    assert inspect(x).tolist() == [[46, 46], [5, 5]]
    assert inspect(made).tolist() == [[46, 46], [5, 5]]


def test_a_recorded_function_is_for_one_mesh(procs: ProcMesh) -> None:
    first, last = procs.slice(host=0), procs.slice(host=1)

    @record
    def both(x: Any, y: Any) -> Any:
        return x + x, y + y

    with first.activate():
        x = torch.ones(1)
    with last.activate():
        y = torch.ones(1)
    with pytest.raises(TensorError, match="two meshes"):
        both(x, y)


# -- remote functions


class Doubled(torch.autograd.Function):
    """Doubles on the ranks, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return double(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return double(gradient)


@remote(propagate=lambda x: x)
def double(x: Any) -> Any:
    return x * 2


def test_gradients_of_remote_functions_by_an_autograd_function(procs: ProcMesh) -> None:
    x = (procs.rank_tensor("gpu") + 1.0).requires_grad_()
    made: Any = Doubled.apply(x)  # type: ignore[no-untyped-call]
    (made * 3).backward()
    assert listed(procs.values(made)) == [2, 4, 2, 4]
    assert listed(procs.values(x.grad)) == [6] * 4


def test_the_state_of_random_numbers_is_saved_by_a_remote_function(procs: ProcMesh) -> None:
    get = remote("torch.get_rng_state", propagate="inspect")
    put = remote("torch.set_rng_state", propagate="inspect")
    with procs.activate():
        state = get()
        first, other = torch.rand(3), torch.rand(3)
        put(state)
        again = torch.rand(3)
    assert torch.equal(inspect(first), inspect(again))
    assert not torch.equal(inspect(first), inspect(other))


# -- the page


def test_the_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "tensors-conformance.md").read_text()
    rows = [
        line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ") and not line.startswith("| Monarch")
    ]
    named = {name for _, here in rows for name in re.findall(r"`(test_\w+)`", here)}
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert len(named) > 40
    assert [name for name in sorted(named) if f"def {name}(" not in sources] == []
