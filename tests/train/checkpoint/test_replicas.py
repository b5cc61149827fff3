"""Tensors that a checkpoint stores once must be the same on all ranks; otherwise a save names what differs."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from monarch_kernel.train import checkpoint
from monarch_kernel.train.checkpoint.replicas import differing, of_tensors, of_values, refusal, summary
from tests.support.ranks import Ranks

PRELUDE = """
import contextlib, io, torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from monarch_kernel import checkpoint
from monarch_kernel.train.parallel import parallelize

class Loader:
    def __init__(self, **state): self.state = state
    def state_dict(self): return self.state
    def load_state_dict(self, state): self.state = state

class Net(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.weight = nn.Parameter(tensor)

def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

def said(path, **things):
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        checkpoint.save(path, **things)
    return printed.getvalue()
"""


@pytest.fixture(scope="module")
def two(session: None) -> Iterator[Ranks]:
    ranks = Ranks(2, PRELUDE)
    yield ranks
    ranks.close()


DIFFERENT = {
    "model=net(rank)": ["model.0.weight", "model.0.bias"],
    "model=(m := net()), optimizer=torch.optim.SGD(m.parameters(), lr=0.1 + rank)": ["optimizer.param_groups.0.lr"],
    "model=Net(DTensor.from_local(torch.full((2,), float(rank)), mesh, [Replicate()]))": ["model.weight"],
}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("things", DIFFERENT)
def test_tensors_that_differ_by_rank_are_refused(two: Ranks, tmp_path: Path, things: str, wait: bool) -> None:
    path = tmp_path / "a"
    two.run(f"checkpoint.save({str(path)!r}, step=1)")
    said = two.fails(f"saving = checkpoint.save({str(path)!r}, wait={wait}, {things})\nif saving: saving.result()")
    assert said.splitlines()[0] == (
        f"CheckpointError: {path} was not saved: a checkpoint stores these once, but their values differ between ranks; "
        "the previous checkpoint is intact"
    )
    listed = [line for line in said.splitlines() if line.startswith("  ")]
    assert listed == [f"  {name}: [1] differs from [0]" for name in DIFFERENT[things]]
    assert "torch.distributed." in said.splitlines()[-1]
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert checkpoint.load(path) == {"step": 1}


SAME = [
    "rng=torch.manual_seed(7).get_state(), loader=Loader(b=1, a=2) if rank else Loader(a=2, b=1), names={'x', 'y'}",
    "model=parallelize(net(rank), mesh, 'fsdp', quiet=True)",
    "model=parallelize(net(rank), mesh, 'ddp', quiet=True)",
    "model=Net(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])), spread=3",
    "model=Net(DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0)]))",
    "model=Net(DTensor.from_local(torch.ones(2), mesh, [Replicate()])), nothing=None, lists=[[], {}, ()]",
]


@pytest.mark.parametrize("things", SAME)
def test_state_that_is_the_same_or_sharded_is_saved(two: Ranks, tmp_path: Path, things: str) -> None:
    mesh = "mesh = mesh if hasattr(mesh, 'get_coordinate') else dist.device_mesh.init_device_mesh('cpu', (2,))\n"
    assert two.run(f"{mesh}said({str(tmp_path / 'a')!r}, {things})") == ("", "")


def test_a_save_keeps_the_buffers_of_rank_0_and_says_so_once(two: Ranks, tmp_path: Path) -> None:
    """Otherwise each rank would write some of them, and the checkpoint would mix buffers of several ranks."""
    made = "model = DistributedDataParallel(net())\nmodel(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)))\n"
    path = tmp_path / "a"
    first, other = two.run(f"{made}said({str(path)!r}, model=model)")
    assert first == (
        "a stores rank 0's values of buffers that differ between ranks: model.1.running_mean, model.1.running_var. For equal "
        "buffers on all ranks, use torch.nn.SyncBatchNorm, or parallelize\n"
    )
    assert other == ""
    assert two.run(f"said({str(path)!r}, model=model)") == ("", "")
    (means, variances), _ = two.run("[model.module[1].running_mean.tolist(), model.module[1].running_var.tolist()]")
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    checkpoint.load(path, model=model)
    assert model[1].running_mean.tolist() == means  # type: ignore[union-attr, operator]
    assert model[1].running_var.tolist() == variances  # type: ignore[union-attr, operator]


def test_copies_of_shards_are_compared_with_each_other(session: None, tmp_path: Path) -> None:
    """Two by two ranks: 0 and 2 have copies of one shard, 1 and 3 of the other."""
    ranks = Ranks(4, PRELUDE)
    ranks.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "both = init_device_mesh('cpu', (2, 2), mesh_dim_names=('copy', 'shard'))\n"
        "def spread(value): return Net(DTensor.from_local(torch.full((2,), float(value)), both, [Replicate(), Shard(0)]))"
    )
    assert ranks.run(f"said({str(tmp_path / 'a')!r}, model=spread(rank % 2))") == ("",) * 4
    found = ranks.fails(f"said({str(tmp_path / 'b')!r}, model=spread(rank))")
    assert "\n  model.weight: [2-3] differ from [0-1]\n" in found
    found = ranks.fails(f"said({str(tmp_path / 'b')!r}, model=spread(9 if rank == 3 else rank % 2))")
    assert "\n  model.weight: [3] differs from [1]\n" in found
    ranks.run("both = None")
    ranks.close()


# -- without ranks

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def plain(value: Any) -> str:
    """A text that is the same for values that are equal and have the same types."""
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{key!r}: {plain(each)}" for key, each in value.items())) + "}"
    return "[" + ", ".join(map(plain, value)) + "]" if isinstance(value, list) else repr(value)


@given(VALUES, VALUES)
def test_digests_are_equal_where_values_are(one: Any, other: Any) -> None:
    found = differing([summary(of_values({"it": each})) for each in (one, other)])
    assert (not found) == (plain(one) == plain(other))


@given(st.integers(0, 200_000), st.data())
def test_one_byte_or_two_that_change_places_change_the_digest_of_a_tensor(n: int, data: st.DataObject) -> None:
    tensor = torch.randint(0, 255, (n + 2,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    at = data.draw(st.integers(0, n), label="at")
    changed, swapped = tensor.clone(), tensor.clone()
    changed[at] += 1
    swapped[[at, n + 1]] = swapped[[n + 1, at]]
    digest = of_tensors({"it": tensor}, 2)
    assert of_tensors({"it": tensor.clone()}, 2) == digest
    assert of_tensors({"it": changed}, 2) != digest
    assert (of_tensors({"it": swapped}, 2) == digest) == bool(tensor[at] == tensor[n + 1])


def test_digests_know_dtypes_shapes_and_views() -> None:
    base = torch.arange(24, dtype=torch.float32)
    others = [
        base,
        base.reshape(4, 6),
        base.reshape(4, 6).t(),
        base.view(torch.int32),
        base.double(),
        base[1:],
        base[:0],
    ]
    assert len({of_values({"it": each})["it", ()] for each in others}) == len(others)
    assert of_values({"it": base[3:9]}) == of_values({"it": base[3:9].clone()})
    assert of_values({"it": base.reshape(4, 6).t()}) == of_values({"it": base.reshape(4, 6).t().contiguous()})
    number = torch.tensor([1 + 2j])
    assert of_values({"it": number.conj()}) == of_values({"it": number.conj().resolve_conj()})
    sparse = torch.eye(3).to_sparse()
    assert of_values({"it": sparse}) == of_values({"it": torch.eye(3).to_sparse()}) != of_values({"it": sparse * 2})


def test_equal_values_that_share_other_objects_have_one_digest() -> None:
    part = ["text"]
    pairs = [
        ([part, part], [["text"], ["text"]]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.float64(1), np.float64(1)),
        (torch.Size([1, 2]), torch.Size([1, 2])),
        (collections.Counter("aab"), collections.Counter("baa")),
        ({"x", "y", "z"}, {"z", "y", "x"}),
    ]
    for one, other in pairs:
        assert of_values({"it": one}) == of_values({"it": other})


def test_a_long_list_of_differences_is_cut() -> None:
    digests = [{(f"model.{at}", ()): bytes([rank and at]) for at in range(1, 21)} for rank in range(4)]
    text = str(refusal(Path("/x/a"), differing(digests), "Do that"))
    assert text.count("\n") == 10
    assert "\n  model.1: [1-3] differ from [0]\n" in text
    assert text.endswith("\n  and 12 more\nDo that")
