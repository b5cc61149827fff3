"""Loops that go on by themselves when ranks die, and are rolled back by hand."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import Notebook
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

RANKS = 4
DEFINE = """%%remote
import random, time, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    def forward(self, x):
        return self.layers(x)
def batch(step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 16, generator=generator)
"""
BUILD = """%%remote
torch.manual_seed(0)
model = Net()
for layer in model.layers:
    if isinstance(layer, nn.Linear): fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
losses = []
torch.manual_seed(rank)
random.seed(rank)
"""
TRAIN = """%%remote {options}
live.snapshot(model=model, optimizer=optimizer, schedule=schedule, losses=losses, every=5)
for step in live.loop(60, on_failure="recover"):
    lr = live.knob("scale", 1.0, low=0.1, high=10)
    loss = (model(batch(step)) * lr).square().mean() + 1e-3 * random.random()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append((step, loss.item()))
    live.log(loss=loss)
    time.sleep({sleep_s})
"""
SUM = """%%remote --out sums
sum(float(param.full_tensor().double().sum()) for param in model.parameters()), losses
"""


def train(sleep_s: float = 0.0, options: str = "") -> str:
    return TRAIN.format(sleep_s=sleep_s, options=options)


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[list[object]]:
    """What it comes to if nobody dies."""
    notebook = Notebook()
    try:
        bring_up(notebook)
        notebook.ok(train())
        yield outcome(notebook)
    finally:
        notebook.close()


@pytest.fixture
def trained() -> Iterator[Notebook]:
    """A notebook whose model is built."""
    notebook = Notebook()
    try:
        bring_up(notebook)
        yield notebook
    finally:
        notebook.close()


def bring_up(notebook: Notebook) -> None:
    notebook.ok(f"%mesh up t -n {RANKS} --device cpu")
    for code in (DEFINE, BUILD):
        notebook.ok(code)


def outcome(notebook: Notebook) -> list[object]:
    notebook.ok(SUM)
    return list(notebook.value("list(sums.values())"))


def reaches(notebook: Notebook, step: int) -> None:
    wait_until(lambda: notebook.value("max([0, *(loop.view().step for loop in t.loops)])") >= step, f"step {step}")


def kill(notebook: Notebook, rank: int) -> None:
    os.kill(notebook.value(f"t.view().ranks[{rank}].pid"), signal.SIGKILL)


def test_a_rank_that_is_killed_is_replaced_and_the_outcome_is_the_same(
    trained: Notebook, undisturbed: list[object]
) -> None:
    cell = trained.send(train(0.05, "--background"))
    cell.wait()
    reaches(trained, 12)
    kill(trained, 2)
    assert outcome(trained) == undisturbed, cell.text
