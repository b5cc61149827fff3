"""Writes a checkpoint directory atomically: it exists either completely or not at all.

Theory of operation. A save writes the directory under a temporary name beside its final path, and renames it once all ranks are
done and all data is on disk. It first renames an existing checkpoint at this path, and removes it afterwards: a crash in
between leaves the old checkpoint under its temporary name, where `resolve` finds it. The next save to the same path removes
what a failed save has left.

The directory contains the files of `torch.distributed.checkpoint`; ``values.pt``, the plain values that are the same on all
ranks; ``values-0.pt``, ``values-1.pt`` ..., those of each rank, if some differ; ``checksums.json``; and ``monarch.json``,
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
from glob import escape, iglob
from pathlib import Path
from typing import Any

from monarch_kernel.base.text import format_nbytes, html_table, one_line, plural
from monarch_kernel.errors import CheckpointError
from monarch_kernel.train.checkpoint.checksums import WRONG, checksum, damaged
from monarch_kernel.train.checkpoint.disk_errors import why

__all__ = [
    "VALUES",
    "Contents",
    "absolute",
    "as_path",
    "begin",
    "describe",
    "finish",
    "latest",
    "move",
    "previous",
    "resolve",
    "values_of",
]

VERSION = 2
VALUES = "values.pt"
_CONTENTS = "monarch.json"
_SEAL_BEGIN = b', "checksum": "'
_SEAL = _SEAL_BEGIN + b'%s"}'
_SAVING, _LAST = "saving", "last"
_MAX_SHOWN = 12
_ATTEMPTS = 10
_LARGEST = 1 << 62
_MOST_RANKS = 1_000_000
_LAST_S = 1e11  # in the year 5138


@dataclass(frozen=True, repr=False)
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
        by_rank: names of values and states that are stored for each rank, because they differ.
        checksums: checksum of the file with checksums; empty in checkpoints of earlier versions, which have none.
    """

    path: Path
    names: Mapping[str, str]
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    nbytes: int
    ranks: int
    saved_s: float
    torch: str
    by_rank: frozenset[str] = frozenset()
    checksums: str = ""

    def __str__(self) -> str:
        lines = [self._headline()]
        for name, kind in self.names.items():
            own = [(full, *self.tensors[full]) for full in self.tensors if full.startswith(f"{name}.")]
            each = ", by rank" if name in self.by_rank else ""
            lines.append(f"  {name} ({kind}{each}){': ' + plural(len(own), 'tensor') if own else ''}")
            if kind == "module":
                lines += [
                    f"    {full.partition('.')[2]} {dtype}{list(shape)}" for full, shape, dtype in own[:_MAX_SHOWN]
                ]
                lines += [f"    and {len(own) - _MAX_SHOWN:,} more"] if len(own) > _MAX_SHOWN else []
        return "\n".join(map(one_line, lines))

    def __repr__(self) -> str:
        """The objects without their tensors, which ``print`` lists."""
        rows = []
        for name, kind, each, n in self._rows():
            of_kind = f" ({kind}{each})" if kind else ""
            tensors = f": {n} tensor{'s' * (n != '1')}" if n else ""
            rows.append(f"  {name}{of_kind}{tensors}")
        return "\n".join(map(one_line, [self._headline(), *rows]))

    def _repr_html_(self) -> str:
        rows = list(self._rows())
        columns = [
            ("name", [name for name, *_ in rows], False),
            ("kind", [f"{kind}{each}" for _, kind, each, _ in rows], False),
            ("tensors", [n for *_, n in rows], True),
        ]
        return html_table(self._headline(), columns)

    def _headline(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.saved_s))
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{self.path}: {format_nbytes(self.nbytes)}, saved {when} by {ranks} with torch {self.torch}"

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield name, kind, whether it is stored by rank, and the tensors, of each object up to a maximum."""
        for name, kind in list(self.names.items())[:_MAX_SHOWN]:
            n = sum(full.startswith(f"{name}.") for full in self.tensors)
            yield name, kind, ", by rank" if name in self.by_rank else "", f"{n:,}" if n else ""
        if (hidden := len(self.names) - _MAX_SHOWN) > 0:
            yield f"and {hidden:,} more", "", "", ""


def values_of(rank: int) -> str:
    """The file with the values of a rank that differ from those of other ranks."""
    return f"values-{rank}.pt"


def as_path(path: object, call: str, what: str = "a directory") -> Path:
    """Return a path that a user gives, as an absolute one.

    Args:
        path: the path.
        call: the function, such as ``save``.
        what: what the path is of.

    Raises:
        TypeError: it is no path.
        ValueError: it is empty, so that it would mean the current directory.
    """
    if isinstance(path, bytes) or not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"checkpoint.{call}() takes the path of {what}, such as 'runs/step-100', not a {type(path).__name__}"
        )
    if not os.fspath(path):
        raise ValueError(f"checkpoint.{call}(''): the path of {what} is empty; write one, such as 'runs/step-100'")
    return absolute(path)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path; ``~`` is the home directory, as in a shell, and not a directory of that name."""
    return Path(os.path.expanduser(path)).absolute()


