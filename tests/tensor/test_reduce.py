"""Reductions along axes of a mesh: results, errors, lost operands, and process groups that are formed when needed."""

from __future__ import annotations

import pytest
import torch

from monarch_kernel.actor import ProcMesh, ValueMesh, this_host
from monarch_kernel.errors import SupervisionError
from monarch_kernel.tensor import TensorError, inspect
from tests.support.waiting import LONG_S

PROCS = {"dp": 2, "tp": 2}
pytestmark = pytest.mark.usefixtures("tensors_dropped")


def flat_rank(procs: ProcMesh) -> torch.Tensor:
    return procs.rank_tensor("dp") * 2 + procs.rank_tensor("tp")


def listed(values: ValueMesh[torch.Tensor]) -> list[object]:
    return [value.tolist() for value in values.values()]


def test_reductions_along_one_axis_and_all(procs: ProcMesh) -> None:
    place = flat_rank(procs)
    assert listed(procs.values(place.reduce("tp", "sum"))) == [1, 1, 5, 5]
    assert listed(procs.values(place.reduce("dp"))) == [2, 4, 2, 4]
    assert listed(procs.values(place.reduce("dp", "max"))) == [2, 3, 2, 3]
    assert listed(procs.values(place.reduce(("dp", "tp"), "min"))) == [0] * 4
    assert listed(procs.values((place + 1).reduce((), "product"))) == [24] * 4
    assert listed(procs.values(place.float().reduce("tp", "avg"))) == [0.5, 0.5, 2.5, 2.5]
    assert listed(procs.values(place)) == [0, 1, 2, 3]


def test_stack_and_scatter(procs: ProcMesh) -> None:
    place = flat_rank(procs)
    assert listed(procs.values(place.reduce("tp", "stack"))) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert listed(procs.values(place.reduce((), "stack"))) == [[0, 1, 2, 3]] * 4
    pair = torch.stack([place * 10, place * 10 + 1])
    assert listed(procs.values(pair.reduce("tp", "sum", scatter=True))) == [10, 12, 50, 52]
    assert listed(procs.values(pair.reduce("tp", "stack", scatter=True))) == [[0, 10], [1, 11], [20, 30], [21, 31]]


def test_a_reduction_in_place_changes_the_tensor_and_its_views(procs: ProcMesh) -> None:
    place = flat_rank(procs)
    view = place.view(1)
    assert place.reduce_("tp") is place
    assert listed(procs.values(view)) == [[1], [1], [5], [5]]
    with pytest.raises(TensorError, match=r"reduce_\(\) can't change the shape of a tensor, from \(\) to \(2,\)"):
        place.reduce_("tp", "stack")


def test_a_slice_reduces_among_its_own_ranks(procs: ProcMesh) -> None:
    place = flat_rank(procs)
    part = procs.slice(dp=1)
    assert listed(part.values(place.slice_mesh(dp=1).reduce("tp"))) == [5, 5]
    alone = procs.slice(dp=1, tp=0)
    assert listed(alone.values(place.slice_mesh(dp=1, tp=0).reduce((), "stack"))) == [[2]]


def test_what_can_not_be_reduced_is_refused_at_its_line(procs: ProcMesh) -> None:
    place = flat_rank(procs)
    with pytest.raises(KeyError, match="pp"):
        place.reduce("pp")
    with pytest.raises(ValueError, match="an axis is named twice"):
        place.reduce(("tp", "tp"))
    with pytest.raises(ValueError, match="no reduction 'mean'; there are avg, max, min, product, stack, sum"):
        place.reduce("tp", "mean")
    with pytest.raises(TensorError, match="'avg' needs floating-point numbers"):
        place.reduce("tp", "avg")
    with pytest.raises(TensorError, match=r"'sum' is not possible for torch\.bool"):
        (place > 1).reduce("tp")
    with pytest.raises(TensorError, match=r"the index along tp, of size 2, but the shape is \(\)"):
        place.reduce("tp", scatter=True)
    with pytest.raises(TensorError, match="has no gradient"):
        place.float().requires_grad_().reduce("tp")


def test_a_lost_operand_loses_the_result_on_all_ranks_and_no_rank_hangs(procs: ProcMesh) -> None:
    place = flat_rank(procs)
    with procs.activate():
        matrix = torch.eye(2)
    factor = torch.linalg.cholesky(matrix * (2.5 - place))  # it fails on rank 3
    total, other = factor.reduce("tp"), place.reduce("tp")
    assert inspect(total).shape == (2, 2)
    with pytest.raises(
        TensorError, match=r"torch\.linalg\.cholesky failed on another rank, so rank \[2\] of t has lost a result"
    ):
        inspect(total, dp=1)
    with pytest.raises(TensorError, match=r"(?s)torch\.linalg\.cholesky failed on rank \[3\].*not positive-definite"):
        procs.values(total)
    assert listed(procs.values(other)) == [1, 1, 5, 5]


def test_a_group_that_is_formed_again_is_used(procs: ProcMesh) -> None:
    place = flat_rank(procs)
    assert listed(procs.values(place.reduce("dp"))) == [2, 4, 2, 4]
    procs.run("import torch.distributed as dist; dist.destroy_process_group()").get(LONG_S)
    assert listed(procs.values(place.reduce("dp"))) == [2, 4, 2, 4]
    assert procs.run("dist.get_world_size()").get(LONG_S).values() == (4,) * 4


def test_a_rank_that_dies_ends_a_reduction(session: None) -> None:
    mesh = this_host().spawn_procs({"r": 2}, name="mortal", device="cpu")
    try:
        with mesh.activate():
            x = torch.ones(2)
        assert inspect(x.reduce("r")).tolist() == [2, 2]
        mesh.process(1).run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        with pytest.raises((TensorError, SupervisionError)):  # the first if the report of the death comes later
            inspect(x.reduce("r"))
        assert inspect(x).tolist() == [1, 1]
        del x
    finally:
        mesh.stop(grace_s=0).get(LONG_S)
