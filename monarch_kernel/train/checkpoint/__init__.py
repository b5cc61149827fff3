"""Checkpoints: what is trained on many ranks, on disk, to go on with by other numbers of ranks or another plan.

On all ranks of a mesh, or of any program of torch.distributed, or in one process::

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
