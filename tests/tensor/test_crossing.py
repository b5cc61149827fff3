"""Distributed tensors in variables of cells, in arguments and results of actors, and on other meshes; on real ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monarch_kernel.actor import Actor, ProcMesh, ValueMesh, as_endpoint, endpoint
from monarch_kernel.errors import ActorError, MoveError, RemoteError
from monarch_kernel.tensor import (
    TensorError,
    call_on_shard_and_fetch,
    fetch_shard,
    inspect,
    reduce,
    reduce_,
    remote,
    slice_mesh,
    to_mesh,
)
from tests.support.waiting import LONG_S, wait_until

PROCS = {"dp": 2, "tp": 2}
pytestmark = pytest.mark.usefixtures("tensors_dropped")


def flat_rank(procs: ProcMesh) -> Any:
    return procs.rank_tensor("dp") * 2 + procs.rank_tensor("tp")


def listed(values: ValueMesh[torch.Tensor]) -> list[Any]:
    return [value.tolist() for value in values.values()]


# -- variables of cells


def test_a_tensor_becomes_a_variable_that_shares_its_memory(procs: ProcMesh) -> None:
    x = flat_rank(procs) + 0.5
    x.add_(1)
    procs["x"] = x
    assert procs.run("x.item()").get(LONG_S).values() == (1.5, 2.5, 3.5, 4.5)
    procs.run("x.mul_(2)").get(LONG_S)
    x.add_(1)
    assert listed(procs.values(x)) == [4, 6, 8, 10]
    assert listed(procs["x"]) == [4, 6, 8, 10]
    del x
    gc.collect()
    assert procs.memory().values()[0].tensors == 0
    assert procs.run("x.item()").get(LONG_S).values() == (4, 6, 8, 10)


def test_tensors_inside_of_values_become_parts_too(procs: ProcMesh) -> None:
    with procs.activate():
        model = nn.Linear(2, 1)
        model.weight.detach().fill_(3)
    procs["state"] = {"model": model, "lr": 0.1, "x": [flat_rank(procs)]}
    assert procs.run("state['x'][0].item()").get(LONG_S).values() == (0, 1, 2, 3)
    kinds = "type(state['model'].weight).__name__, state['model'].weight.requires_grad, state['model'].weight.tolist()"
    assert procs.run(kinds).get(LONG_S).values() == (("Parameter", True, [[3.0, 3.0]]),) * 4
    place = flat_rank(procs)
    assert procs.map(lambda: int(place) * 10).get(LONG_S).values() == (0, 10, 20, 30)


def test_a_variable_becomes_a_tensor_that_shares_its_memory(procs: ProcMesh) -> None:
    procs.run("import torch; w = torch.arange(4.)[2:] + 0; part = torch.arange(8.).view(4, 2)[2]").get(LONG_S)
    w = procs.tensor("w")
    w.add_(flat_rank(procs))
    assert procs.run("w.tolist()").get(LONG_S).values() == tuple([2.0 + rank, 3.0 + rank] for rank in range(4))
    part = procs.tensor("part")
    assert part.storage_offset() == 0
    part.zero_()
    assert procs.run("part.sum().item()").get(LONG_S).values() == (0,) * 4
    procs.run("del w").get(LONG_S)
    assert inspect(w, dp=1, tp=1).tolist() == [5, 6]


def test_variables_that_can_not_be_distributed_say_why(procs: ProcMesh) -> None:
    procs.run("import torch; rank = torch.arange(4).tolist(); n = 3").get(LONG_S)
    procs["shape"] = procs.per_rank([1, 2, 2, 2])
    procs.run("odd = torch.zeros(shape)").get(LONG_S)
    with pytest.raises(RemoteError, match="'n' is a int: only dense tensors"):
        procs.tensor("n")
    with pytest.raises(RemoteError, match="name 'nothing' is not defined"):
        procs.tensor("nothing")
    with pytest.raises(
        TensorError, match=r"'odd' differs on the ranks of t, .*: \[0\] \(1,\) float32; \[1-3\] \(2,\) float32"
    ):
        procs.tensor("odd")
    with pytest.raises(ValueError, match="a b"):
        procs.tensor("a b")


def test_a_lost_tensor_and_one_of_other_ranks_can_not_be_a_variable(procs: ProcMesh) -> None:
    with procs.activate():
        lost = torch.linalg.cholesky(-torch.eye(2))
    with pytest.raises(RemoteError, match=r"depends on has failed: _LinAlgError: linalg\.cholesky"):
        procs["lost"] = lost
    part = flat_rank(procs).slice_mesh(dp=1)
    with pytest.raises(RemoteError, match=r"this process has no part of a distributed tensor of mesh 't'"):
        procs["part"] = part


# -- actors


class Scaler(Actor):
    """Computes with tensors."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor
        self.calls = 0

    @endpoint
    def scaled(self, x: Any) -> Any:
        self.calls += 1
        return x * self.factor

    @endpoint(propagate=lambda x: {"sum": x.sum(), "x": x})
    def both(self, x: Any) -> Any:
        return {"sum": x.sum(), "x": x + 0}

    @endpoint
    def double_in_place(self, x: Any) -> None:
        x.mul_(2)

    @endpoint
    def fail(self, x: Any) -> Any:
        raise ValueError("nope")

    def plain(self, x: Any) -> Any:
        return -x


