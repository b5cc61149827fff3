"""Numbers of requests, actors and ports. A number contains the process that made it, so that no return address travels.

From the top: 20 bits for the number of the process (`proc`) that made it, 0 for the controller; 12 bits for how many processes
had this number before it (the *incarnation* of a rank, the *epoch* of a controller); 32 bits for a counter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

__all__ = ["CONTROLLER_PROC", "first_number", "numbers", "origin_of"]

CONTROLLER_PROC = 0
"""The number of the controller's own process."""

_PROC_SHIFT = 44
_EPOCH_SHIFT = 32


def first_number(epoch: int, proc: int = CONTROLLER_PROC) -> int:
    """The first number of a process; ``epoch`` counts from 0, and is the incarnation of a rank."""
    return (proc << _PROC_SHIFT) | (epoch << _EPOCH_SHIFT) | 1


def numbers(epoch: int, proc: int = CONTROLLER_PROC) -> Iterator[int]:
    """The numbers of a process, in order; arguments as for `first_number`."""
    return itertools.count(first_number(epoch, proc))


def origin_of(number: int) -> int:
    """The process that made a number."""
    return number >> _PROC_SHIFT
