"""Directories of sessions, in the one for temporary files: those whose owner has ended are removed, if nobody else has.

A session's agent removes its directory when the controller has ended. Where the agent was killed, and then the controller,
nobody is left for that, and the next session on the machine does it. Who owns a directory holds a lock on a file in it, which
ends with its process, and with those that it has forked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["left", "make_directory", "sweep"]

_PREFIX = "monarch-"
_OWNER = "owner"


def make_directory() -> tuple[Path, int]:
    """Make a session's directory; gives also the file descriptor that is to be closed when that was removed."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    fd = os.open(directory / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(directory / "new", directory / _OWNER)  # nobody finds it without the lock
    return directory, fd


def sweep() -> None:
    """Remove the directories of our sessions whose owner has ended."""
    for directory in _candidates():
        with _left(directory) as is_left:
            if is_left:
                shutil.rmtree(directory, ignore_errors=True)


def left() -> list[str]:
    """The directories of our sessions whose owner has ended; nothing is removed."""
    found = []
    for directory in _candidates():
        with _left(directory) as is_left:
            if is_left:
                found.append(directory)
    return sorted(found)


def _candidates() -> list[str]:
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        return [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    return []


@contextlib.contextmanager
def _left(directory: str) -> Iterator[bool]:
    """Whether a directory is ours, and nobody has it; it is ours alone meanwhile."""
    fd = -1
    try:
        is_left = False
        with contextlib.suppress(
            OSError
        ):  # another user's, or no session's, or it is in use, or another one was quicker
            if os.lstat(directory).st_uid == os.getuid():
                fd = os.open(os.path.join(directory, _OWNER), os.O_RDWR | os.O_NOFOLLOW)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_left = True
        yield is_left
    finally:
        if fd >= 0:
            os.close(fd)
