"""A process that is killed while it records leaves a record that can be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monarch_kernel.features.record.reading import RecordReader

pytestmark = pytest.mark.timing

PROGRAM = """
import sys, time
from monarch_kernel.features.record.recorder import Recorder
from tests.features.record.runs import batch, log, loop_of
recorder = Recorder(sys.argv[1])
cell = recorder.cell_started("train()", 1, "t", "0-1")
recorder.cell_sent(cell, 77)
loop = loop_of()
recorder.loop_started(loop)
for step in range(100_000):
    batch(recorder, loop, step, [b"a" * 8] * 2)
    log(recorder, loop, step, [1.0, 2.0])
    print(step, time.time(), flush=True)
    time.sleep(0.005)
"""


@pytest.mark.parametrize("after_s", [1.2, 1.7])
def test_the_record_is_complete_up_to_a_second_before(after_s: float, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, env=env
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    began = float(first.split()[1])
    at = {0: began}
    for line in child.stdout:
        step, now = line.split()
        at[int(step)] = float(now)
        if float(now) - began > after_s:
            break
    child.send_signal(signal.SIGKILL)
    killed = time.time()
    child.wait()
    child.stdout.close()
    record = RecordReader(tmp_path / "run")
    assert [cell.code for cell in record.cells] == ["train()"]
    steps = [each.step for each in record.metrics]
    assert steps == list(range(len(steps)))
    assert len(record.batches) == len(steps)
    assert max(steps) >= max(step for step, now in at.items() if now < killed - 1)
    assert "no end" in record.text()
    assert not record.damage
