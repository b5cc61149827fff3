"""What ranks do with many bytes, of any peer: each has its own way to be asked, and to get at what another has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["WARMUP", "copies", "ends", "receive", "timed"]

WARMUP = 2


def ends(value: Any) -> float:
    """The sum of the first and the last element: whoever gives this has got the value."""
    return float(value[0]) + float(value[-1])


def timed(work: Callable[[], object], repeat: int) -> list[float]:
    """The seconds that something took, each time, after a warm-up."""
    times = []
    for _ in range(WARMUP + repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times[WARMUP:]


def copies(count: int, repeat: int) -> list[float]:
    """Copy so many float32 within this process, into memory that was used before; gives the seconds."""
    import torch

    source, used = torch.ones(count), torch.zeros(count)
    used.fill_(2)
    return timed(lambda: used.copy_(source), repeat)


def receive(read: Callable[[Any], object], count: int, repeat: int, is_fresh: bool) -> list[float]:
    """Have a tensor of so many float32 filled from elsewhere with ones, a fresh one each time or always the same."""
    import torch

    used = torch.zeros(count)
    used.fill_(2)
    kept: list[Any] = []

    def once() -> None:
        target = torch.empty(count) if is_fresh else used
        read(target)
        assert ends(target) == 2.0
        kept[:] = [target]  # what was made before is freed when there is the next, as in a program that uses it

    return timed(once, repeat)
