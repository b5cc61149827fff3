"""Each rank does something, and all know how it went: what fails on one is an error on all, and nobody waits for it.

For code of ours that runs on all ranks, in a process group of torch.distributed, or in one process alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_kernel.errors import MonarchError, format_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["together"]

T = TypeVar("T")


def together(group: ProcessGroup | None, what: str, do: Callable[[], T], error: type[MonarchError]) -> list[T]:
    """Have each rank do something; collective.

    Args:
        group: of the ranks; None for one alone.
        what: that is, in words, for those on which it did not fail.
        do: gives something small, which is pickled.
        error: what is raised where it did not fail.

    Returns:
        The results of all, by rank.

    Raises:
        Exception: what was raised here.
        MonarchError: an ``error``, for what was raised elsewhere.
    """
    if group is None:
        return [do()]
    import torch.distributed as dist

    failure: Exception | None = None
    result: Any = None
    try:
        result = do()
    except Exception as caught:  # is raised below, when the others know of it
        failure = caught
    told: list[Any] = [None] * group.size()
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(told, (text, result), group=group)
    if failure is not None:
        raise failure
    failed = {rank: text for rank, (text, _) in enumerate(told) if text is not None}
    if failed:
        raise error(f"{what}: on {format_ranks(failed)}: {next(iter(failed.values()))}")
    return [each for _, each in told]
