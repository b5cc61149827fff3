"""Measure what a run record costs a step, and how fast it grows: ``python -m benchmarks.record``.

Loops with and without a record take turns on the same ranks. A step reads a batch from a DataLoader, logs a loss, and is
otherwise empty, so the difference is what the record costs a rank. The size is that of an hour at ten steps a second, with four
ranks and two metrics, written without waiting.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from monarch_kernel.actor import ProcMesh, shutdown_context, this_host
from monarch_kernel.features.live.loops import LoopRecord
from monarch_kernel.features.record.messages import Noted, Step
from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.net.wire.messages import Logged
from monarch_kernel.train import record

RANKS = 2
STEPS = 1000
BUILD = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(1024, 1024)
rows = TensorDataset(torch.randn(16 * {steps}, 256), torch.zeros(16 * {steps}, dtype=torch.long))
loader = DataLoader(rows, batch_size=16)
"""
LOOP = """
began = time.thread_time()
for step, batch in zip(live.loop({steps}), loader):
    live.log(loss=0.5)
    time.sleep({step_s})
(time.thread_time() - began) / {steps}
"""


def seconds(mesh: ProcMesh, step_s: float) -> float:
    """Processor time of the ranks' main thread for one step."""
    values = mesh.run_cell(LOOP.format(steps=STEPS, step_s=step_s), want_value=True).get().values()
    return statistics.median(result.value for result in values)


def cost(mesh: ProcMesh, pairs: int, step_s: float) -> list[float]:
    """Seconds that a record adds to a step, once for each pair of loops."""
    mesh.run_cell(BUILD.format(steps=STEPS)).get()
    seconds(mesh, 0.0)
    found = []
    for _ in range(pairs):
        without = seconds(mesh, step_s)
        with tempfile.TemporaryDirectory() as folder:
            record.start(folder)
            found.append(seconds(mesh, step_s) - without)
            record.stop()
    return found


def growth(folder: Path, steps: int) -> int:
    """Bytes of the record of a loop with four ranks and two metrics."""
    recorder = Recorder(folder)
    loop = LoopRecord(1, 1, "t", "cell [1]", steps, 0.0)
    for rank in range(4):
        loop.pace.joined(rank + 1)
    recorder.loop_started(loop)
    empty = recorder.nbytes
    for step in range(steps):
        for rank in range(4):
            digests = {"batch": os.urandom(8)}
            if step % 100 == 0:
                digests |= {"parameters": os.urandom(8), "generators": os.urandom(8)}
            recorder.noted(rank, Noted(1, 1, (Step(step, digests),)))
            values = {name: (Logged(step, 1 / (step + rank + 1), 1, 1.0),) for name in ("loss", "norm")}
            recorder.loop_reported(loop, rank, values)
        if step % 5 == 4:
            recorder.flush()
    recorder.close()
    return recorder.nbytes - empty


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of loops (%(default)s)")
    parser.add_argument(
        "--hour", type=int, default=36_000, help="steps of the record whose size is measured (%(default)s)"
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mesh = this_host().spawn_procs({"gpus": RANKS}, device="cpu")
    mesh.initialized.get()
    found = cost(mesh, options.pairs, 0.01)
    middle = statistics.median(found)
    spread = f"from {min(found) * 1e6:.0f} to {max(found) * 1e6:.0f}"
    print(f"a record costs a rank {middle * 1e6:.0f} us a step ({spread}), {middle / 0.01:.2%} of a step of 10 ms")
    shutdown_context().get()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        nbytes = growth(Path(folder), options.hour)
        took = time.perf_counter() - began
        print(f"{options.hour:,} steps of 4 ranks with 2 metrics: {nbytes / 1e6:.2f} MB, written in {took:.1f} s")


if __name__ == "__main__":
    main()
