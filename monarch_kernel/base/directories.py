"""Directories of sessions: short enough for the paths of sockets in them, and on a disk that takes files and sockets."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile

__all__ = ["LONGEST_ROOT", "is_replaceable", "make_session_directory", "session_roots", "temporary_directory"]

_PREFIX = "monarch-"
LONGEST_ROOT = 107 - len("/monarch-12345678") - len("/R1000000+100.connections")
"""Limit in bytes for the directory in which a session has its own: Linux allows 107 for the path of a socket."""

_BLOCK = bytes(4096)


def temporary_directory() -> str:
    """Return the directory for temporary files: ``TMPDIR``, or the usual one if that does not exist or can't be written."""
    try:
        return tempfile.gettempdir()
    except OSError:  # no directory can be written
        return "/tmp"


def session_roots() -> list[str]:
    """Return the directories in which a session may have its own, the best first: those whose path is short enough.

    Directories in which other users can replace that of a session come last. They are still used if nothing else is there: in a
    container, such a directory may be the only one that can be written.
    """
    candidates = [temporary_directory(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp"]
    fitting = [path for path in dict.fromkeys(candidates) if path and len(os.fsencode(path)) <= LONGEST_ROOT]
    return sorted(fitting, key=is_replaceable)


def is_replaceable(root: str) -> bool:
    """Whether other users can replace what this user makes in a directory; then sockets there may be theirs.

    They can if it belongs to one of them, or if they may write to it and it lacks the sticky bit, which ``/tmp`` has.
    """
    try:
        found = os.stat(root)
    except OSError:  # it can't be used either
        return False
    of_others = stat.S_IWOTH if found.st_gid == os.getegid() else stat.S_IWOTH | stat.S_IWGRP
    is_shared = bool(found.st_mode & of_others) and not found.st_mode & stat.S_ISVTX
    return is_shared or found.st_uid not in (0, os.geteuid())


def make_session_directory() -> str:
    """Make a directory of mode 0700 that takes sockets and files, in the first of `session_roots` where that is possible.

    Raises:
        OSError: there is none; the text names each and says why.
    """
    reasons = []
    for root in session_roots():
        directory = ""
        try:
            directory = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
            _try(os.path.join(directory, "try"))
        except OSError as error:
            reasons.append(f"{root} ({error.strerror or error})")
            if directory:
                shutil.rmtree(directory, ignore_errors=True)
        else:
            return directory
    raise OSError(f"no directory for the sockets of a session: {', '.join(reasons)}; free space, or set TMPDIR")


def _try(path: str) -> None:
    """Bind a socket at a path, and write a file there.

    Raises:
        OSError: this is not possible.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
    os.unlink(path)
    with open(path, "wb") as file:
        file.write(_BLOCK)
    os.unlink(path)
