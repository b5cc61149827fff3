"""Each rank does something, and all know how it went: what fails on one is an error on all, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from monarch_kernel.errors import CheckpointError, format_ranks

__all__ = ["group_here", "together"]

T = TypeVar("T")


def group_here() -> dist.ProcessGroup | None:
    """The group of all ranks; None where this process is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


def together(group: dist.ProcessGroup | None, what: str, do: Callable[[], T]) -> tuple[T, list[Any]]:
    """Have each rank do something.

    Args:
        group: of all ranks; None for one alone.
        what: in words, for errors.
        do: gives something small that can be pickled, or something that stays here.

    Returns:
        What it gave here, and what it gave on each rank, as far as that can travel.

    Raises:
        Exception: what was raised here.
        CheckpointError: what was raised elsewhere.
    """
    if group is None:
        done = do()
        return done, [done]
    error: Exception | None = None
    result: Any = None
    try:
        result = do()
    except Exception as caught:  # is raised below, when the others know of it
        error = caught
    told: list[Any] = [None] * group.size()
    travels = result if isinstance(result, (tuple, type(None))) or hasattr(result, "__fspath__") else None
    dist.all_gather_object(told, (None if error is None else f"{type(error).__name__}: {error}", travels), group=group)
    if error is not None:
        raise error
    failed = {rank: text for rank, (text, _) in enumerate(told) if text is not None}
    if failed:
        raise CheckpointError(f"{what}: on {format_ranks(failed)}: {next(iter(failed.values()))}")
    return result, [each for _, each in told]
