"""Sharded tensors: placements, values, gradients and training equal those of plain tensors; on real ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from monarch_kernel import checkpoint
from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.errors import CheckpointError, MoveError
from monarch_kernel.tensor import (
    Partial,
    Replicate,
    Shard,
    TensorError,
    fetch_shard,
    inspect,
    manual_seed,
    record,
    to_mesh,
)
from monarch_kernel.tensor.device import Device
from monarch_kernel.train.process_group.worker import GroupStore
from tests.support.waiting import LONG_S

PROCS = {"dp": 2, "tp": 2}
# Four ranks import torch.distributed.tensor, which takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tensors_dropped")]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_products_are_placed_as_torch_places_them(procs: ProcMesh) -> None:
    x, w1, w2 = numbers(8, 6), numbers(6, 10), numbers(10, 4)
    there_x = procs.shard(x, dp=Shard(0))
    first, second = procs.shard(w1, tp=Shard(1)), procs.shard(w2, tp=Shard(0))
    y = (there_x @ first).relu() @ second
    assert "shape=(8, 4), dtype=float32, device=cpu, mesh=t {'dp': 2, 'tp': 2}, dp=Shard(0), tp=Partial(sum)" in repr(y)
    assert repr(y.placements_picture()) == "rows 0-3  ranks 0+1 (sum)\nrows 4-7  ranks 2+3 (sum)"
    assert "<table>" in str(y._repr_html_())
    assert procs.rank_tensor("dp")._repr_html_() is None
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


NOTES_SEARCHES = """
from torch.distributed.tensor import DTensor
kind, searched = type(DTensor._op_dispatcher.sharding_propagator), []
search = kind.propagate_op_sharding_non_cached
def noting(self, schema):
    searched.append(str(schema.op))
    return search(self, schema)
kind.propagate_op_sharding_non_cached = noting
"""


def test_the_operation_does_not_search_again_for_the_rule_that_ranks_have_found(procs: ProcMesh) -> None:
    x = numbers(7, 3)
    there = procs.shard(x, dp=Shard(0), tp=Shard(1))
    assert torch.equal(there.full_tensor(), x)
    procs.run(NOTES_SEARCHES).get(LONG_S)
    try:
        y = there.erfc()
        torch.testing.assert_close(y.full_tensor(), x.erfc())
        again = "[each for each in searched if 'erfc' in each]"
        assert procs.run(again).get(LONG_S).values() == ([],) * 4
    finally:
        procs.run("kind.propagate_op_sharding_non_cached = search").get(LONG_S)


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


class Reader(nn.Module):
    """Sums embeddings of the words of rows, and reads them one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 4, mode="sum")
        self.reader = nn.LSTM(4, 3)

    def forward(self, words: Any) -> Any:
        return self.reader(self.bag(words).unsqueeze(1))[0]


def test_modules_for_which_torch_makes_tensors_train_like_plain_ones(procs: ProcMesh) -> None:
    """The offsets of the bag, the first state of the LSTM, and what its backward needs."""
    torch.manual_seed(0)
    plain = Reader()
    model = procs.distribute(copy.deepcopy(plain))
    words = torch.arange(24).reshape(8, 3) % 10
    plain(words).square().sum().backward()
    output = model(procs.shard(words, dp=Shard(0)))
    output.square().sum().backward()
    torch.testing.assert_close(output.full_tensor(), plain(words))
    for here, there in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(there.grad.full_tensor(), here.grad)


PLACED = [{}, {"dp": Shard(0)}, {"tp": Shard(1)}, {"dp": Shard(0), "tp": Shard(0)}, {"dp": Shard(1), "tp": Shard(0)}]


