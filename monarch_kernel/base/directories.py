"""Directories of sessions: short enough for the paths of sockets in them, and on a disk that takes files and sockets."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile

__all__ = ["LONGEST_ROOT", "make_session_directory", "session_roots", "temporary_directory"]

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
    """Return the directories in which a session may have its own, the best first: those whose path is short enough."""
    candidates = [temporary_directory(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp"]
    return [path for path in dict.fromkeys(candidates) if path and len(os.fsencode(path)) <= LONGEST_ROOT]


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
