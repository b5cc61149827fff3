"""Checkpoints of distributed training, which can be loaded by another number of ranks or with another plan.

On all ranks of a mesh or of any torch.distributed program, or in a single process::

    from monarch_kernel import checkpoint

    checkpoint.save("runs/gpt/step-100", model=model, optimizer=optimizer, step=step)
    values = checkpoint.load(checkpoint.latest("runs/gpt"), model=model, optimizer=optimizer)
    values["step"]

Anywhere, also in the notebook::

    checkpoint.describe("runs/gpt/step-100")
    checkpoint.export("runs/gpt/step-100", "gpt.safetensors")
"""

from __future__ import annotations

from monarch_kernel.errors import CheckpointError
from monarch_kernel.train.checkpoint.atomic_directory import Contents, describe, latest
from monarch_kernel.train.checkpoint.exporting import export
from monarch_kernel.train.checkpoint.loading import load
from monarch_kernel.train.checkpoint.saving import Saving, save

__all__ = ["CheckpointError", "Contents", "Saving", "describe", "export", "latest", "load", "save"]
