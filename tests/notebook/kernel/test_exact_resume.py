"""A run that is interrupted and resumed equals one that is not, to the last bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebook.kernel.conftest import Notebook
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANKS = 4
LONG_S = 180.0
DEFINE = """%%remote
import itertools, random, time, numpy, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from monarch_kernel import checkpoint
class Numbers(Dataset):
    def __len__(self):
        return 144
    def __getitem__(self, number):
        return number, torch.randn(16, generator=torch.Generator().manual_seed(number))
"""
BUILD = """%%remote
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
for layer in model:
    if isinstance(layer, nn.Linear): fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = checkpoint.Loader(DataLoader(Numbers(), 4, sampler=checkpoint.Sampler(Numbers(), seed=1), num_workers=2))
things = dict(model=model, optimizer=optimizer, loader=loader, rng=checkpoint.rng)
log, at = [], 0
torch.manual_seed(100 + rank); random.seed(rank); numpy.random.seed(rank)
def train(step, batch):
    numbers, x = batch
    loss = model(x).square().mean() * (1 + 0.1 * random.random() + 0.1 * numpy.random.rand())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.append((step, numbers.tolist(), loss.item()))
"""
TRAIN = """%%remote OPTIONS
for at, batch in zip(range(at, 24), itertools.chain.from_iterable(itertools.repeat(loader))):
    train(at, batch)
    if at % 5 == 4:
        checkpoint.save(f"FOLDER/step-{at + 1}", at=at + 1, log=log, **things)
    AFTER
"""
LOAD = """%%remote
values = checkpoint.load(checkpoint.latest("FOLDER"), **things)
at, log = values["at"], values["log"]
"""
LIVE = """%%remote --background
live.snapshot(model=model, optimizer=optimizer, loader=loader, log=log, every=5)
for at, batch in zip(live.loop(24, on_failure="recover"), itertools.chain.from_iterable(itertools.repeat(loader))):
    train(at, batch)
    time.sleep(0.05)
"""
FOUND = """%%remote --out found
log, [param.full_tensor().tolist() for param in model.parameters()], random.random(), numpy.random.rand(), float(torch.rand(()))
"""


def bring_up(notebook: Notebook) -> None:
    notebook.ok(f"%mesh up t -n {RANKS} --device cpu", LONG_S)
    build(notebook)


def build(notebook: Notebook) -> None:
    for code in (DEFINE, BUILD):
        notebook.ok(code, LONG_S)


def training(folder: Path, after: str = "", options: str = "") -> str:
    return TRAIN.replace("FOLDER", str(folder)).replace("AFTER", after).replace("OPTIONS", options)


def resume(notebook: Notebook, folder: Path) -> list[object]:
    """Build all again, load the newest checkpoint, train to the end, and return the outcome."""
    build(notebook)
    notebook.ok(LOAD.replace("FOLDER", str(folder)), LONG_S)
    assert notebook.run("%%remote\nat").plain in {f"[0-3] {step}" for step in (5, 10, 15, 20)}
    notebook.ok(training(folder), LONG_S)
    return outcome(notebook)


def outcome(notebook: Notebook) -> list[object]:
    notebook.ok(FOUND, LONG_S)
    return list(notebook.value("list(found.values())"))


@pytest.fixture(scope="module")
def whole(bare: Notebook, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The outcome of a run without interruption."""
    bring_up(bare)
    bare.ok(training(tmp_path_factory.mktemp("whole")), LONG_S)
    found = outcome(bare)
    logs = [log for log, *_ in found]  # type: ignore[misc]
    assert len({repr(log) for log in logs}) == RANKS
    epoch = [number for log in logs for _, numbers, _ in log[:9] for number in numbers]
    assert sorted(epoch) == list(range(144))
    bare.ok("%mesh down t")
    return found


def test_after_an_exception(bare: Notebook, whole: list[object], tmp_path: Path) -> None:
    bring_up(bare)
    cell = bare.run(training(tmp_path, "if at == 12 and rank == 1: raise ValueError('bad sample')"), LONG_S)
    assert "ValueError: bad sample" in cell.text
    assert resume(bare, tmp_path) == whole


def test_after_an_interrupt(bare: Notebook, whole: list[object], tmp_path: Path) -> None:
    bring_up(bare)
    bare.send(training(tmp_path, "while at == 13 and rank == 2: time.sleep(0.01)", "--background"))
    wait_until(lambda: (tmp_path / "step-10").exists(), "a checkpoint", LONG_S)
    bare.ok("%mesh interrupt t")
    assert resume(bare, tmp_path) == whole


def test_after_a_restart_of_the_kernel(
    new_notebook: Callable[..., Notebook], whole: list[object], tmp_path: Path
) -> None:
    first = new_notebook()
    bring_up(first)
    first.ok(training(tmp_path, "if at == 17: break"), LONG_S)
    first.close()
    second = new_notebook()
    second.ok(f"%mesh up t -n {RANKS} --device cpu", LONG_S)
    assert resume(second, tmp_path) == whole


def test_after_a_rank_was_killed_with_a_snapshot(bare: Notebook, whole: list[object]) -> None:
    bring_up(bare)
    cell = bare.send(LIVE)
    wait_until(lambda: bare.value("max([0, *(loop.view().step for loop in t.loops)])") >= 12, "step 12", LONG_S)
    os.kill(bare.value("t.view().ranks[2].pid or 1 << 30"), signal.SIGKILL)
    assert outcome(bare) == whole, cell.text
    assert "the loop is back before step" in cell.text
