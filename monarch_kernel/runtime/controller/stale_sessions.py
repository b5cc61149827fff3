"""Session directories in the directory for temporary files; removes those whose owner has ended, if nothing else has.

A session's agent removes its directory when the controller has ended. If the agent was killed, and then the controller,
the next session on the machine removes it. The owner of a directory holds a lock on a file in it. The lock ends with the
owner's process and its forks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from monarch_kernel.base.directories import make_session_directory, session_roots

__all__ = ["left", "make_directory", "sweep"]

_PREFIX = "monarch-"
_OWNER = "owner"


def make_directory() -> tuple[Path, int]:
    """Make a session's directory; also returns the file descriptor to close once the directory is removed.

    Raises:
        OSError: there is no place for it.
    """
    directory = Path(make_session_directory())
    fd = os.open(directory / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(directory / "new", directory / _OWNER)  # another session never finds it without the lock
    return directory, fd


def sweep() -> None:
    """Remove the directories of this user's sessions whose owner has ended."""
    for directory in _candidates():
        with _left(directory) as is_left:
            if is_left:
                shutil.rmtree(directory, ignore_errors=True)


def left() -> list[str]:
    """List the directories of this user's sessions whose owner has ended; removes nothing."""
    found = []
    for directory in _candidates():
        with _left(directory) as is_left:
            if is_left:
                found.append(directory)
    return sorted(found)


def _candidates() -> list[str]:
    found: list[str] = []
    for root in session_roots():
        with contextlib.suppress(OSError), os.scandir(root) as entries:
            found += [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    return found


@contextlib.contextmanager
def _left(directory: str) -> Iterator[bool]:
    """Whether a directory belongs to this user and has no owner; the lock is held meanwhile."""
    fd = -1
    try:
        is_left = False
        with contextlib.suppress(
            OSError
        ):  # it is another user's, or of no session, or in use, or another process was quicker
            if os.lstat(directory).st_uid == os.getuid():
                fd = os.open(os.path.join(directory, _OWNER), os.O_RDWR | os.O_NOFOLLOW)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_left = True
        yield is_left
    finally:
        if fd >= 0:
            os.close(fd)
