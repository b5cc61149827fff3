"""Says why files of a checkpoint could not be written or read: which file, and what to do; libraries bury that in a chain."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from monarch_kernel.base.steady_text import without_gloo_place

__all__ = ["Why", "why"]

_MAX_CHAIN = 20
_MAX_TEXT = 500
_CUT_SHORT = re.compile(
    r"file write failed|unexpected pos \d+ vs|enforce fail at inline_container|iostream error|basic_ios::clear",
    re.IGNORECASE,
)
"""Matches what torch says when a disk fills up while it writes a file: its writer notes only that bytes are missing."""


class Why(NamedTuple):
    """Why a file could not be written or read.

    Attributes:
        text: the file and the reason, in a few words.
        remedy: what to do, as a sentence without its full stop; empty if that is not known.
    """

    text: str
    remedy: str = ""


def why(error: BaseException) -> Why:
    """Explain an error by the first failure of the operating system in its chain; by its own text if there is none."""
    chain = list(_chain(error))
    for each in chain:
        if isinstance(each, OSError) and each.errno is not None:
            return _of_system(each)
    if any(isinstance(each, RuntimeError) and _CUT_SHORT.search(str(each)) for each in chain):
        return Why(
            "a file could not be written to its end, as on a full disk",
            "Remove older checkpoints or other files, or save elsewhere",
        )
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return Why(f"{type(error).__name__}: {without_gloo_place(lines[0][:_MAX_TEXT])}".removesuffix(": "))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those to which it is chained, the nearest first."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen and len(seen) < _MAX_CHAIN:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _of_system(error: OSError) -> Why:
    file = error.filename if isinstance(error.filename, (str, bytes)) else ""
    path = Path(os.fsdecode(file)) if file else None
    where = f" in {_existing(path)}" if path is not None else ""
    kind = type(error).__name__
    code = error.errno
    if code in (errno.ENOSPC, errno.EDQUOT):
        limit = "the quota of the disk is exceeded" if code == errno.EDQUOT else "no space is left on the disk"
        return Why(f"{limit}{where} ({kind})", "Remove older checkpoints or other files, or save elsewhere")
    if code in (errno.EACCES, errno.EPERM):
        return Why(
            f"there is no permission{where} ({kind})", "Change the permissions of the directory, or use another path"
        )
    if code == errno.EROFS:
        return Why(f"the file system is read-only{where} ({kind})", "Use another path")
    if code == errno.ENOTDIR and path is not None:
        return Why(f"{_existing(path)} is a file, not a directory ({kind})", "Use another path")
    if code == errno.ENOENT and path is not None:
        return Why(f"{path} does not exist ({kind})", "Check the path, and that no other program removes files there")
    if code == errno.ENAMETOOLONG:
        return Why(f"a name in the path is too long ({kind})", "Use a shorter path")
    if code in (errno.EMFILE, errno.ENFILE):
        return Why(f"too many files are open ({kind})", "Raise the limit (ulimit -n) where Jupyter starts")
    if code in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
        return Why(
            f"the disk or the network file system fails{where} ({kind}: {error.strerror})",
            "Check it, or save elsewhere",
        )
    return Why(f"{kind}: {error}"[:_MAX_TEXT])


def _existing(path: Path) -> Path:
    """Return the nearest place above a path that exists and that this process can see."""
    for place in (path, *path.parents):
        try:
            if place.exists():
                return place
        except OSError:  # no permission, or a part of the path is a file
            continue
    return path