class AsyncScaler(Actor):
    """The same with a coroutine."""

    @endpoint
    async def scaled(self, x: Any) -> Any:
        return x * 3


@pytest.fixture(scope="module")
def scaler(procs: ProcMesh) -> Any:
    """Actors that got a distributed tensor as an argument of their constructor."""
    actors = procs.spawn("scaler", Scaler, flat_rank(procs) + 1)
    actors.initialized.get(LONG_S)
    return actors


def test_an_endpoint_gets_its_own_part_after_all_earlier_operations(procs: ProcMesh, scaler: Any) -> None:
    x = flat_rank(procs)
    for _ in range(100):
        x = x + 1
    assert listed(scaler.scaled.call(x).get(LONG_S)) == [100, 202, 306, 412]
    answers = [scaler.scaled.call(x + i) for i in range(20)]  # the sums are dropped before the actors have them
    assert [listed(answer.get(LONG_S))[0] for answer in answers] == [100 + i for i in range(20)]
    assert scaler.slice(dp=1, tp=1).scaled.call_one(x).get(LONG_S).item() == 412


def test_a_broadcast_keeps_its_tensors_until_the_actors_have_them(procs: ProcMesh, scaler: Any) -> None:
    x = flat_rank(procs) + 1
    scaler.double_in_place.broadcast(x)
    scaler.double_in_place.call(x.view(1)).get(LONG_S)
    assert listed(procs.values(x)) == [4, 8, 12, 16]


def test_results_of_endpoints_become_tensors(procs: ProcMesh, scaler: Any) -> None:
    x = flat_rank(procs) + torch.ones(2).sum().item()
    scaled = scaler.scaled.rref(x)
    assert listed(procs.values(scaled + 1)) == [3, 7, 13, 21]
    assert listed(procs.values(scaler.scaled.rref(scaled))) == [2, 12, 36, 80]
    both = scaler.both.rref(x.view(1))
    assert listed(procs.values(both["sum"] + both["x"])) == [[4], [6], [8], [10]]
    assert listed(procs.values(as_endpoint(scaler.plain, propagate=lambda x: x).rref(x))) == [-2, -3, -4, -5]


def test_a_failure_of_an_endpoint_loses_its_result(procs: ProcMesh, scaler: Any) -> None:
    x = flat_rank(procs)
    with pytest.raises(TensorError, match=r"(?s)endpoint fail\(\) failed on rank \[0-3\] of t.*ValueError: nope"):
        scaler.fail.rref(x)
    stopped = procs.spawn("stopped", Scaler, 1)
    assert listed(procs.values(stopped.scaled.rref(x))) == [0, 1, 2, 3]
    stopped.stop().get(LONG_S)
    lost = stopped.scaled.rref(x)
    with pytest.raises(TensorError, match="the call did not reach the actor"):
        procs.values(lost)
    assert listed(procs.values(x)) == [0, 1, 2, 3]


def test_actors_with_an_event_loop(procs: ProcMesh) -> None:
    actors = procs.spawn("async", AsyncScaler)
    x = flat_rank(procs)
    assert listed(actors.scaled.call(x).get(LONG_S)) == [0, 3, 6, 9]
    assert listed(procs.values(actors.scaled.rref(x) + 1)) == [1, 4, 7, 10]
    actors.stop().get(LONG_S)


def test_a_tensor_sent_to_a_process_without_it_is_an_error(procs: ProcMesh, scaler: Any) -> None:
    part = flat_rank(procs).slice_mesh(dp=0)
    with pytest.raises(ActorError, match="has no part of a distributed tensor") as caught:
        scaler.scaled.call(part).get(LONG_S)
    assert caught.value.ranks == (2, 3)


