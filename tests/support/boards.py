"""Reads what TensorBoard shows of a log directory."""

from __future__ import annotations

from pathlib import Path


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The steps and values of a tag, as TensorBoard shows them; empty if there are none yet."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.is_dir():
        return []
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return [(each.step, each.value) for each in read.Scalars(tag)] if tag in read.Tags()["scalars"] else []
