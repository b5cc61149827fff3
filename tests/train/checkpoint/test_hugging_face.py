"""Models in the format of Hugging Face: what other programs read of them, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train import checkpoint
from monarch_kernel.train.checkpoint.hugging_face import bytes_of, plan_files, write_file, write_index
from tests.support.ranks import Ranks
from tests.train.checkpoint.test_checkpoint import PRELUDE

HAS = """
class Config:
    def __init__(self): self.dtype, self.architectures = None, None
    def save_pretrained(self, folder): Path(folder, "config.json").write_text(repr((self.architectures, self.dtype)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.layers = Config(), net().to(torch.bfloat16)
        self.layers.register_buffer("seen", torch.tensor(3))
    def forward(self, tokens): return self.layers(tokens)
"""


@pytest.fixture(scope="module")
def ranks(session: None) -> Iterator[Ranks]:
    ranks = Ranks(2, PRELUDE + HAS)
    yield ranks
    ranks.close()


def parse(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Read a safetensors file by the description of its format: name -> dtype, shape, bytes."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + size])
    assert about.pop("__metadata__") == {"format": "pt"}
    assert size % 8 == 0
    found, end = {}, 0
    for name, each in about.items():
        begin, stop = each["data_offsets"]
        assert begin == end, "a gap"
        end = stop
        found[name] = each["dtype"], each["shape"], content[8 + size + begin : 8 + size + stop]
    assert 8 + size + end == len(content)
    return found


def as_tensors(path: Path) -> dict[str, torch.Tensor]:
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}
    return {
        name: torch.frombuffer(bytearray(raw), dtype=dtypes[dtype]).reshape(shape)
        for name, (dtype, shape, raw) in parse(path).items()
    }


def test_a_sharded_model_is_one_file_with_whole_tensors_and_its_configuration(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "llama"
    states = ranks.run(
        f"""
model = Net()
parallelize(model, mesh, "fsdp", quiet=True)
before = checkpoint.save({str(path)!r}, format="hf", model=model)
{{name: (value.full_tensor() if isinstance(value, DTensor) else value).tolist() for name, value in model.state_dict().items()}}
"""
    )
    expected = states[0]
    found = as_tensors(path / "model.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == expected
    assert {str(value.dtype) for value in found.values()} == {"torch.bfloat16", "torch.int64"}
    assert (path / "config.json").read_text() == "(['Net'], 'bfloat16')"
    assert sorted(each.name for each in path.iterdir()) == ["config.json", "model.safetensors"]
    load_file = pytest.importorskip("safetensors.torch").load_file
    assert {name: value.tolist() for name, value in load_file(path / "model.safetensors").items()} == expected


def test_a_save_replaces_only_what_a_save_has_written(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "net"
    save = f"checkpoint.save({str(path)!r}, format='hf', model=net(seed=SEED))"
    ranks.run(save.replace("SEED", "0"))
    first = (path / "model.safetensors").read_bytes()
    ranks.run(save.replace("SEED", "1"))
    assert (path / "model.safetensors").read_bytes() != first
    (path / "tokenizer.json").write_text("{}")
    assert "has files that a save would remove (tokenizer.json)" in ranks.fails(save.replace("SEED", "0"))
    assert (path / "tokenizer.json").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["net"]
    with pytest.raises(
        CheckpointError, match="it has safetensors files, as format='hf' writes them: read it with from_pretr"
    ):
        checkpoint.load(path, model=nn.Linear(1, 1))


def test_a_rank_that_cannot_write_fails_on_all_and_no_rank_hangs(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "net"
    reason = ranks.fails(
        f"""
from monarch_kernel.train.checkpoint import saving
def full(folder, file, contents):
    next(contents)
    raise OSError(28, "No space left on device", file.name)
was, saving.write_file = saving.write_file, full
model = net()
parallelize(model, mesh, "fsdp", quiet=True)
try:
    checkpoint.save({str(path)!r}, format="hf", model=model)
finally:
    saving.write_file = was
"""
    )
    assert "no space is left on" in reason
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"model": nn.Linear(1, 1), "step": 3}, r"not step \(of type int\): save the rest in a second checkpoint"),
        (
            {"model": nn.Linear(1, 1).state_dict()},
            r"not model \(of type OrderedDict\): pass the model itself, a module",
        ),
        ({"model": nn.Linear(1, 1), "other": nn.Linear(1, 1)}, "not 2 models"),
        ({}, "nothing to save"),
        (
            {"model": nn.Linear(1, 1, dtype=torch.complex64)},
            "weight is torch.complex64, which safetensors files can't hold",
        ),
    ],
)
def test_what_the_format_cannot_hold_is_refused(arguments: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, TypeError), match=reason):
        checkpoint.save(tmp_path / "a", format="hf", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "gguf"}, "takes one of 'monarch', 'hf', not 'gguf'"),
        ({"format": "hf", "wait": False}, "leave wait=False out"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        checkpoint.save(tmp_path / "a", model=nn.Linear(1, 1), **options)


def test_other_objects_save_themselves_beside_the_model(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            Path(folder, "tokenizer.json").write_text("{}")

    for _ in range(2):  # a second save replaces the first one
        checkpoint.save(tmp_path / "a", format="hf", model=nn.Linear(1, 1), tokenizer=Tokenizer())
    assert sorted(os.listdir(tmp_path / "a")) == ["model.safetensors", "tokenizer.json"]


def test_a_large_model_is_divided_into_files_with_an_index(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((3,), float(i)) for i in range(5)} | {
        "large": torch.ones(40),
        "scalar": torch.tensor(2),
    }
    files = plan_files(tensors, max_nbytes=30)
    assert [file.keys for file in files] == [("w0", "w1"), ("w2", "w3"), ("w4",), ("large",), ("scalar",)]
    for file in files:
        write_file(tmp_path, file, (bytes_of(tensors[key]) for key in file.keys))
    write_index(tmp_path, files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5 * 12 + 160 + 8}
    for key, name in index["weight_map"].items():
        assert torch.equal(as_tensors(tmp_path / name)[key], tensors[key])
