"""Plain torch in one process: the limit for all that drives ranks from outside."""

from __future__ import annotations

import torch

from benchmarks.tensors.work import WIDE, data, main, median_of, mlp, no_such, size_of, train

STEPS = 20


class Plain:
    """Trains in this process."""

    def __init__(self, ranks: int) -> None:
        pass

    def figure(self, name: str) -> float:
        """Take one figure."""
        if name == "matmul":
            x, w = torch.ones(WIDE, WIDE), torch.ones(WIDE, WIDE)
            return 1e3 * median_of(lambda: (x @ w).sum().item(), 1)
        if name.startswith("step_"):
            width, batch = size_of(name)
            model, (x, y) = mlp(width), data(batch)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            return 1e3 * median_of(lambda: [train(model, optimizer, x, y) for _ in range(STEPS)][-1].item(), STEPS)
        raise no_such()

    def stop(self) -> None:
        """End nothing."""


if __name__ == "__main__":
    main(Plain)
