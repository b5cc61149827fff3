"""Measure the recovery of a training from deaths of ranks: ``python -m benchmarks.survival``.

A real kernel trains a model of ten million parameters with FSDP on four ranks, and ranks are killed at random moments. The
output has the time from each kill to the end of the first step of the new process, the time of a restart of all ranks for
comparison, the cost of snapshots for each step, and whether the final parameters equal those of a run without deaths.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient, KernelManager

RANKS = 4
MODEL = """%%remote
import os, pathlib, time, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
def build():
    global model, optimizer
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(10)])
    for layer in model: fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
def train_step(step):
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
log = pathlib.Path(DIRECTORY, str(rank))
def note(step):
    with log.open("a") as file: print(os.getpid(), step, time.time(), file=file)
"""
BUILD = "%%remote\nbuild()"
TRAIN = """%%remote
live.snapshot(model=model, optimizer=optimizer, every=10)
for step in live.loop(STEPS, on_failure="recover"):
    train_step(step)
    note(step)
"""
SUM = "%%remote --out total\nsum(float(param.full_tensor().double().sum()) for param in model.parameters())"
PAIRS = """%%remote --out pairs
def block(every):
    if every: live.snapshot(model=model, optimizer=optimizer, every=every)
    steps = live.loop(20) if every else range(20)
    wall, cpu = time.perf_counter(), time.process_time()
    for step in steps: train_step(step)
    return time.perf_counter() - wall, time.process_time() - cpu
[(block(0), block(10)) for _ in range(PAIRS)]
"""


class Kernel:
    """A kernel and its client."""

    def __init__(self) -> None:
        self._manager = KernelManager(kernel_name="monarch")
        self._manager.start_kernel(env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.client: BlockingKernelClient = self._manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str) -> None:
        """Run a cell to its end."""
        reply = self.client.execute_interactive(code, output_hook=lambda message: None, timeout=3600)["content"]
        if reply["status"] != "ok":
            raise SystemExit(f"{code}\n{reply['ename']}: {reply['evalue']}")

    def value(self, expression: str) -> Any:
        """Evaluate an expression whose repr is a literal."""
        reply = self.client.execute_interactive(
            "", user_expressions={"value": expression}, output_hook=lambda message: None
        )
        return eval(reply["content"]["user_expressions"]["value"]["data"]["text/plain"])

    def close(self) -> None:
        """End the kernel and all ranks."""
        self.client.stop_channels()
        self._manager.shutdown_kernel()


def steps_of(directory: Path, rank: int) -> list[tuple[int, int, float]]:
    """The finished steps of a rank: (pid, step, time)."""
    path = directory / str(rank)
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        (int(pid), int(step), float(at)) for pid, step, at in (line.split() for line in lines if line.count(" ") == 2)
    ]


def wait_for(what: Callable[[], Any]) -> Any:
    """Wait until a value is true, and give it."""
    while not (found := what()):
        time.sleep(0.005)
    return found


class Training:
    """A cell that trains, while ranks are killed."""

    def __init__(self, kernel: Kernel, directory: Path, steps: int) -> None:
        kernel.run(BUILD)
        for rank in range(RANKS):
            (directory / str(rank)).unlink(missing_ok=True)
        self._kernel = kernel
        self._directory = directory
        kernel.client.execute(TRAIN.replace("STEPS", str(steps)))

    def kill(self, rank: int) -> float:
        """Kill the process of a rank; gives the seconds until its successor has done a step."""
        pid = wait_for(lambda: self._steps(rank))[-1][0]
        started_at = time.time()
        os.kill(pid, signal.SIGKILL)
        ends = wait_for(lambda: [at for by, _, at in self._steps(rank) if by != pid and at > started_at])
        return float(ends[0]) - started_at

    def end(self) -> float:
        """Wait for the end of the training; gives the sum of all parameters."""
        wait_for(self._is_over)
        self._kernel.run(SUM)
        return float(self._kernel.value("list(total.values())[0]"))

    def _steps(self, rank: int) -> list[tuple[int, int, float]]:
        if self._is_over():
            raise SystemExit("the training ended before all kills; give it more steps with --steps")
        return steps_of(self._directory, rank)

    def _is_over(self) -> bool:
        if not self._kernel.client.shell_channel.msg_ready():
            return False
        reply = self._kernel.client.get_shell_msg(timeout=1)["content"]
        if reply["status"] != "ok":
            raise SystemExit(f"{reply['ename']}: {reply['evalue']}")
        return True


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as name:
        directory, kernel = Path(name), Kernel()
        try:
            kernel.run(f"%mesh up t -n {RANKS} --device cpu")
            kernel.run(MODEL.replace("DIRECTORY", repr(name)))
            undisturbed = Training(kernel, directory, options.steps).end()
            ends = [at for _, _, at in steps_of(directory, 0)]
            print(f"a step takes {statistics.median(b - a for a, b in itertools.pairwise(ends)):.2f} s", flush=True)
            training, took = Training(kernel, directory, options.steps), []
            for _ in range(options.kills):
                time.sleep(random.uniform(0.5, 8.0))
                took.append(training.kill(random.randrange(RANKS)))
            print(
                f"{len(took)} kills: from the kill to the end of the new process's first step median "
                f"{statistics.median(took):.2f} s, least {min(took):.2f}, most {max(took):.2f}",
                flush=True,
            )
            total = training.end()
            same = "equal" if total == undisturbed else "NOT EQUAL"
            print(f"sum of all parameters {total!r}, undisturbed {undisturbed!r}: {same}", flush=True)
            started_at = time.time()
            for code in ("%mesh restart t", MODEL.replace("DIRECTORY", repr(name)), BUILD):
                kernel.run(code)
            kernel.run(TRAIN.replace("STEPS", "1"))
            print(f"all ranks restarted by hand, to the end of a first step: {time.time() - started_at:.2f} s")
            kernel.run(PAIRS.replace("PAIRS", str(options.pairs)))
            pairs = [pair for of_rank in kernel.value("list(pairs.values())") for pair in of_rank]
            for at, what in enumerate(("wall", "CPU")):
                more = statistics.median(with_[at] / without[at] - 1 for without, with_ in pairs)
                print(f"snapshots every 10 steps: {what} time {more:+.1%}")
        finally:
            kernel.close()


if __name__ == "__main__":
    main()
