"""torchmonarch's tensor engine."""

# The peer is optional, so its types may be missing.

from __future__ import annotations

import time
from typing import Any

import torch
from monarch import fetch_shard
from monarch.actor import Actor, endpoint, shutdown_context, this_host
from torch import nn

from benchmarks.tensors.work import main, median_of, no_such, size_of, train

COUNT = 200
STEPS = 3


class Echo(Actor):
    """Answers."""

    @endpoint
    def answer(self) -> float:
        return 1.0


class Monarch:
    """A mesh of its processes."""

    def __init__(self, ranks: int) -> None:
        self.procs: Any = this_host().spawn_procs(per_host={"gpus": ranks})

    def figure(self, name: str) -> float:
        """Take one figure."""
        if name == "call_one":
            one = self.procs.spawn("echo", Echo).slice(gpus=0).answer
            return 1e6 * median_of(lambda: [one.call_one().get() for _ in range(COUNT)], COUNT)
        with self.procs.activate():
            return self.active(name)

    def active(self, name: str) -> float:
        """Take one figure of tensors."""
        if name == "fetch":
            x = torch.ones(())
            return 1e6 * median_of(lambda: [self.value(x) for _ in range(COUNT)], COUNT)
        if name.startswith("step_"):
            return self.step(*size_of(name))
        x, y, b = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4)
        w = torch.ones(4, 4).requires_grad_()
        operations: dict[str, Any] = {
            "issue_add": lambda: x + y,
            "issue_scalar": lambda: x + 1.5,
            "issue_inplace": lambda: x.add_(y),
            "issue_view": lambda: x.view(16),
            "issue_addmm": lambda: torch.addmm(b, x, y),
            "issue_autograd": lambda: w @ y,
            "issue_active": lambda: x + y,
        }
        if name == "until_add":
            return 1e6 * median_of(lambda: self.value([x + y for _ in range(COUNT)][-1]), COUNT)
        if name not in operations:
            raise no_such()
        do = operations[name]
        found = 1e6 * median_of(lambda: [do() for _ in range(COUNT)], COUNT, time.process_time)
        self.value(x)
        return found

    def value(self, tensor: Any) -> Any:
        """Fetch a value."""
        return fetch_shard(tensor).result()

    def step(self, width: int, batch: int) -> float:
        """Train."""
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        x, y = torch.randn(batch, 64), torch.randint(0, 10, (batch,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return 1e3 * median_of(lambda: self.value([train(model, optimizer, x, y) for _ in range(STEPS)][-1]), STEPS)

    def stop(self) -> None:
        """End the processes."""
        shutdown_context().get()


if __name__ == "__main__":
    main(Monarch)
