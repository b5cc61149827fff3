"""Checkpoints of distributed training, which can be loaded by another number of ranks or with another plan.

On all ranks of a mesh or of any torch.distributed program, or in a single process::

    from monarch_kernel import checkpoint

    checkpoint.save("runs/gpt/step-100", model=model, optimizer=optimizer, step=step)
    values = checkpoint.load(checkpoint.latest("runs/gpt"), model=model, optimizer=optimizer)
    values["step"]

State that differs by rank, such as that of random number generators (`rng`), comes back on its rank.

In a program that drives ranks, ``save`` and ``load`` take modules, optimizers and dicts of its distributed tensors.

Anywhere, also in the notebook::

    checkpoint.describe("runs/gpt/step-100")
    checkpoint.verify("runs/gpt/step-100")
    checkpoint.export("runs/gpt/step-100", "gpt.safetensors")
"""

from __future__ import annotations

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train.checkpoint.atomic_directory import Contents, describe, latest
from monarch_kernel.train.checkpoint.exporting import export
from monarch_kernel.train.checkpoint.from_program import load, save
from monarch_kernel.train.checkpoint.loading import verify
from monarch_kernel.train.checkpoint.sampler import Loader, Sampler
from monarch_kernel.train.checkpoint.saving import Saving
from monarch_kernel.train.generators import rng

__all__ = [
    "CheckpointError",
    "Contents",
    "Loader",
    "Sampler",
    "Saving",
    "describe",
    "export",
    "latest",
    "load",
    "rng",
    "save",
    "verify",
]
