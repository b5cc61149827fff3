"""Runs a function on all ranks of a process group, and raises on all ranks if it fails on any, so that no rank hangs.

For code of this package that runs on all ranks, in a process group of torch.distributed, or in a single process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_kernel.errors import MonarchError, format_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["run_on_all_ranks"]

T = TypeVar("T")


def run_on_all_ranks(group: ProcessGroup | None, what: str, do: Callable[[], T], error: type[MonarchError]) -> list[T]:
    """Run a function on each rank; collective.

    Args:
        group: group of the ranks; None for a single process.
        what: description of the operation, for the error on ranks where it did not fail.
        do: the function; returns a small value, which is pickled.
        error: type of the error on ranks where it did not fail.

    Returns:
        The results of all ranks, by rank.

    Raises:
        Exception: the function raised it on this rank.
        MonarchError: an ``error``: the function raised on another rank.
    """
    if group is None:
        return [do()]
    import torch.distributed as dist

    failure: Exception | None = None
    result: Any = None
    try:
        result = do()
    except Exception as caught:  # raised below, once the other ranks know of it
        failure = caught
    outcomes: list[Any] = [None] * group.size()
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(outcomes, (text, result), group=group)
    if failure is not None:
        raise failure
    failed = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
    if failed:
        raise error(f"{what}: on {format_ranks(failed)}: {next(iter(failed.values()))}")
    return [each for _, each in outcomes]
