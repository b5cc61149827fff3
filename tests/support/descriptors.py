"""What this process has open: the difference of two sets of descriptors shows a leak, the difference of two counts does not.

Libraries close some files of an earlier test late and from threads of their own, so a count may fall at any moment. Nothing
opens a file late, so each new element of the set belongs to the test.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

__all__ = ["Descriptor", "open_descriptors"]


class Descriptor(NamedTuple):
    """One descriptor, and the file that it refers to: one that is closed and opened again is another."""

    fd: int
    link: str
    inode: int


def open_descriptors() -> frozenset[Descriptor]:
    """Everything that this process has open now."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # closed meanwhile, as the one that lists them is
            found.add(Descriptor(fd, os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_ino))
    return frozenset(found)
