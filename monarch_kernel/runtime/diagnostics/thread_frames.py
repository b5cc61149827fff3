"""Reads the frames of a thread; those of another thread at one moment.

The frames of a thread may be followed only while the thread can't run. A loop in Python over ``f_back`` gives up the GIL now
and then, and CPython 3.11 has then returned objects of other kinds in place of frames. So all frames are read in one chain of
calls of C functions, between which the GIL is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter, itemgetter
from types import CodeType, FrameType
from typing import Any

__all__ = ["callers_of", "frames_of", "lines_of"]

_FIRST_GUESS = 32
_DEPTHS = (8, 32, 128)


def callers_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame of the calling thread, and those of its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(thread: int, most: int) -> list[FrameType]:
    """Return the frames of a thread, the innermost first; none if it has ended or has not started.

    The thread goes on afterwards, so that a frame may be at another line than it was, or be over.

    Args:
        thread: identifier of the thread.
        most: how many frames to read, from the innermost one.
    """
    return [frame for frame in _deepest(thread, most, _frames) if frame is not None]


def lines_of(thread: int, is_wanted: Callable[[CodeType], bool]) -> Iterator[tuple[CodeType, int | None]]:
    """Yield code and line of the innermost 128 frames of a thread whose code is wanted, the innermost first.

    It reads a few frames, and more of them only if the caller asks for more than these have. Lines are those of one moment.

    Args:
        thread: identifier of the thread.
        is_wanted: says whether code is wanted.
    """
    known = 0
    for depth in _DEPTHS:
        found = _deepest(thread, depth, _lines)
        yield from (each for each in found[known:] if is_wanted(each[0]))
        if len(found) < depth:
            return
        known = depth


def _deepest(thread: int, most: int, read: Callable[[int, int], list[Any]]) -> list[Any]:
    """Read as many frames of a thread as it has, up to a number, by guesses of how many these are."""
    found = read(thread, 0)
    callers, limit, step = 0, most - 1, _FIRST_GUESS  # how many callers were read, and how many there may be at most
    while found and found[-1] is not None and callers < limit:
        more = min(limit, callers + step)
        if deeper := read(thread, more):
            found, callers, step = deeper, more, 2 * step
        else:
            limit = more - 1
            step = (limit - callers + 1) // 2
    return found


def _frames(thread: int, callers: int) -> list[FrameType | None]:
    """Read the innermost frame of a thread, and this number of callers.

    Returns:
        The frames. None follows the outermost one. An empty list if there are not so many, or no such thread.
    """
    innermost = _looks_at(thread)
    try:
        if not callers:
            return [next(innermost)]
        frame, found = next(zip(innermost, map(_callers(callers), innermost)))
    except (AttributeError, KeyError):
        return []
    return [frame, *found[:-1]]


def _lines(thread: int, callers: int) -> list[tuple[CodeType, int | None]]:
    """Read code and line of the innermost frame of a thread, and of this number of callers; empty as above."""
    try:
        found = next(map(_codes_and_lines(callers), _looks_at(thread)))
    except (AttributeError, KeyError):
        return []
    return list(zip(found[::2], found[1::2]))


def _looks_at(thread: int) -> Iterator[FrameType]:
    """Yield the innermost frame of a thread as it is at each moment."""
    return map(itemgetter(thread), iter(sys._current_frames, None))


@cache
def _callers(callers: int) -> Callable[[FrameType], tuple[FrameType | None, ...]]:
    names = ["f_back" + ".f_back" * at for at in range(callers)]
    return attrgetter(*names, names[-1])  # always a tuple; the last caller occurs twice


@cache
def _codes_and_lines(callers: int) -> Callable[[FrameType], tuple[Any, ...]]:
    of = ["f_back." * at for at in range(callers + 1)]
    return attrgetter(*(each + name for each in of for name in ("f_code", "f_lineno")))
