"""Distributed tensors of this package: the program is the controller."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.tensors.work import AXES, PLAN, WIDE, data, main, median_of, mlp, no_such, size_of, train
from monarch_kernel.actor import Actor, ProcMesh, endpoint, shutdown_context, this_host
from monarch_kernel.tensor import Shard, fetch_shard, record

COUNT = 3000
FETCHES = 200
STEPS = 20

CELL_SETUP = """
from benchmarks.tensors.work import data, mlp, train
import torch
model, (x, y) = mlp(256), data(128)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
PEAK = "from benchmarks.tensors.work import peak_mib, reset_peak"


class Echo(Actor):
    """Answers, for comparison with a fetch."""

    @endpoint
    def answer(self) -> float:
        return 1.0


class Ours:
    """A mesh on this machine."""

    def __init__(self, ranks: int) -> None:
        shape = AXES if ranks == 4 else {"ranks": ranks}
        self.mesh: ProcMesh = this_host().spawn_procs(shape, name="bench", device="cpu")
        self.mesh.initialized.get()

    def figure(self, name: str) -> float:
        """Take one figure."""
        if name.startswith("issue_") or name == "until_add":
            return self.issue(name)
        if name == "call_one":
            echo: Any = self.mesh.spawn("echo", Echo)
            one = echo.slice(ranks=0).answer
            found = 1e6 * median_of(lambda: [one.call_one().get() for _ in range(FETCHES)], FETCHES)
            echo.stop().get()
            return found
        if name == "fetch":
            with self.mesh.activate():
                scalar = torch.ones(())
            return 1e6 * median_of(lambda: [fetch_shard(scalar).result() for _ in range(FETCHES)], FETCHES)
        if name.startswith("step_"):
            step, x, y = self.driven(*size_of(name))
            return 1e3 * median_of(lambda: self.mesh.values([step(x, y) for _ in range(STEPS)][-1]), STEPS)
        if name == "recorded":
            step, x, y = self.driven(256, 128)
            repeated = record(step)
            return 1e3 * median_of(lambda: [self.mesh.values(repeated(x, y)) for _ in range(STEPS)], STEPS)
        if name == "cell":
            self.mesh.run(CELL_SETUP).get()
            code = "train(model, optimizer, x, y).item()"
            return 1e3 * median_of(lambda: [self.mesh.run(code).get() for _ in range(STEPS)], STEPS)
        if name == "left":
            return float(max(use.tensors for use in self.mesh.memory().values()))
        return self.sharded(name)

    def issue(self, name: str) -> float:
        """Issue operations on small tensors."""
        with self.mesh.activate():
            x, y, b = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4)
        w = x.detach().requires_grad_()
        operations: dict[str, Callable[[], Any]] = {
            "issue_add": lambda: x + y,
            "issue_scalar": lambda: x + 1.5,
            "issue_inplace": lambda: x.add_(y),
            "issue_view": lambda: x.view(16),
            "issue_addmm": lambda: torch.addmm(b, x, y),
            "issue_autograd": lambda: w @ y,
            "issue_active": lambda: x + y,
            "until_add": lambda: x + y,
        }
        do = operations[name]
        is_awaited = name == "until_add"

        def run() -> None:
            for _ in range(COUNT):
                do()
            if is_awaited:
                self.mesh.values(b)

        if name == "issue_active":
            with self.mesh.activate():
                found = self.cost_of(run, b)
        else:
            found = 1e6 * median_of(run, COUNT) if is_awaited else self.cost_of(run, b)
        return found

    def cost_of(self, run: Callable[[], None], last: torch.Tensor) -> float:
        """Return the processor time that the program spends on each operation, in us; ranks are idle before."""
        times = []
        for _ in range(8):
            self.mesh.values(last)
            begin = time.process_time()
            run()
            times.append((time.process_time() - begin) / COUNT)
        return 1e6 * sorted(times[1:])[len(times[1:]) // 2]

    def driven(self, width: int, batch: int) -> tuple[Callable[[Any, Any], Any], Any, Any]:
        """Make a function that trains a step on all ranks, and its arguments: each rank has the whole batch."""
        model = copy.deepcopy(mlp(width))
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(self.mesh.put(parameter.detach())))
        x, y = (self.mesh.put(value) for value in data(batch))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return lambda x, y: train(model, optimizer, x, y), x, y

    def stepper(self, kind: Any, width: int = 512) -> Callable[[], Any]:
        """Make a function that trains a step of the sharded model."""
        model = self.mesh.distribute(mlp(width), {name: {"tp": Shard(dim)} for name, dim in PLAN.items()})
        x, y = (self.mesh.shard(value, dp=Shard(0)) for value in data(256))
        optimizer = kind(model.parameters(), lr=0.01)
        return lambda: train(model, optimizer, x, y)

    def sharded(self, name: str) -> float:
        """Take a figure of sharded tensors."""
        if name == "first":
            step = self.stepper(torch.optim.AdamW)
            self.mesh.run("pass").get()
            begin = time.perf_counter()
            step().item()
            return time.perf_counter() - begin
        if name == "matmul":
            x = self.mesh.flatten("ranks").shard(torch.ones(WIDE, WIDE), ranks=Shard(0))
            w = self.mesh.flatten("ranks").shard(torch.ones(WIDE, WIDE))
            return 1e3 * median_of(lambda: (x @ w).sum().item(), 1)
        if name == "peak":
            self.mesh.run(PEAK + "; before = reset_peak()").get()
            step = self.stepper(torch.optim.AdamW, 3072)
            for _ in range(3):
                step().item()
            found = self.mesh.run_cell("peak_mib(before)", want_value=True).get().values()
            return float(next(iter(found)).value)
        kinds = {"sharded_sgd": torch.optim.SGD, "sharded_adamw": torch.optim.AdamW}
        if name not in kinds:
            raise no_such()
        step = self.stepper(kinds[name])
        return 1e3 * median_of(lambda: [step() for _ in range(10)][-1].item(), 10)

    def stop(self) -> None:
        """End the mesh."""
        shutdown_context().get()


if __name__ == "__main__":
    main(Ours)
