"""Measure the overhead of `fit`: a trivial training from call to return, on a mesh and with Lightning's own launchers.

Usage::

    python -m benchmarks.lightning [--ranks 2] [--rounds 5]

The training has one batch, without checkpoints, logs and progress bars. Each `fit` has a new Trainer, since Lightning's
launchers refuse a second one. The mesh is up before; its start is printed separately. Numbers are seconds, of the first `fit`
and of the later ones.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from monarch_kernel.actor import shutdown_context, this_host
from monarch_kernel.integrations.lightning import MonarchStrategy

__all__ = ["main"]


class Net(L.LightningModule):
    """A minimal model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        loss: torch.Tensor = self.layer(x).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_s(strategy: Callable[[], Any], ranks: int, rounds: int) -> list[float]:
    """Train this many times; gives the seconds of each."""
    data = DataLoader(TensorDataset(torch.randn(4 * ranks, 4)), batch_size=4)
    took = []
    for _ in range(rounds):
        trainer = L.Trainer(
            strategy=strategy(),
            devices=ranks,
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        began = time.perf_counter()
        trainer.fit(Net(), data)
        took.append(time.perf_counter() - began)
    return took


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure the overhead of fit.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    took = {name: fit_s(partial(str, name), options.ranks, options.rounds) for name in ("ddp_notebook", "ddp_spawn")}
    began = time.perf_counter()
    mesh = this_host().spawn_procs({"gpus": options.ranks}, device="cpu", name="t")
    mesh.initialized.get()
    up_s = time.perf_counter() - began
    try:
        took["monarch"] = fit_s(partial(MonarchStrategy, mesh), options.ranks, options.rounds)
    finally:
        shutdown_context().get()
    print(f"lightning {L.__version__}, torch {torch.__version__}, {options.ranks} ranks; mesh up in {up_s:.2f} s")
    for name, (first, *later) in took.items():
        print(
            f"{name:13} first {first:6.2f}   later, median {statistics.median(later):6.2f} "
            f"({min(later):.2f} to {max(later):.2f})"
        )


if __name__ == "__main__":
    main()
