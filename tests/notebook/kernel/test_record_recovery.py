"""A run of FSDP with three knobs, a death and a recovery is repeated with the same parameters."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.train.record import open as open_record
from tests.notebook.kernel.conftest import Notebook
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONG_S = 180.0
BUILD = """%%remote
import time, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from monarch_kernel import checkpoint
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
for layer in model:
    if isinstance(layer, nn.Linear): fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rows = TensorDataset(torch.randn(3200, 16, generator=torch.Generator().manual_seed(1)))
loader = checkpoint.Loader(DataLoader(rows, 4, sampler=checkpoint.Sampler(rows, seed=1)))
torch.manual_seed(100 + rank)
"""
TRAIN = """%%remote --background --out done
live.snapshot(model=model, optimizer=optimizer, loader=loader, every=10)
for step, (x,) in zip(live.loop(200, on_failure="recover"), loader):
    optimizer.param_groups[0]["lr"] = live.knob("lr", 0.01)
    loss = (model(x * live.knob("scale", 1.0)) - live.knob("target", 0.0)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    live.log(loss=loss)
    time.sleep(0.01)
"""


def test_a_run_with_a_death_is_repeated(new_notebook: Callable[..., Notebook], tmp_path: Path) -> None:
    notebook = new_notebook(n=4)
    notebook.ok(f"%mesh record {tmp_path / 'run'}")
    notebook.ok(BUILD, LONG_S)
    notebook.ok(TRAIN)
    for step, (name, value) in zip((20, 50, 110), {"lr": 0.02, "scale": 0.5, "target": 1.0}.items()):
        wait_until(
            lambda step=step: notebook.value(f"[l.view().step > {step} for l in t.loops[-1:]]") == [True], "a step"
        )
        notebook.ok(f"t.loop.set({name!r}, {value})")
        if name == "scale":
            os.kill(notebook.pids()[2], signal.SIGKILL)
    notebook.ok("done.result()", LONG_S)
    notebook.ok("%mesh record close")
    with open_record(tmp_path / "run") as record:
        kinds = [event.kind for event in record.events]
        assert kinds.count("death") == 1
        assert kinds.count("recovery") == 1
        assert [(knob.name, knob.value) for knob in record.knobs if not knob.is_default] == [
            ("lr", 0.02),
            ("scale", 0.5),
            ("target", 1.0),
        ]
        assert [each.step for each in record.metrics] == list(range(200))
        assert [check.step for check in record.checks if check.kind == "parameters"][-1] == 200
    notebook.ok("%mesh restart t", LONG_S)
    code = f"from monarch_kernel import record\nfound = record.open({str(tmp_path / 'run')!r}).replay(t)\nprint(found)"
    text = notebook.ok(code, LONG_S).stdout
    assert "all results that were compared are equal" in text
    assert "compared: 2 cells, 200 batches, 200 metrics," in text
