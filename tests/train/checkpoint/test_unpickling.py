"""Loading a checkpoint runs no code from its files."""

from __future__ import annotations

import importlib
import io
import os
import pickle
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train import checkpoint
from monarch_kernel.train.checkpoint.atomic_directory import VALUES
from monarch_kernel.train.checkpoint.unpickling import INDEX, load_index
from tests.support.ranks import Ranks
from tests.train.checkpoint.sealing import reseal


class Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


class Step(IntEnum):
    """A number that needs a class."""

    FIRST = 1


class Stateful(nn.Linear):
    """A layer with extra state besides tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def in_archive(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def in_index(path: Path, evil: Evil) -> None:
    (path / INDEX).write_bytes(pickle.dumps(evil))


def deep_in_index(path: Path, evil: Evil) -> None:
    index = pickle.loads((path / INDEX).read_bytes())
    index.planner_data = {"model.weight": ("model", evil)}
    (path / INDEX).write_bytes(pickle.dumps(index))


def in_values(path: Path, evil: Evil) -> None:
    (path / VALUES).write_bytes(in_archive({"step": evil}))


WAYS = [in_index, deep_in_index, in_values]


@pytest.mark.parametrize("put", WAYS)
def test_code_in_a_file_does_not_run_and_nothing_changes(tmp_path: Path, put: Callable[[Path, Evil], None]) -> None:
    path, ran = tmp_path / "a", tmp_path / "ran"
    checkpoint.save(path, model=nn.Linear(2, 2), step=1)
    put(path, Evil(ran))
    reseal(path)
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path, model=model)
    assert not ran.exists()
    assert torch.equal(model.weight, before)
    file = path / (VALUES if put is in_values else INDEX)
    assert str(caught.value).startswith(
        f"{file} was not read: it calls posix.mkdir, which can run code that the file brings; "
    )


@pytest.mark.parametrize("put", [in_index, deep_in_index])
def test_an_export_runs_no_code_of_the_index(tmp_path: Path, put: Callable[[Path, Evil], None]) -> None:
    path, ran = tmp_path / "a", tmp_path / "ran"
    checkpoint.save(path, model=nn.Linear(2, 2))
    put(path, Evil(ran))
    reseal(path)
    assert checkpoint.describe(path).names == {"model": "module"}
    assert checkpoint.latest(tmp_path) == path
    with pytest.raises(CheckpointError, match=r"\.metadata was not read: it calls posix\.mkdir"):
        checkpoint.export(path, tmp_path / "x")
    assert not ran.exists()
    assert not (tmp_path / "x").exists()


def put_object(path: Path, name: str, value: Any) -> None:
    """Replace an object of a checkpoint that is not a tensor, with a value in a separate file."""
    index = pickle.loads((path / INDEX).read_bytes())
    data = in_archive(value)
    (path / "other.distcp").write_bytes(data)
    (info,) = (info for at, info in index.storage_data.items() if at.fqn == name)
    info.relative_path, info.offset, info.length = "other.distcp", 0, len(data)
    (path / INDEX).write_bytes(pickle.dumps(index))
    reseal(path)


def test_code_in_an_object_beside_tensors_does_not_run(tmp_path: Path) -> None:
    path, ran = tmp_path / "a", tmp_path / "ran"
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    checkpoint.save(path, model=model, optimizer=optimizer)
    put_object(path, "optimizer.param_groups.0.lr", Evil(ran))
    with pytest.raises(
        CheckpointError, match=r"for optimizer\.param_groups\.0\.lr it calls posix\.mkdir, .*add_safe_globals"
    ):
        checkpoint.load(path, model=model, optimizer=optimizer)
    assert not ran.exists()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    checkpoint.save(path, model=nn.Linear(2, 2))
    index = pickle.loads((path / INDEX).read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../secret"
    (path / INDEX).write_bytes(pickle.dumps(index))
    reseal(path)
    with pytest.raises(CheckpointError, match=r"it refers to \.\./secret, outside of the checkpoint"):
        checkpoint.load(path, model=nn.Linear(2, 2))


@pytest.mark.parametrize("data", [b"", b"x" * 100, pickle.dumps({"a": 1})], ids=["empty", "noise", "dict"])
def test_a_damaged_index_is_named(tmp_path: Path, data: bytes) -> None:
    checkpoint.save(tmp_path / "a", model=nn.Linear(2, 2))
    (tmp_path / "a" / INDEX).write_bytes(data)
    reseal(tmp_path / "a")
    with pytest.raises(
        CheckpointError, match=r"/a/\.metadata (can't be read: .*; load another checkpoint|was not read: )"
    ):
        checkpoint.load(tmp_path / "a", model=nn.Linear(2, 2))


def test_attributes_of_other_things_than_enumerations_are_refused(tmp_path: Path) -> None:
    data = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntR."
    (tmp_path / INDEX).write_bytes(data)
    with pytest.raises(CheckpointError, match="it asks for the attribute '__init__'"):
        load_index(tmp_path)


@pytest.mark.parametrize(
    "target", ["pathlib Path", "torch.distributed.checkpoint.metadata Metadata", "torch.serialization _get_layout"]
)
def test_an_index_changes_no_class_or_function(tmp_path: Path, target: str) -> None:
    module, name = target.split()
    known = getattr(importlib.import_module(module), name)
    state = b"N}\x8c\x05extraK\x01s\x86"  # (None, {"extra": 1})
    (tmp_path / INDEX).write_bytes(b"\x80\x04c%s\n%s\n%sb." % (module.encode(), name.encode(), state))
    with pytest.raises(CheckpointError, match="it sets the state of"):
        load_index(tmp_path)
    assert not hasattr(known, "extra")


def test_the_index_of_a_plain_checkpoint_of_torch_is_read(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
    values = {str(dtype): torch.ones(2, 3, dtype=dtype) for dtype in dtypes}
    nested = {
        "values": values,
        "scalar": torch.tensor(1),
        "epoch": 3,
        "parts": [1.5, {"text": "a"}],
        "conv": nn.Conv2d(1, 1, 1),
    }
    with pytest.warns(UserWarning, match="save in a single process"):
        dcp.save(nested, checkpoint_id=tmp_path, no_dist=True)
    index = load_index(tmp_path)
    assert index == pickle.loads((tmp_path / INDEX).read_bytes())
    assert set(index.state_dict_metadata) >= {"values.torch.bfloat16", "parts.1.text", "epoch"}
    index.storage_meta = StorageMeta(tmp_path, "save", None, ["model"])
    (tmp_path / INDEX).write_bytes(pickle.dumps(index))
    assert load_index(tmp_path) == index
    (tmp_path / INDEX).write_bytes(pickle.dumps(Metadata({}), 2))
    assert load_index(tmp_path) == Metadata({})


def test_learning_rates_of_numpy_come_back(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["lr"] = numpy.float64(0.25)
    checkpoint.save(tmp_path / "a", model=model, optimizer=optimizer, rate=numpy.float32(0.5))
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    assert checkpoint.load(tmp_path / "a", model=model, optimizer=other) == {"rate": 0.5}
    assert other.param_groups[0]["lr"] == 0.25


def test_a_value_that_could_not_be_loaded_is_refused_on_saving(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", model=Stateful({"scale": [1.0, torch.ones(2)]}))
    model = Stateful({"scale": [0.0, torch.zeros(2)]})
    checkpoint.load(tmp_path / "a", model=model)
    assert model.extra["scale"][0] == 1.0
    assert torch.equal(model.extra["scale"][1], torch.ones(2))
    for extra in (Step.FIRST, Evil(tmp_path / "ran")):
        with pytest.raises(
            CheckpointError, match=r"model\._extra_state is a \w+, which can't be saved so that it is safe to load"
        ):
            checkpoint.save(tmp_path / "b", model=Stateful(extra))
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_class_that_the_user_allows_is_loaded(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Step]):
        checkpoint.save(tmp_path / "a", model=Stateful(Step.FIRST))
        model = Stateful(None)
        checkpoint.load(tmp_path / "a", model=model)
        assert model.extra is Step.FIRST
    with pytest.raises(CheckpointError, match=r"for model\._extra_state it calls .*Step"):
        checkpoint.load(tmp_path / "a", model=Stateful(None))


def test_all_ranks_refuse_an_index_with_code(session: None, tmp_path: Path) -> None:
    path, ran = tmp_path / "a", tmp_path / "ran"
    checkpoint.save(path, model=nn.Linear(2, 2))
    in_index(path, Evil(ran))
    reseal(path)
    ranks = Ranks(2, "import torch.distributed as dist\nfrom torch import nn\nfrom monarch_kernel import checkpoint")
    said = ranks.fails(f"checkpoint.load({str(path)!r}, model=nn.Linear(2, 2))")
    ranks.close()
    assert "was not read: it calls posix.mkdir" in said
    assert not ran.exists()