def begin(path: Path, *, replaces: bool = False) -> Path:
    """Create the temporary directory for a checkpoint that is being written.

    Args:
        path: path of the checkpoint.
        replaces: whether what is there may be replaced although it is not a checkpoint.

    Raises:
        CheckpointError: the path exists, and is not a checkpoint.
    """
    if path.exists() and not replaces and not (path / _CONTENTS).is_file():
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
    body = json.dumps({"version": VERSION, "saved_s": time.time(), **contents}).encode()
    with about.open("wb") as file:
        file.write(body[:-1] + _SEAL % checksum(body).encode())
        file.flush()
        os.fsync(file.fileno())
    move(making, path)


def move(making: Path, path: Path) -> None:
    """Move a directory that is complete to its path, replacing the previous one.

    Raises:
        OSError: this is not possible; then the previous one stays.
    """
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
    for left in _matching(path.parent, f".{escape(path.name)}.{_SAVING}-*"):
        shutil.rmtree(left, ignore_errors=True)
    if path.exists():
        for left in _matching(path.parent, f".{escape(path.name)}.{_LAST}-*"):
            shutil.rmtree(left, ignore_errors=True)


def resolve(path: str | os.PathLike[str]) -> Path:
    """Find a complete checkpoint.

    Raises:
        CheckpointError: there is no complete checkpoint at this path.
    """
    wanted = absolute(path)
    found = _find(wanted)
    if found is not None:
        return found
    if not wanted.exists():
        began = any(_matching(wanted.parent, f".{escape(wanted.name)}.{_SAVING}-*"))
        more = "a save to it has not finished" if began else _beside(wanted)
        raise CheckpointError(f"there is no checkpoint at {wanted}; {more}")
    if any(_matching(wanted, "*.safetensors")):
        raise CheckpointError(
            f"{wanted} is no checkpoint of monarch_kernel; it has safetensors files, as format='hf' writes them: read it with "
            "from_pretrained of transformers, or with safetensors"
        )
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
        yield from sorted(_matching(wanted.parent, f".{escape(wanted.name)}.{_LAST}-*"))
        yield wanted

    return next((place for place in places() if (place / _CONTENTS).is_file()), None)


def _beside(wanted: Path) -> str:
    if not wanted.parent.is_dir():
        return f"there is no directory {wanted.parent}"
    others = [each.name for each in _complete(wanted.parent)]
    return f"available in {wanted.parent}: {', '.join(sorted(others)[-6:]) or 'none'}"