def test_random_numbers_are_the_same_whatever_the_placements(procs: ProcMesh) -> None:
    def draw(placements: dict[str, Any]) -> list[torch.Tensor]:
        manual_seed(3, mesh=procs)
        x = procs.randn(5, 6, **placements)
        made = [
            x,
            x.uniform_(1, 2),
            torch.rand_like(x),
            torch.randint_like(x, 2, 9),
            F.dropout(procs.ones(5, 6, **placements)),
        ]
        made += [torch.bernoulli(procs.full((5, 6), 0.5, **placements)), procs.rand(7, dtype=torch.float64)]
        made += [torch.multinomial(procs.ones(5, 6, **placements), 2), torch.poisson(procs.ones(5, 6, **placements))]
        made += list(torch.native_dropout(procs.ones(5, 6, **placements), 0.5, True))
        return [each.full_tensor() for each in made]

    first, *others = map(draw, PLACED)
    for other in others:
        for mine, theirs in zip(first, other):
            assert torch.equal(mine, theirs)
    assert first[0].unique().numel() == 30
    assert first[0].min() >= 1
    assert first[0].max() <= 2
    assert set(first[4].unique().tolist()) == {0, 2}


def test_draws_differ_and_go_on_in_a_recorded_function(procs: ProcMesh) -> None:
    manual_seed(0, mesh=procs)

    @record
    def noisy(x: Any) -> Any:
        return F.dropout(x, 0.5)

    x = procs.ones(8, 8, dp=Shard(0))
    found = [noisy(x).full_tensor() for _ in range(5)]
    assert "recorded;" in noisy.describe()
    assert len({str(each) for each in found}) == 5
    manual_seed(0, mesh=procs)
    assert torch.equal(F.dropout(procs.ones(8, 8), 0.5).full_tensor(), found[0])
    parts = [str(part) for part in procs.values(procs.randn(4, 4, dp=Shard(0))).values()]
    assert parts[0] == parts[1] != parts[2] == parts[3]  # replicas are equal, and parts differ


PLACEMENT = st.sampled_from([Shard(0), Shard(1), Replicate()])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "mul", "mm", "t", "softmax", "cumsum", "gelu", "center", "place", "in place", "view"]),
        st.tuples(PLACEMENT, PLACEMENT),
    ),
    min_size=1,
    max_size=6,
)


def run_step(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made: dict[str, Callable[[], torch.Tensor]] = {
        "add": lambda: x + y,
        "mul": lambda: x * y.sin(),
        "mm": lambda: x @ y / 4,
        "t": lambda: x.t(),
        "softmax": lambda: x.softmax(1),
        "cumsum": lambda: x.cumsum(0) / 4,
        "gelu": lambda: F.gelu(x),
        "center": lambda: x - x.mean(0, keepdim=True),
        "place": lambda: x,
        "in place": lambda: x.clone().mul_(2).sub_(y),
        "view": lambda: x.reshape(2, 2, 4).sum(1).repeat(2, 1),
    }
    return made[name]()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.tuples(PLACEMENT, PLACEMENT))
