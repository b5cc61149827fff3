"""The user's own modules that a process has imported: path and hash of each."""

from __future__ import annotations

import os
import site
import stat
import sys
from hashlib import blake2b
from pathlib import Path
from sysconfig import get_paths

__all__ = ["FileBook", "hash_of_text", "read_module"]

_LARGEST = 4 << 20  # bytes of a module


def hash_of_text(text: str | bytes) -> str:
    """Return a hash of 32 hexadecimal digits."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")
    return blake2b(data, digest_size=16).hexdigest()


def read_module(path: str) -> bytes:
    """Read a module that a rank has named; empty if there is none here, or it is no file, or a large one."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # which does not wait for a pipe
    except (OSError, ValueError):
        return b""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            return b""
        with open(file, "rb", closefd=False) as source:
            return source.read(_LARGEST)
    except OSError:
        return b""
    finally:
        os.close(file)


class FileBook:
    """Finds modules that were imported, or whose files have changed, since the last look."""

    def __init__(self) -> None:
        paths = get_paths()
        given = [
            paths["stdlib"],
            paths["purelib"],
            paths["platlib"],
            *site.getsitepackages(),
            site.getusersitepackages(),
        ]
        here = Path(__file__).resolve().parents[2]  # this package, which may be installed in place
        self._theirs = tuple(f"{os.path.realpath(each)}{os.sep}" for each in [*given, str(here)])
        self._known: dict[str, tuple[int, int]] = {}
        self._looked: set[str] = set()  # names of modules that are none of the user's

    def forget(self) -> None:
        """Find all files again at the next look, for another record."""
        self._known.clear()

    def news(self) -> dict[str, str]:
        """Return path -> hash of the files that are new or have changed; a file that can't be read is left out."""
        found: dict[str, str] = {}
        for name, module in list(sys.modules.items()):
            if name in self._looked:
                continue
            path = getattr(module, "__file__", None)
            if not isinstance(path, str) or not path.endswith(".py") or self._is_theirs(path):
                self._looked.add(name)
                continue
            try:
                status = os.stat(path)
                stamp = status.st_mtime_ns, status.st_size
                if self._known.get(path) != stamp and status.st_size <= _LARGEST:
                    found[path] = hash_of_text(Path(path).read_bytes())
                    self._known[path] = stamp
            except OSError:
                continue
        return found

    def _is_theirs(self, path: str) -> bool:
        return path.startswith(self._theirs) or os.path.realpath(path).startswith(self._theirs)
