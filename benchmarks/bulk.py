"""Bulk operations of ranks that all peers share; each peer has its own way to call a rank, and to access another's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["WARMUP", "copies", "ends", "receive", "timed"]

WARMUP = 2


def ends(value: Any) -> float:
    """The sum of the first and the last element, which proves that the caller has received the value."""
    return float(value[0]) + float(value[-1])


def timed(work: Callable[[], object], repeat: int) -> list[float]:
    """Time some work after a warm-up; gives the seconds of each repetition."""
    times = []
    for _ in range(WARMUP + repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times[WARMUP:]


def copies(count: int, repeat: int) -> list[float]:
    """Copy this many float32 values within this process, into memory that was used before; gives the seconds of each copy."""
    import torch

    source, used = torch.ones(count), torch.zeros(count)
    used.fill_(2)
    return timed(lambda: used.copy_(source), repeat)


def receive(read: Callable[[Any], object], count: int, repeat: int, is_fresh: bool) -> list[float]:
    """Fill a tensor of this many float32 values with ones from elsewhere, each time a new tensor or always the same."""
    import torch

    used = torch.zeros(count)
    used.fill_(2)
    kept: list[Any] = []

    def once() -> None:
        target = torch.empty(count) if is_fresh else used
        read(target)
        assert ends(target) == 2.0
        kept[:] = [target]  # frees the previous tensor only now, as a program that uses it would

    return timed(once, repeat)
