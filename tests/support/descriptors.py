"""The open descriptors of this process: a difference of two sets shows a leak; a difference of two counts does not.

Some libraries close files of an earlier test late, from their own threads, so a count may fall at any moment. No library opens
files late, so each new element of the set belongs to the test.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

__all__ = ["Descriptor", "none_left", "open_descriptors"]


class Descriptor(NamedTuple):
    """A descriptor and its file; a number that was closed and opened again is a different descriptor."""

    fd: int
    link: str
    inode: int


def open_descriptors() -> frozenset[Descriptor]:
    """All descriptors that this process has open now."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed meanwhile, such as the descriptor of the listing
            found.add(Descriptor(fd, os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_ino))
    return frozenset(found)


@contextmanager
def none_left() -> Iterator[None]:
    """Context in which this process can open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    held: list[int] = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
