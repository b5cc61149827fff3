"""Tensors are split over the ranks of a mesh, joined again, and split differently for another mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch_kernel.actor import ProcMesh, SupervisionError, this_host
from monarch_kernel.errors import MoveError, RemoteError
from tests.features.resharding.conftest import run
from tests.support.waiting import LONG_S

WHOLE = torch.arange(5 * 7 * 3.0).reshape(5, 7, 3)


@pytest.mark.parametrize(
    ("axis", "parts"), [(None, [0, 1, 2, 3]), ("dp", [0, 0, 1, 1]), ("tp", [0, 1, 0, 1])], ids=["all", "dp", "tp"]
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_are_scattered_and_gathered(
    meshes: tuple[ProcMesh, ProcMesh], axis: str | None, parts: list[int], dim: int
) -> None:
    trainer, _ = meshes
    moved = trainer.scatter("x", WHOLE, axis=axis, dim=dim)
    split = WHOLE.tensor_split(max(parts) + 1, dim)
    assert all(torch.equal(got, split[part]) for got, part in zip(run(trainer, "x"), parts))
    assert (moved.nbytes, moved.tensors) == (
        sum(split[part].nbytes for part in parts),
        sum(split[part].numel() > 0 for part in parts),
    )
    assert torch.equal(trainer.gather("x", axis=axis, dim=dim), WHOLE)
    assert run(trainer, "x.zero_(); len(PROCESS.client.exports)") == (0, 0, 0, 0)
    assert WHOLE.sum() > 0  # each rank's part is its own


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(3),  # fewer than ranks
        lambda: torch.randn(1 << 22),  # carried by threads
        lambda: torch.randn(40, 6).t(),
        lambda: torch.randn(9).to(torch.bfloat16),
        lambda: torch.ones(6, requires_grad=True),
        lambda: np.arange(12, dtype="i2").reshape(6, 2),
    ],
    ids=["few", "large", "transposed", "bfloat16", "grad", "array"],
)
def test_a_scattered_tensor_is_gathered_unchanged(meshes: tuple[ProcMesh, ProcMesh], make: Callable[[], Any]) -> None:
    trainer, _ = meshes
    thing = make()
    trainer.scatter("x", thing)
    whole = trainer.gather("x")
    assert type(whole) is type(thing)
    assert (whole == thing).all()
    assert whole.dtype == thing.dtype


def test_a_dtensor_is_gathered_by_its_own_layout(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, _ = meshes
    run(trainer, "x = distribute_tensor(torch.arange(35.).reshape(5, 7), mesh, [Shard(1), Shard(0)])")
    assert torch.equal(trainer.gather("x"), torch.arange(35.0).reshape(5, 7))
    with pytest.raises(MoveError, match="have 20 of its 35 elements"):
        trainer.slice(dp=0).gather("x")


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], str | None, int, str | None, int, bool]:
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple))
    dims = st.integers(0, len(shape) - 1)
    back = draw(st.booleans())
    four, two = st.sampled_from((None, "dp", "tp")), st.sampled_from((None, "gpus"))
    return shape, draw(four), draw(dims), draw(two), draw(dims), back


@given(moves())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_meshes_of_other_shapes_get_other_parts(
    meshes: tuple[ProcMesh, ProcMesh], case: tuple[tuple[int, ...], str | None, int, str | None, int, bool]
) -> None:
    trainer, generator = meshes
    shape, axis, dim, other_axis, other_dim, back = case
    tensor = torch.randn(shape)
    source, target = trainer, generator
    if back:
        source, target, axis, dim, other_axis, other_dim = generator, trainer, other_axis, other_dim, axis, dim
    source.scatter("x", tensor, axis=axis, dim=dim)
    target.all_to_all("x", source, axis=other_axis, dim=other_dim, from_axis=axis, from_dim=dim)
    count = len(target) if other_axis is None else target.size(other_axis)
    split = tensor.tensor_split(count, other_dim)
    places = range(count) if other_axis is None else [point[other_axis] for point, _ in target["x"]]
    assert all(torch.equal(got, split[place]) for got, place in zip(target["x"].values(), places))


def test_a_mesh_reshards_its_own_parts(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, _ = meshes
    trainer.scatter("x", WHOLE, dim=0)
    moved = trainer.all_to_all("x", dim=1)
    assert all(torch.equal(got, part) for got, part in zip(run(trainer, "x"), WHOLE.tensor_split(4, 1)))
    assert moved.data_paths.keys() == {"memory", "process"}


def test_all_ranks_get_a_value(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, _ = meshes
    trainer.broadcast("x", {"w": WHOLE})
    assert run(trainer, "int(x['w'].sum())") == (int(WHOLE.sum()),) * 4


def test_parts_that_can_not_be_joined_are_refused(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    trainer, generator = meshes
    run(trainer, "x = torch.zeros(2, 3 + rank); y = torch.zeros(rank // 2 + 1, 4); model = make(0)")
    assert trainer.gather("x", dim=1).shape == (2, 18)
    assert trainer.gather("y", axis="dp").shape == (3, 4)
    with pytest.raises(
        MoveError, match=r"x is float32\[:, 3\] on trainer\[0\] and float32\[:, 4\] on trainer\[1\] and"
    ):
        trainer.gather("x", dim=0)
    with pytest.raises(MoveError, match=r"y is float32\[1, 4\] on trainer\[0\] and .* on trainer\[2\].*same part"):
        trainer.gather("y", axis="tp")
    with pytest.raises(MoveError, match="model on trainer is not a tensor or array; .*copy_state"):
        trainer.gather("model")
    with pytest.raises(RemoteError, match="name 'nowhere' is not defined"):
        generator.all_to_all("nowhere", trainer)
    with pytest.raises(KeyError, match="unknown axis 'hosts'; the axes are dp=2, tp=2"):
        trainer.scatter("x", WHOLE, axis="hosts")
    with pytest.raises(IndexError, match="x of shape .*has no dim 3"):
        trainer.scatter("x", WHOLE, dim=3)
    with pytest.raises(TypeError, match="this list has no memory"):
        trainer.scatter("x", [1, 2])
    assert run(trainer, "len(PROCESS.client.exports)") == (0, 0, 0, 0)


def test_a_part_whose_rank_is_dead_is_named(meshes: tuple[ProcMesh, ProcMesh]) -> None:
    _, generator = meshes
    source = this_host().spawn_procs({"gpus": 2}, name="source", device="cpu")
    source.scatter("x", WHOLE)
    with pytest.raises(SupervisionError):
        source.slice(gpus=1).run("import os; os._exit(3)").get(LONG_S)
    with pytest.raises(SupervisionError, match=r"gathering 'x' from source failed"):
        source.gather("x")
    with pytest.raises(SupervisionError, match=r"moving 'x' from source to generator failed"):
        generator.all_to_all("x", source)
    source.stop(grace_s=0).get()
