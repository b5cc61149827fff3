"""Writes a checkpoint directory atomically: it exists either completely or not at all.

Theory of operation. A save writes the directory under a temporary name beside its final path, and renames it once all ranks are
done and all data is on disk. It first renames an existing checkpoint at this path, and removes it afterwards: a crash in
between leaves the old checkpoint under its temporary name, where `resolve` finds it. The next save to the same path removes
what a failed save has left.

The directory contains the files of `torch.distributed.checkpoint`; ``values.pt``, the plain values; and ``monarch.json``,
written last, with a list of the contents.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.errors import CheckpointError

__all__ = ["VALUES", "Contents", "begin", "describe", "finish", "latest", "resolve"]

VERSION = 1
VALUES = "values.pt"
_CONTENTS = "monarch.json"
_SAVING, _LAST = "saving", "last"
_MAX_SHOWN = 12
_ATTEMPTS = 10


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        path: path of the checkpoint.
        names: name of a saved object -> ``module``, ``optimizer``, ``state`` or ``value``.
        tensors: full name -> shape and dtype of the whole tensor.
        nbytes: size on disk.
        ranks: number of ranks that wrote it.
        saved_s: time of the save, in seconds since 1970.
        torch: version of torch that wrote it.
    """

    path: Path
    names: Mapping[str, str]
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    nbytes: int
    ranks: int
    saved_s: float
    torch: str

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.saved_s))
        lines = [
            f"{self.path}: {format_nbytes(self.nbytes)}, saved {when} by {self.ranks} rank{'s' * (self.ranks > 1)} "
            f"with torch {self.torch}"
        ]
        for name, kind in self.names.items():
            own = [(full, *self.tensors[full]) for full in self.tensors if full.startswith(f"{name}.")]
            lines.append(f"  {name} ({kind}){f': {len(own):,} tensors' if own else ''}")
            if kind == "module":
                lines += [
                    f"    {full.partition('.')[2]} {dtype}{list(shape)}" for full, shape, dtype in own[:_MAX_SHOWN]
                ]
                lines += [f"    and {len(own) - _MAX_SHOWN:,} more"] if len(own) > _MAX_SHOWN else []
        return "\n".join(lines)


def begin(path: Path) -> Path:
    """Create the temporary directory for a checkpoint that is being written.

    Raises:
        CheckpointError: the path exists, and is not a checkpoint.
    """
    if path.exists() and not (path / _CONTENTS).is_file():
        inner = "a directory that is not a checkpoint" if path.is_dir() else "a file"
        raise CheckpointError(
            f"{path} is {inner}, and a checkpoint would replace it: use another path, such as {path / 'step-1'}"
        )
    _remove_remains(path)
    making = path.parent / f".{path.name}.{_SAVING}-{secrets.token_hex(4)}"
    making.mkdir(parents=True)
    return making


def finish(making: Path, path: Path, contents: Mapping[str, Any]) -> None:
    """Move a complete checkpoint to its path, replacing the previous one.

    Raises:
        OSError: it can't be written; then the previous one stays.
    """
    about = making / _CONTENTS
    with about.open("w") as file:
        json.dump({"version": VERSION, "saved_s": time.time(), **contents}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(making)
    last = path.parent / f".{path.name}.{_LAST}-{secrets.token_hex(4)}"
    if path.exists():
        path.rename(last)
    try:
        making.rename(path)
    except OSError:
        if last.exists():
            last.rename(path)
        raise
    _sync(path.parent)
    shutil.rmtree(last, ignore_errors=True)


def _remove_remains(path: Path) -> None:
    """Remove what failed saves to this path have left."""
    for left in path.parent.glob(f".{escape(path.name)}.{_SAVING}-*"):
        shutil.rmtree(left, ignore_errors=True)
    if path.exists():
        for left in path.parent.glob(f".{escape(path.name)}.{_LAST}-*"):
            shutil.rmtree(left, ignore_errors=True)


def resolve(path: str | os.PathLike[str]) -> Path:
    """Find a complete checkpoint.

    Raises:
        CheckpointError: there is no complete checkpoint at this path.
    """
    wanted = Path(path).absolute()
    found = _find(wanted)
    if found is not None:
        return found
    if not wanted.exists():
        began = any(wanted.parent.glob(f".{escape(wanted.name)}.{_SAVING}-*"))
        more = "a save to it has not finished" if began else _beside(wanted)
        raise CheckpointError(f"there is no checkpoint at {wanted}; {more}")
    inner = latest(wanted) if wanted.is_dir() else None
    more = f"the newest in it is {inner}" if inner is not None else "it has no monarch.json, which is written last"
    raise CheckpointError(f"{wanted} is not a complete checkpoint of monarch_kernel; {more}")


def _find(wanted: Path) -> Path | None:
    """Find a complete checkpoint; None if there is none.

    A save renames the existing checkpoint before it moves its own to the path. In between, this function finds the existing
    checkpoint under its temporary name, or, if the save was quicker, the new one at the path.
    """

    def places() -> Iterator[Path]:
        yield wanted
        yield from sorted(wanted.parent.glob(f".{escape(wanted.name)}.{_LAST}-*"))
        yield wanted

    return next((place for place in places() if (place / _CONTENTS).is_file()), None)


def _beside(wanted: Path) -> str:
    if not wanted.parent.is_dir():
        return f"there is no directory {wanted.parent}"
    others = [each.name for each in _complete(wanted.parent)]
    return f"in {wanted.parent} there is {', '.join(sorted(others)[-6:]) or 'none'}"


def describe(path: str | os.PathLike[str]) -> Contents:
    """Describe the contents of a checkpoint; reads no tensors, and needs no ranks.

    Raises:
        CheckpointError: there is no checkpoint, or it can't be read.
    """
    for _ in range(_ATTEMPTS):
        place = resolve(path)
        try:
            return _read(place)
        except FileNotFoundError as error:  # a save has replaced it in the meantime, or it is being removed
            problem = error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(place, error) from None
    raise _unreadable(place, problem)


def _read(place: Path) -> Contents:
    stored = json.loads((place / _CONTENTS).read_text())
    version = stored["version"]
    if version > VERSION:
        raise CheckpointError(
            f"{place} was written by a newer monarch_kernel (format {version}; this version reads format {VERSION})"
        )
    tensors = {name: (tuple(shape), dtype) for name, (shape, dtype) in stored["tensors"].items()}
    nbytes = sum(file.stat().st_size for file in place.iterdir())
    return Contents(place, stored["names"], tensors, nbytes, stored["ranks"], stored["saved_s"], stored["torch"])


def _unreadable(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{place / _CONTENTS} can't be read: {type(error).__name__}: {error}")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder; None if there is none.

    Raises:
        CheckpointError: a checkpoint can't be read.
    """
    found = []
    for each in _complete(Path(folder)):
        try:
            found.append((describe(each).saved_s, each.name, each))
        except CheckpointError:
            if _find(each) is not None:
                raise  # else it was removed, for example by a program that keeps the last few
    return max(found)[-1] if found else None


def _complete(folder: Path) -> Iterator[Path]:
    """The paths of complete checkpoints, including those that are only at their temporary name."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    renamed = (re.fullmatch(rf"\.(.+)\.{_LAST}-[0-9a-f]+", name) for name in names)
    wanted = {name for name in names if name[0] != "."} | {found[1] for found in renamed if found}
    places = (folder / name for name in sorted(wanted))
    yield from (place for place in places if not place.is_file() and _find(place) is not None)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