# -- functions, and other meshes


def test_a_remote_function_may_use_the_process_group(procs: ProcMesh) -> None:
    @remote
    def total(x: Any) -> Any:
        import torch.distributed as dist

        x = x.clone()
        dist.all_reduce(x)
        return x

    x = flat_rank(procs)
    assert listed(procs.values(total(x))) == [6] * 4
    assert [int(value) for value in total.call(x).get(LONG_S).values()] == [6] * 4
    procs.run("bias = 5").get(LONG_S)
    assert call_on_shard_and_fetch(lambda x: x + 1, x, shard={"dp": 1}).get(LONG_S).item() == 3


def test_an_interrupt_of_a_read_ends_the_function_that_it_waits_for_on_all_ranks(
    procs: ProcMesh, tmp_path: Path
) -> None:
    @remote(propagate=lambda x: x)
    def endless(x: Any) -> Any:
        import time

        (tmp_path / f"{int(x)}").touch()
        while x:  # but on rank 0
            time.sleep(0.01)
        return x + 1

    x = flat_rank(procs)
    made = endless(x)
    assert inspect(made) == 1
    waits = fetch_shard(made, tp=1)
    for rank in range(4):
        wait_until((tmp_path / f"{rank}").exists, "the function to begin")
    waits.interrupt()
    assert waits.exception(LONG_S) is not None
    assert listed(procs.values(x + 1)) == [1, 2, 3, 4]
    with pytest.raises(TensorError, match=r"(?s)endless failed on rank \[1-3\] of t.*endless was interrupted"):
        procs.values(made)


def test_a_tensor_moves_to_another_mesh(procs: ProcMesh) -> None:
    first, last = procs.slice(tp=0), procs.slice(tp=1)
    x = flat_rank(procs).view(1, 1) + torch.ones(1).item()
    there = x.slice_mesh(tp=0).to_mesh(last)
    assert listed(last.values(there)) == [[[1]], [[3]]]
    x.zero_()
    assert listed(last.values(there)) == [[[1]], [[3]]]
    with last.activate():
        own = torch.arange(3.0)[1:].expand(2, 2).t()
        twisted = torch.view_as_complex(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).conj()
    moved = twisted.to_mesh(first)
    assert listed(first.values(moved.imag + 0)) == [[-2, -4]] * 2
    moved = twisted.imag.to_mesh(first)
    assert listed(first.values(moved)) == [[-2, -4]] * 2
    back = to_mesh({"own": own}, first)["own"]
    assert listed(first.values(back + 0)) == [[[1, 1], [2, 2]]] * 2
    everywhere = slice_mesh(flat_rank(procs), dp=1).to_mesh(procs)
    assert listed(procs.values(everywhere)) == [2, 3, 2, 3]
    assert everywhere.to_mesh(procs) is everywhere
    with pytest.raises(MoveError, match=r"has no axis 'tp' of t: take one index of it, x\.slice_mesh\(tp=0\)"):
        everywhere.to_mesh(first)
    with procs.activate():
        lost = torch.linalg.cholesky(-torch.eye(2)).slice_mesh(tp=0)
    with pytest.raises(TensorError, match=r"torch\.linalg\.cholesky failed on rank \[0,2\] of t"):
        lost.to_mesh(last)
    with pytest.raises(TensorError, match=r"to_mesh\(\) has no gradient"):
        own.clone().requires_grad_().to_mesh(first)


def test_reductions_of_nested_tensors_to_a_slice_or_into_a_tensor(procs: ProcMesh) -> None:
    tensors = {"a": flat_rank(procs), "b": [flat_rank(procs) + 1]}
    assert listed(procs.values(reduce(tensors, "tp")["b"][0])) == [3, 3, 7, 7]
    reduce_(tensors, dims=("dp", "tp"))
    assert listed(procs.values(tensors["a"])) == [6] * 4
    part = procs.slice(dp=1)
    assert listed(part.values(flat_rank(procs).reduce("dp", "max", mesh=part))) == [2, 3]
    out = flat_rank(procs)
    assert flat_rank(procs).reduce("tp", out=out) is out
    assert listed(procs.values(out)) == [1, 1, 5, 5]
    with pytest.raises(TensorError, match=r"out has to be a distributed tensor \(\) int64"):
        out.reduce("tp", out=out.float())
    with pytest.raises(TypeError, match=r"slice_mesh\(\) takes distributed tensors, not a int"):
        slice_mesh([1], dp=0)
