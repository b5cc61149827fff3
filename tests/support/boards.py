"""What TensorBoard reads of what was written for it."""

from __future__ import annotations

from pathlib import Path


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Steps and values under a name, as TensorBoard shows them; empty if there are none yet."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.is_dir():
        return []
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return [(each.step, each.value) for each in read.Scalars(tag)] if tag in read.Tags()["scalars"] else []
