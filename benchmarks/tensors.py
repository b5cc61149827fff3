"""Measures distributed tensors: what an operation costs the program, and how long it takes until all ranks have done it.

``python -m benchmarks.tensors`` prints one line for each measurement: the best and the median of several rounds, and the least
CPU time of the program's process, with all its threads, which depends less on what else the machine does. The load of the
machine is printed first; ratios of two lines of one run say more than the lines.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from monarch_kernel.actor import Actor, ProcMesh, endpoint, shutdown_context, this_host
from monarch_kernel.tensor import fetch_shard, record

ROUNDS = 7


def measure(what: str, run: Callable[[], object], count: int, unit: str = "us") -> float:
    """Print the time of one of ``count`` equal parts of a function; returns the best."""
    run()
    times, cpu_times = [], []
    for _ in range(ROUNDS):
        start, cpu_start = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - start) / count)
        cpu_times.append((time.process_time() - cpu_start) / count)
    scale = {"us": 1e6, "ms": 1e3}[unit]
    best, median, cpu = min(times) * scale, statistics.median(times) * scale, min(cpu_times) * scale
    print(f"{what:58} {best:9.2f} {unit}   median {median:9.2f}   CPU {cpu:9.2f}", flush=True)
    return min(times)


class Echo(Actor):
    """Answers, for comparison with a fetch."""

    @endpoint
    def answer(self) -> float:
        return 1.0


def issue(mesh: ProcMesh, count: int) -> None:
    with mesh.activate():
        x, y, bias = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4)
    w = x.detach().requires_grad_()

    def wait() -> None:
        mesh.values(bias)

    def many(do: Callable[[], object], *, waits: bool) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                do()
            if waits:
                wait()

        return run

    wait()
    cases: dict[str, Callable[[], object]] = {
        "x + y": lambda: x + y,
        "x + 1.5": lambda: x + 1.5,
        "x.add_(y)": lambda: x.add_(y),
        "x.view(16)": lambda: x.view(16),
        "torch.addmm": lambda: torch.addmm(bias, x, y),
        "w @ y, with autograd": lambda: w @ y,
    }
    for name, do in cases.items():
        measure(f"issue {name}", many(do, waits=False), count)
        wait()
    with mesh.activate():
        measure("issue x + y, in activate()", many(cases["x + y"], waits=False), count)
    wait()
    measure("x + y, until all ranks have done it", many(cases["x + y"], waits=True), count)


def fetch(mesh: ProcMesh) -> None:
    with mesh.activate():
        x = torch.ones(())
    echo: Any = mesh.spawn("echo", Echo)
    one = echo.slice(ranks=0).answer
    call = measure("call_one of an actor", lambda: [one.call_one().get() for _ in range(200)], 200)
    there = measure("fetch_shard(x).result() of a scalar", lambda: [fetch_shard(x).result() for _ in range(200)], 200)
    print(f"  a fetch is {there / call:.2f} of a call_one")
    echo.stop().get()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(mesh: ProcMesh, hidden: int, batch: int, count: int) -> None:
    plain = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    x, y = torch.randn(batch, 64), torch.randint(0, 10, (batch,))
    model = copy.deepcopy(plain)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(mesh.put(parameter)))
    there_x, there_y = mesh.put(x), mesh.put(y)
    mine, theirs = torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD(plain.parameters(), lr=0.01)

    def local() -> None:
        for _ in range(count):
            step(plain, theirs, x, y)

    def driven() -> None:
        for _ in range(count):
            loss = step(model, mine, there_x, there_y)
        mesh.values(loss)

    shape = f"MLP 64-{hidden}-{hidden}-10, batch {batch}"
    here = measure(f"{shape}: plain torch", local, count, "ms")
    there = measure(f"{shape}: op by op on {len(mesh)} ranks", driven, count, "ms")
    print(f"  op by op is {there / here:.2f} of plain torch")
    recorded_step = record(lambda x, y: step(model, mine, x, y))

    def recorded() -> None:
        for _ in range(count):
            loss = recorded_step(there_x, there_y)
        mesh.values(loss)

    repeated = measure(f"{shape}: recorded", recorded, count, "ms")
    print(f"  recorded is {repeated / here:.2f} of plain torch")


def main() -> None:
    """Measure on some ranks of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--count", type=int, default=3000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {load}, {options.ranks} ranks")
    mesh = this_host().spawn_procs({"ranks": options.ranks}, name="bench", device="cpu")
    try:
        mesh.initialized.get()
        issue(mesh, options.count)
        fetch(mesh)
        for hidden, batch in ((64, 32), (256, 128), (512, 256)):
            train(mesh, hidden, batch, 20)
        print(f"tensors left on the ranks: {[use.tensors for use in mesh.memory().values()]}")
    finally:
        shutdown_context().get()


if __name__ == "__main__":
    main()