def describe(path: str | os.PathLike[str]) -> Contents:
    """Describe the contents of a checkpoint; reads no tensors, and needs no ranks.

    Raises:
        CheckpointError: there is no checkpoint, or it can't be read.
        TypeError: ``path`` is no path.
        ValueError: ``path`` is empty.
    """
    as_path(path, "describe")
    for _ in range(_ATTEMPTS):
        place = resolve(path)
        try:
            return _read(place)
        except FileNotFoundError as error:  # a save has replaced it in the meantime, or it is being removed
            problem = error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(place, error) from None
    raise _unreadable(place, problem)


def _read(place: Path) -> Contents:
    content = (place / _CONTENTS).read_bytes()
    body, seal, end = content.rpartition(_SEAL_BEGIN)
    if seal and _SEAL % checksum(body + b"}").encode() != seal + end:
        raise damaged(place, [f"  {_CONTENTS}, written by rank 0, {WRONG}"])
    stored = json.loads(content)
    version = stored["version"]
    if version > VERSION:
        raise CheckpointError(
            f"{place} was written by a newer monarch_kernel (format {version}; this version reads format {VERSION}): update "
            "monarch_kernel to read it"
        )
    nbytes = sum(file.stat().st_size for file in place.iterdir())
    if version == VERSION and not seal:
        raise damaged(place, [f"  {_CONTENTS}, written by rank 0, {WRONG}"])
    return _checked(
        Contents(
            place,
            stored["names"],
            {name: (tuple(shape), dtype) for name, (shape, dtype) in stored["tensors"].items()},
            nbytes,
            stored["ranks"],
            stored["saved_s"],
            stored["torch"],
            frozenset(stored.get("by_rank", ())),
            stored.get("checksums", ""),
        )
    )


def _checked(contents: Contents) -> Contents:
    """Return contents whose values are of the right types: the file may come from anywhere.

    Raises:
        ValueError: a value is not.
    """
    names, tensors = contents.names, contents.tensors
    shapes = [size for shape, _ in tensors.values() for size in shape]
    texts = (contents.torch, contents.checksums, *contents.by_rank, *(dtype for _, dtype in tensors.values()))
    whys = {
        "a name is missing": not isinstance(names, dict) or not all(isinstance(kind, str) for kind in names.values()),
        "a text is missing": not all(isinstance(text, str) for text in texts),
        "a shape has no sizes": not all(type(size) is int and 0 <= size < _LARGEST for size in shapes),
        "the number of ranks is wrong": type(contents.ranks) is not int or not 0 < contents.ranks <= _MOST_RANKS,
        "the time is wrong": type(contents.saved_s) not in (int, float) or not 0 <= contents.saved_s < _LAST_S,
    }
    if wrong := next((text for text, is_so in whys.items() if is_so), ""):
        raise ValueError(wrong)
    return contents


def _unreadable(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{place / _CONTENTS} can't be read: {why(error).text}")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder; None if there is none.

    Raises:
        CheckpointError: a checkpoint can't be read.
        TypeError: ``folder`` is no path.
        ValueError: ``folder`` is empty.
    """
    as_path(folder, "latest")
    found = []
    for each in _complete(Path(os.path.expanduser(folder))):
        try:
            found.append((describe(each).saved_s, each.name, each))
        except CheckpointError:
            if _find(each) is not None:
                raise  # else it was removed, for example by a program that keeps the last few
    return max(found)[-1] if found else None


def previous(path: Path) -> str:
    """Say what a save that failed has left at its path and beside it; never fails, because it is part of an error."""
    try:
        exists = next(_complete(path.parent), None) is not None
    except OSError:
        return "earlier checkpoints are intact"
    return "the previous checkpoint is intact" if exists else f"there is no earlier checkpoint in {path.parent}"


def _matching(folder: Path, pattern: str) -> Iterator[Path]:
    """The paths in a folder that match a pattern. `Path.glob` raises an error if the folder is removed meanwhile."""
    return map(folder.joinpath, iglob(pattern, root_dir=folder))


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
