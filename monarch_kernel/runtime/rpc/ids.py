"""Numbers of requests, actors and ports: they say which process has made them, so that no return address travels.

From the top: 20 bits of the place (`proc`) of the process that made it, 0 for the controller; 12 bits that count the processes
which have had that place before it (the *incarnation* of a rank, the *epoch* of a controller); 32 bits that count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

__all__ = ["CONTROLLER_PROC", "first_number", "made_by", "numbers"]

CONTROLLER_PROC = 0
"""The place of the controller's own process."""

_PROC_SHIFT = 44
_LIFE_SHIFT = 32


def first_number(life: int, proc: int = CONTROLLER_PROC) -> int:
    """Where the numbers of a process begin that is the ``life``-th, counted from 0, at its place."""
    return (proc << _PROC_SHIFT) | (life << _LIFE_SHIFT) | 1


def numbers(life: int, proc: int = CONTROLLER_PROC) -> Iterator[int]:
    """The numbers of such a process, in order."""
    return itertools.count(first_number(life, proc))


def made_by(number: int) -> int:
    """The place of the process that has made a number."""
    return number >> _PROC_SHIFT