def test_programs_compute_what_plain_ones_compute(procs: ProcMesh, steps: Any, first: Any) -> None:
    y = numbers(4, 4)
    plain = y.clone().requires_grad_()
    there = procs.shard(y, dp=first[0], tp=first[1]).requires_grad_()
    here, x = plain * 1, there * 1
    for name, (dp, tp) in steps:
        here = run_step(name, here, y)
        x = run_step(name, x, procs.shard(y, dp=tp, tp=dp)).redistribute(dp=dp, tp=tp)
    here.square().sum().backward()
    x.square().sum().backward()
    torch.testing.assert_close(x.detach().full_tensor(), here.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(there.grad.full_tensor(), plain.grad, atol=1e-3, rtol=1e-3)


def meta_block() -> Block:
    with torch.device("meta"):
        return Block()


def test_a_module_is_born_on_the_ranks(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a parameter was in this process")

    monkeypatch.setattr(Device, "put", refuse)
    found = []
    for plan in ({}, {"up": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}):
        manual_seed(7, mesh=procs)
        model = procs.distribute(meta_block(), plan)
        found.append([param.detach().full_tensor() for param in model.parameters()])
        assert all(type(param.data).__name__ == "DistributedTensor" for param in model.parameters())
    for mine, theirs in zip(*found):
        assert torch.equal(mine, theirs)
    bound = 1 / 6**0.5
    assert 0.8 * bound < found[0][0].abs().max() <= bound  # as Linear.reset_parameters() says


class Tied(nn.Module):
    """A model whose first and last layer share their weight, with a buffer that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.head = nn.Linear(4, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.empty(4))

    def reset_parameters(self) -> None:
        self.places.copy_(torch.arange(4.0))

    def forward(self, x: Any) -> Any:
        return self.head(self.embed(x) + self.places)


def test_tied_weights_stay_tied_and_buffers_are_made(procs: ProcMesh) -> None:
    with torch.device("meta"):
        model = Tied()
    scaled: list[str] = []
    procs.distribute(model, {"embed": {"tp": Shard(0)}}, init=lambda module: scaled.append(type(module).__name__))
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == 1
    assert model.places.full_tensor().tolist() == [0, 1, 2, 3]
    assert scaled == ["Tied", "Embedding", "Linear"]


def test_attention_is_sharded_by_samples_and_heads(procs: ProcMesh) -> None:
    q, k, v = (numbers(4, 4, 6, 8) * scale for scale in (1, 2, 3))
    mine = [each.clone().requires_grad_() for each in (q, k, v)]
    F.scaled_dot_product_attention(*mine, is_causal=True).square().sum().backward()
    theirs = [procs.shard(each, dp=Shard(0), tp=Shard(1)).requires_grad_() for each in (q, k, v)]
    out = F.scaled_dot_product_attention(*theirs, is_causal=True)
    assert "dp=Shard(0), tp=Shard(1)" in repr(out)
    out.square().sum().backward()
    for here, there in zip(mine, theirs):
        torch.testing.assert_close(there.grad.full_tensor(), here.grad, atol=1e-4, rtol=1e-3)


def trained(procs: ProcMesh, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = procs.shard(numbers(8, 6) + step, dp=Shard(0)), procs.shard(torch.arange(8) % 3, dp=Shard(0))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


PLAN = {"up": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}


def test_a_checkpoint_goes_on_with_another_plan(procs: ProcMesh, tmp_path: Path) -> None:
    manual_seed(1, mesh=procs)
    model = procs.distribute(meta_block(), PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(procs, model, optimizer, range(3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    checkpoint.save(tmp_path / "3", model=model, optimizer=optimizer, scheduler=scheduler, step=3)
    expected = trained(procs, model, optimizer, range(3, 6))
    assert checkpoint.verify(tmp_path / "3").names["optimizer"] == "optimizer"

    other = procs.distribute(meta_block(), {"up": {"dp": Shard(0)}})
    theirs = torch.optim.AdamW(other.parameters(), lr=0.5)
    values = checkpoint.load(tmp_path / "3", model=other, optimizer=theirs)
    assert values["step"] == 3
    assert theirs.param_groups[0]["lr"] == 0.01
    assert theirs.state[other.up.weight]["step"] == 3
    assert trained(procs, other, theirs, range(3, 6)) == pytest.approx(expected, abs=1e-5)

    wrong = procs.distribute(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="does not fit model; nothing has changed"):
        checkpoint.load(tmp_path / "3", model=wrong)
    with pytest.raises(CheckpointError, match=r"w is a tensor; name it in a dict: w=\{'w': tensor\}"):
        checkpoint.save(tmp_path / "4", w=wrong.weight)
    with pytest.raises(CheckpointError, match="the tensors are on .*: make them on the whole mesh"):
        checkpoint.save(tmp_path / "4", w={"w": procs.rank_tensor("dp").slice_mesh(dp=0)})


def test_the_checkpoint_of_a_program_is_one_of_ranks(procs: ProcMesh, tmp_path: Path) -> None:
    x = procs.shard(torch.arange(8.0).view(4, 2), dp=Shard(0))
    checkpoint.save(tmp_path / "x", state={"x": x, "n": 5})
    x.zero_()
    state = {"x": x, "n": 0}
    checkpoint.load(tmp_path / "x", state=state)
    assert state["n"] == 5
    assert state["x"] is x
    assert x.full_tensor().flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert checkpoint.describe(tmp_path / "x").tensors["state.x"] == ((4, 2), "float32")


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
    device: Any = x._part.device
    before = device.stream.next_op
    wrong: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: x @ x,
            TensorError,
            r"\[4, 2\] X \[4, 2\](?s:.*)of \(4, 2\) float32 dp=Shard\(0\), tp=Replicate\(\), \(4",
        ),
        (lambda: x + procs.ones(3), TensorError, "broadcast a dimension of length 3"),
        (lambda: torch.cat([x, x[0]]), TensorError, "Number of dimensions"),
        (lambda: x.sum(7), IndexError, "Dimension out of range"),
        (lambda: x.view(3, 3), TensorError, "shape '\\[3, 3\\]' is invalid"),
        (lambda: x.add_(procs.ones(5, 4, 2)), TensorError, "output|broadcast"),
        (lambda: torch.nn.functional.embedding(x, x), TensorError, "scalar type"),
    ]
    for use, kind, text in wrong:
        with pytest.raises(kind, match=text) as caught:
            use()
        assert "failed on rank" not in str(caught.value)
    assert device.stream.next_op == before + 3  # what made the other tensors
    with pytest.raises(KeyError, match="pp"):
        procs.shard(numbers(2), pp=Shard(0))
    with pytest.raises(TensorError, match=r"dp=Shard\(2\) is not possible: the tensor has 2 dimensions"):
        x.redistribute(dp=Shard(2))
    with pytest.raises(TensorError, match=r"dp=0 is no placement: use Shard\(dim\)"):
        procs.shard(numbers(2), dp=0)
    with pytest.raises(TypeError, match=r"shard\(\) takes a tensor or an array of NumPy, not a str"):
        procs.shard("x")
    with pytest.raises(TensorError, match=r"tp=Partial\(sum\) is not possible from Replicate\(\)"):
        x.redistribute(tp=Partial())
    with pytest.raises(TensorError, match=r"this one is sharded: add what is Partial with x\.redistribute"):
        x.reduce("dp")
    with pytest.raises(TensorError, match=r"this one is sharded: use x\.local\(\)\.slice_mesh"):
        x.slice_mesh(dp=0)
    with pytest.raises(TensorError, match="sharded tensors need all ranks of a mesh"):
        x.to_mesh(procs.slice(dp=0), tp=Shard(0))
    with pytest.raises(TensorError, match=r"to_mesh\(\) places sharded tensors.*other\.from_local\(x\.to_mesh"):
        procs.rank_tensor("dp").to_mesh(procs.slice(dp=0), tp=Shard(0))
    with pytest.raises(TensorError, match="can't be placed as Partial"):
        procs.shard(numbers(2), dp=Partial())
    with pytest.raises(TensorError, match="sharded tensors need all ranks of a mesh"):
        procs.slice(dp=0).shard(numbers(2), tp=Shard(0))
    with pytest.raises(TensorError, match="can't be written to a tensor that is Partial"):
        procs.from_local(procs.rank_tensor("dp").float(), dp=Partial()).normal_()
    assert x.full_tensor().shape == (4, 2)
    with pytest.raises(TensorError, match="no parameter of the module matches 'nothing'"):
        procs.distribute(nn.Linear(1, 1), {"nothing": {}})
    with pytest.raises(TensorError, match=r"placements_picture\(\) is for sharded tensors"):
        procs.rank_tensor("dp").placements_picture()
    with pytest.raises(TensorError, match=r"local\(\) is for sharded tensors"):
        procs.rank_tensor("dp").local()
    assert fetch_shard(x).result(LONG_S).shape == (2, 2)


@pytest.fixture(scope="module")
def servers(procs: ProcMesh) -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"gpus": 3}, device="cpu", name="servers")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


MOVES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"dp": Shard(0)}, {"gpus": Shard(0)}, "gpus=Shard(0)"),
    ({"dp": Shard(0), "tp": Shard(1)}, {"gpus": Shard(1)}, "gpus=Shard(1)"),
    ({"dp": Shard(0), "tp": Shard(0)}, {"gpus": Replicate()}, "gpus=Replicate()"),
    ({"tp": Replicate()}, {"gpus": Shard(-1)}, "gpus=Shard(1)"),
    ({}, {}, "gpus=Replicate()"),
]


@pytest.mark.parametrize(("before", "after", "placed"), MOVES)
@pytest.mark.parametrize("shape", [(6, 5), (2, 1), (0, 3)])
def test_a_sharded_tensor_is_placed_in_another_way_on_another_mesh(
    procs: ProcMesh,
    servers: ProcMesh,
    before: dict[str, Any],
    after: dict[str, Any],
    placed: str,
    shape: tuple[int, ...],
) -> None:
    whole = numbers(*shape)
    there = procs.shard(whole, **before).to_mesh(servers, **after)
    assert f"mesh=servers {{'gpus': 3}}, {placed}" in repr(there)
    assert torch.equal(there.full_tensor(), whole)
    back = (there * 2).to_mesh(procs, tp=Shard(0))
    assert "dp=Replicate(), tp=Shard(0)" in repr(back)
    assert torch.equal(back.full_tensor(), whole * 2)


def test_tensors_of_each_layout_and_kind_move_to_another_mesh(procs: ProcMesh, servers: ProcMesh) -> None:
    rows = numbers(4, 6)
    x = procs.shard(rows, dp=Shard(0), tp=Shard(1))
    partial = x.sum(0)
    assert "Partial" in repr(partial)
    moved = partial.to_mesh(servers, gpus=Shard(0))
    assert "gpus=Shard(0)" in repr(moved)
    torch.testing.assert_close(moved.full_tensor(), rows.sum(0))
    assert torch.equal(x.t().to_mesh(servers, gpus=Shard(0)).view(3, 8).full_tensor(), rows.t().reshape(3, 8))
    numbers_of_both = torch.complex(rows, rows + 1)
    there = procs.shard(numbers_of_both, dp=Shard(0)).conj().to_mesh(servers, gpus=Shard(0))
    assert torch.equal(there.full_tensor(), numbers_of_both.conj())
    half = rows.to(torch.bfloat16)
    tensors = {"w": procs.shard(half, dp=Shard(0)), "b": [procs.shard(half[0])]}
    state = to_mesh(tensors, servers, gpus=Shard(0))
    assert torch.equal(state["w"].full_tensor(), half)
    assert torch.equal(state["b"][0].full_tensor(), half[0])
    x.zero_()  # the copy has its own memory
    assert torch.equal((there.real + 0).full_tensor(), rows)
    assert x.to_mesh(procs) is x
    assert "dp=Replicate(), tp=Shard(1)" in repr(x.to_mesh(procs, dp=Replicate()))


def test_a_move_of_a_sharded_tensor_that_is_not_possible_says_why(procs: ProcMesh, servers: ProcMesh) -> None:
    x = procs.shard(numbers(4, 2), dp=Shard(0))
    with pytest.raises(
        MoveError, match=r"servers \{'gpus': 3\} has no axis 'dp', and the tensor is dp=Shard\(0\).*gpus=Shard"
    ):
        x.to_mesh(servers)
    with pytest.raises(KeyError, match="tp"):
        x.to_mesh(servers, tp=Shard(0))
    with pytest.raises(TensorError, match=r"gpus=Shard\(2\) is not possible: the tensor has 2 dimensions"):
        x.to_mesh(servers, gpus=Shard(2))
    with pytest.raises(TensorError, match="can't place a tensor as Partial"):
        x.to_mesh(servers, gpus=Partial())
    with pytest.raises(TensorError, match=r"to_mesh\(\) has no gradient"):
        x.clone().requires_grad_().to_mesh(servers, gpus=Shard(0))
    known = torch.linalg.cholesky(procs.shard(torch.eye(2)))  # so that the next one waits for nothing
    assert torch.equal(known.full_tensor(), torch.eye(2))
    lost = torch.linalg.cholesky(-procs.shard(torch.eye(2)))
    with pytest.raises(TensorError, match=r"torch\.linalg\.cholesky failed on rank \[0-3\] of t"):
        lost.to_mesh(servers, gpus=Shard(0))
    assert torch.equal(x.to_mesh(servers, gpus=Shard(0)).full_tensor(), numbers(4, 2))


def test_what_makes_no_dense_tensor_is_refused_at_its_line(procs: ProcMesh) -> None:
    with pytest.raises(TensorError, match="layout torch.sparse_coo; distributed tensors are strided"):
        procs.shard(numbers(4, 4), dp=Shard(0)).to_sparse()


def test_ranks_write_no_hints_of_torch(procs: ProcMesh) -> None:
    there = procs.shard(numbers(8, 4), dp=Shard(0), tp=Shard(0))
    noted = procs.run(
        "import logging\nnoted = []\nhandler = logging.Handler()\nhandler.emit = lambda record: noted.append(record.msg)\n"
        "logging.getLogger('torch.distributed.tensor._redistribute').addHandler(handler)"
    )
    noted.get(LONG_S)
    assert there.full_tensor().shape == (8, 4)
    assert procs.run("noted").get(LONG_S).values() == ([],) * 4


def test_shapes_that_depend_on_values_are_asked_for_each_time(procs: ProcMesh) -> None:
    for values in ([1.0, 0.0, 1.0, 1.0], [3.0, 0.0, 0.0, 0.0], [4.0, 3.0, 2.0, 1.0]):
        x = torch.tensor(values)
        there = procs.shard(x, dp=Shard(0))
        for function in (torch.nonzero, torch.unique, lambda each: each[each > 0], lambda each: each[each > 0] * 2):
            found, expected = function(there), function(x)
            assert found.shape == expected.shape
            assert torch.equal(found.full_tensor(), expected)
    with pytest.raises(
        TensorError, match=r"torch\.nonzero waits for values of the ranks, and a recorded function can't"
    ):
        record(torch.nonzero)(there)


def test_sharded_tensors_are_usable_after_the_process_group_was_formed_again(procs: ProcMesh) -> None:
    x = numbers(4, 6)
    there = procs.shard(x, dp=Shard(0), tp=Shard(1))
    row = there[1]  # a copy on the ranks, of memory that is elsewhere
    torch.testing.assert_close(there.sum(1).full_tensor(), x.sum(1))
    doubled = record(lambda each: (each * 2).sum(0).redistribute(dp=Replicate(), tp=Replicate()))
    for _ in range(3):
        torch.testing.assert_close(doubled(there).full_tensor(), x.sum(0) * 2)
    for _ in range(2):
        GroupStore().form(procs).get(LONG_S)  # as the next cell does after an interrupt
        torch.testing.assert_close(doubled(there).full_tensor(), x.sum(0) * 2)
        torch.testing.assert_close(there.sum(1).full_tensor(), x.sum(1))
        there.mul_(2)
        x = x * 2
        torch.testing.assert_close(row.full_tensor(), x[1])
    procs.run("import torch.distributed as dist; dist.destroy_process_group()").get(LONG_S)
    torch.testing.assert_close(there.mean().full_tensor(), x.mean())
    assert procs.run("dist.get_world_size()").get(LONG_S).values() == (4,) * 4
