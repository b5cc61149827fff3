"""F41: one flipped bit in a checkpoint or a snapshot is found before anything of it is used, with the file, tensor and rank."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from monarch_kernel.errors import RemoteError
from monarch_kernel.train import checkpoint
from monarch_kernel.train.checkpoint import CheckpointError
from monarch_kernel.train.snapshots.rewind import roll_back
from tests.failures.cells import Cells, shown

PRELUDE = """
from torch import nn
from monarch_kernel.train import checkpoint
from monarch_kernel.train.parallel import parallelize
from torch.distributed.device_mesh import init_device_mesh
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
parallelize(model, init_device_mesh('cpu', (2,), mesh_dim_names=('dp',)), 'fsdp', quiet=True)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
torch.manual_seed(rank)
things = dict(model=model, optimizer=optimizer, rng=checkpoint.rng)
def values():
    return [p.to_local().flatten().tolist() for p in model.parameters()], torch.get_rng_state().tolist()
"""


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """Flip one bit of a file."""
    content = file.read_bytes()
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    file.write_bytes(changed)
    try:
        yield
    finally:
        file.write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process."""
    path = tmp_path_factory.mktemp("f41") / "step-3"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    checkpoint.save(path, model=model, optimizer=optimizer, step=3, rng=checkpoint.rng)
    return path


FILES = [".metadata", "__0_0.distcp", "checksums.json", "monarch.json", "values.pt"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_each_file_is_found(saved: Path, name: str) -> None:
    assert sorted(file.name for file in saved.iterdir()) == FILES
    file = saved / name
    bits = file.stat().st_size * 8
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    before = [param.clone() for param in model.parameters()]
    for bit in {0, bits - 1, *random.Random(name).sample(range(bits), 60)}:
        with flipped(file, bit):
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(saved, model=model, optimizer=optimizer, rng=checkpoint.rng)
            with pytest.raises(CheckpointError, match=str(saved)):
                checkpoint.verify(saved)
        text = str(caught.value)
        assert str(saved) in text
        assert name in text
        if name != "monarch.json":
            assert f"  {name}, written by rank 0" in text
    assert all(map(torch.equal, before, model.parameters()))
    assert checkpoint.load(saved, model=model, optimizer=optimizer)["step"] == 3
    assert checkpoint.verify(saved).ranks == 1


def test_the_tensor_is_named(saved: Path) -> None:
    file = saved / "__0_0.distcp"
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    value = checkpoint.load(saved, model=model)["step"]
    assert value == 3
    bit = 8 * file.read_bytes().index(model[0].weight.detach().numpy().tobytes()) + 77
    with flipped(file, bit):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(saved, model=model)
        assert str(caught.value) == (
            f"{saved} is damaged, and was not used; nothing has changed:\n"
            "  __0_0.distcp, written by rank 0, has a wrong checksum: model.0.weight\n"
            "Load another checkpoint; checkpoint.verify(path) lists all that is damaged in one"
        )
        with pytest.raises(
            CheckpointError, match=r"__0_0.distcp, written by rank 0, has a wrong checksum: model.0.weight"
        ):
            checkpoint.export(saved, saved.parent / "x.safetensors")
        assert checkpoint.load(saved)["step"] == 3  # the damaged tensor is not used


@pytest.mark.parametrize("name", FILES[:3] + FILES[4:])
def test_a_missing_or_short_file_is_found(saved: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "a"
    shutil.copytree(saved, path)
    content = (path / name).read_bytes()
    for wrong in (content[:-1], b"", None):
        if wrong is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(wrong)
        # monarch.json has the checksum of checksums.json, but not its size.
        why = "is missing" if wrong is None else "has a wrong checksum" if name == "checksums.json" else "is cut short"
        with pytest.raises(CheckpointError, match=f"  {name}, written by rank 0, {why}"):
            checkpoint.verify(path)


@pytest.mark.slow  # the import of torch.distributed.checkpoint on the ranks
def test_a_flipped_bit_is_found_on_all_ranks_with_the_rank_that_wrote_it(cells: Cells, tmp_path: Path) -> None:
    path = tmp_path / "a"
    cells.ok(PRELUDE)
    cells.ok(f"checkpoint.save({str(path)!r}, step=3, **things)")
    before = cells.ok("torch.manual_seed(5 + rank)\nvalues()")
    names = sorted(file.name for file in path.iterdir())
    assert names == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "checksums.json",
        "monarch.json",
        "values-0.pt",
        "values-1.pt",
        "values.pt",
    ]
    for name in names:
        bits = (path / name).stat().st_size * 8
        with flipped(path / name, random.Random(name).randrange(bits)):
            text = cells.fails(f"checkpoint.load({str(path)!r}, **things)")
            with pytest.raises(CheckpointError, match=name):
                checkpoint.verify(path)
        assert name in text
        if name in ("__1_0.distcp", "values-1.pt"):
            assert f"{name}, written by rank 1, has a wrong checksum: " in text
    assert cells.ok("values()") == before
    cells.ok(f"checkpoint.load({str(path)!r}, **things)")


FLIP = """
from monarch_kernel.runtime.rpc.handles import PROCESS
def flip(owner):
    kept = PROCESS.loops.snapshots._kept
    (shelf,) = [shelf for place, (_, shelf) in enumerate(sorted(kept.items())) if place == owner]
    key = max(shelf)
    rest, elements = shelf[key].frames
    changed = bytearray(elements)
    changed[5] ^= 1
    shelf[key] = shelf[key]._replace(frames=(rest, changed))
"""
LOOP = """
from monarch_kernel import live
value, late = torch.zeros(3), torch.full((3,), float(rank))
live.snapshot(value=value, late=late, every=2)
for step in live.loop(7):
    value += step + rank
"""


@pytest.mark.slow  # the import of what captures snapshots on the ranks
def test_a_flipped_bit_in_a_snapshot_is_found_and_the_copy_of_the_buddy_is_used(cells: Cells) -> None:
    cells.ok(LOOP)
    cells.ok(FLIP + "if rank == 1: flip(1)")
    assert roll_back(cells.mesh) == 6
    assert cells.ok("value.tolist()") == ([15.0] * 3, [21.0] * 3)
    cells.ok("value.zero_()\nif rank == 0: flip(1)")
    with pytest.raises(RemoteError) as caught:
        roll_back(cells.mesh)
    assert caught.value.ranks == (1,)
    assert "the snapshot of step 6 of rank 1 is damaged, and was not used: the checksum of value is wrong" in shown(
        caught.value
    )
    assert cells.ok("value.tolist()")[1] == [0.0] * 3
    assert roll_back(cells.mesh, 4) == 4
    assert cells.ok("value.tolist()") == ([6.0] * 3, [10.0] * 3)
