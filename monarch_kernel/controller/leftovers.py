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
from pathlib import Path

__all__ = ["make_directory", "sweep"]

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
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                _remove_left(entry.path)


def _remove_left(directory: str) -> None:
    """Remove a directory if it is ours, and nobody has it."""
    with contextlib.suppress(OSError):  # another user's, or no session's, or it is in use, or another one was quicker
        if os.lstat(directory).st_uid != os.getuid():
            return
        fd = os.open(os.path.join(directory, _OWNER), os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(fd)
