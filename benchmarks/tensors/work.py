"""What the libraries have in common: the models, the timing, and the command line of a library's process."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.measures import row_key

__all__ = [
    "AXES",
    "PLAN",
    "WIDE",
    "Slot",
    "data",
    "main",
    "median_of",
    "mlp",
    "no_such",
    "peak_mib",
    "reset_peak",
    "size_of",
    "train",
]

ROUNDS = 7
AXES = {"dp": 2, "tp": 2}
"""The mesh of the sharded model."""

PLAN = {"0.weight": 0, "0.bias": 0, "2.weight": 1}
"""Parameters that tensor parallelism splits -> the dimension; the others are whole on each rank."""

WIDE = 2048
"""Size of the matrices of the product, in both dimensions."""

MIB = 1 << 20


class Slot(Protocol):
    """A library: takes the figures of one number of ranks."""

    def figure(self, name: str) -> float:
        """Take one figure, in the unit of the catalogue; `NotImplementedError` says why the library has none."""

    def stop(self) -> None:
        """End all that was started."""


def mlp(width: int) -> nn.Sequential:
    """Make the model that is trained; the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def size_of(name: str) -> tuple[int, int]:
    """Return the width and the batch of the model of a row, such as ``step_256_32``."""
    width, batch = map(int, name.removeprefix("step_").split("_"))
    return width, batch


def data(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch and its classes; the same each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 64, generator=generator), torch.randint(0, 10, (batch,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> Any:
    """Train one step; returns the loss."""
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def median_of(run: Callable[[], object], count: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of one of ``count`` equal parts of a function, in seconds: the median of some rounds after the first."""
    run()
    times = []
    for _ in range(ROUNDS):
        begin = clock()
        run()
        times.append((clock() - begin) / count)
    return statistics.median(times)


def reset_peak() -> int:
    """Let the peak of this process's memory begin now; returns its resident memory, in bytes."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def peak_mib(before: int) -> float:
    """Return how far the resident memory of this process has grown at its peak, in MiB."""
    return (_status("VmHWM") - before) / MIB


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def no_such() -> NotImplementedError:
    """Return the error for a figure that a library does not have."""
    return NotImplementedError("it has nothing like this")


def main(start: Callable[[int], Slot]) -> None:
    """Be the process of a library: take the figures that the command line names, and print each as a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--ranks", type=int, required=True)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    slot = start(options.ranks)
    try:
        for name in options.names:
            figure: dict[str, Any] = {"measure": row_key(name, options.ranks)}
            try:
                figure["value"] = slot.figure(name)
            except NotImplementedError as error:
                figure["error"] = str(error)
            print(json.dumps(figure), flush=True)
    finally:
        slot.stop()
    sys.stdout.flush()
