"""datasets, webdataset, torchdata and torchao run unmodified in cells of four ranks; ``make test-field`` has these packages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

pytestmark = [
    pytest.mark.slow,  # ranks import the libraries
    pytest.mark.timeout(300),
]


def on_ranks(notebook: Notebook, code: str) -> list[Any]:
    """Run a cell, and return the value of its last expression on each rank."""
    cell = notebook.run(f"%%remote t --out found\n{code}", LONG_S * 3)
    assert cell.ok, cell.error
    found: Any = notebook.value("list(found.values())")
    return list(found)


def test_datasets_splits_rows_by_rank(four: Notebook) -> None:
    pytest.importorskip("datasets", reason="datasets is in the environment of make test-field")
    code = """
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
rows = Dataset.from_dict({"x": list(range(32))}).map(lambda row: {"y": 2 * row["x"]})
own = split_dataset_by_node(rows, rank, world_size)
streamed = split_dataset_by_node(rows.to_iterable_dataset(num_shards=4), rank, world_size)
own["y"][:], [row["y"] for row in streamed]
"""
    for parts in zip(*on_ranks(four, code), strict=True):
        assert [len(part) for part in parts] == [8] * 4
        assert sorted(y for part in parts for y in part) == list(range(0, 64, 2))


def test_webdataset_gives_each_rank_its_shards(four: Notebook, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is in the environment of make test-field")
    for shard in range(4):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for i in range(5):
                writer.write({"__key__": f"{shard}-{i}", "cls": 5 * shard + i})
    code = f"""
import webdataset
shards = {str(tmp_path / "{0..3}.tar")!r}
rows = webdataset.WebDataset(shards, nodesplitter=webdataset.split_by_node, shardshuffle=False).decode().to_tuple("cls")
[int(each) for each, in rows]
"""
    assert on_ranks(four, code) == [list(range(5 * shard, 5 * shard + 5)) for shard in range(4)]
    cell = four.run("%%remote t" + code.replace("nodesplitter=webdataset.split_by_node, ", ""), LONG_S)
    assert "you need to add an explicit nodesplitter" in cell.evalue


def test_statefuldataloader_goes_on_after_the_batch_it_has_given(four: Notebook) -> None:
    pytest.importorskip("torchdata", reason="torchdata is in the environment of make test-field")
    code = """
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torch.utils.data import DistributedSampler
def loader():
    return StatefulDataLoader(range(32), batch_size=2, num_workers=2, sampler=DistributedSampler(range(32), shuffle=False))
first = loader()
batches = iter(first)
before = [next(batches).tolist() for _ in range(2)]
second = loader()
second.load_state_dict(first.state_dict())
before, [batch.tolist() for batch in second]
"""
    for rank, (before, after) in enumerate(on_ranks(four, code)):
        assert [i for batch in before + after for i in batch] == list(range(rank, 32, 4))
        assert len(before) == 2
    four.ok("%%remote t\ndel batches, first")  # the iterator is not at its end, and keeps its workers


def test_torchao_quantizes_a_model_on_each_rank(four: Notebook) -> None:
    pytest.importorskip("torchao", reason="torchao is in the environment of make test-field")
    code = """
import torch
import torch.distributed as dist
from torchao.quantization import Int8WeightOnlyConfig, quantize_
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
with torch.no_grad():
    exact = model(inputs)
    quantize_(model, Int8WeightOnlyConfig())
    error = (model(inputs) - exact).abs().max()
dist.all_reduce(error, dist.ReduceOp.MAX)
type(model[0].weight.data).__name__, error.item(), exact.abs().max().item()
"""
    found = on_ranks(four, code)
    assert len({error for _, error, _ in found}) == 1
    for kind, error, largest in found:
        assert kind.startswith("Int8")
        assert 0 < error < 0.05 * largest
