"""What a DataLoader reads: its data set, its sampler, and fingerprints of the files behind it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from monarch_kernel.base.text import plural
from monarch_kernel.features.record.messages import DataFile

__all__ = ["MOST_FILES", "files_of", "fingerprint", "text_of"]

MOST_FILES = 256
"""Files of one data set of which a record holds fingerprints: the first ones in the order in which the data set names them."""

_ENDS = 1 << 20
"""Bytes at the beginning and at the end of a file that are hashed."""

_MAX_DEPTH = 8
_MAX_LOOKED_AT = 4096


def text_of(iterator: Any) -> str:
    """Describe where the batches of an iterator of a DataLoader come from."""
    dataset = getattr(iterator, "_dataset", None)
    sampler = getattr(iterator, "_index_sampler", None)
    parts = [type(dataset).__name__]
    try:
        parts.append(plural(len(dataset), "row"))  # type: ignore[arg-type]
    except Exception:  # a stream
        pass
    if isinstance(found := getattr(dataset, "_fingerprint", None), str):
        parts.append(f"fingerprint {found}")
    if (inner := getattr(sampler, "sampler", None)) is not None:
        parts.append(type(inner).__name__)
    if isinstance(size := getattr(sampler, "batch_size", None), int):
        parts.append(f"batches of {size}")
    return ", ".join(parts)


def files_of(dataset: Any) -> list[str]:
    """Return the files that the attributes of a data set name, at most `MOST_FILES`.

    These are paths as texts, ``pathlib`` paths and memory-mapped arrays, also in lists, dicts and inner data sets, and the
    files of a data set of ``datasets``. What a data set reads in another way is not found.
    """
    found: dict[str, None] = {}
    looked_at = 0
    seen: set[int] = set()
    queue: list[tuple[Any, int]] = [(dataset, 0)]
    while queue and looked_at < _MAX_LOOKED_AT and len(found) < MOST_FILES:
        value, depth = queue.pop(0)
        looked_at += 1
        path = _path(value)
        if path:
            if path not in found and _is_file(path):
                found[path] = None
        elif depth < _MAX_DEPTH and id(value) not in seen:
            seen.add(id(value))
            queue += [(part, depth + 1) for part in _parts(value)]
    return list(found)


def _path(value: Any) -> str:
    """Return the absolute path that a value may name; empty if it names none."""
    name = getattr(value, "filename", None)
    if isinstance(name, (str, os.PathLike)) and hasattr(value, "dtype"):  # numpy.memmap
        value = name
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value or len(value) > 4096 or "\0" in value or "\n" in value:
        return ""
    return os.path.abspath(value)


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from list(value.values())[:_MAX_LOOKED_AT]
    elif isinstance(value, (list, tuple)):
        yield from value[:_MAX_LOOKED_AT]
    elif hasattr(value, "dtype"):  # an array or a tensor, which may be large
        base = getattr(value, "base", None)  # a view of a memory-mapped array
        if base is not None:
            yield base
    elif isinstance(files := getattr(value, "cache_files", None), list):  # of Hugging Face datasets
        yield from files
    elif not isinstance(value, type) and hasattr(value, "__dict__") and not callable(value):
        yield from list(vars(value).values())


def fingerprint(path: str) -> DataFile | None:
    """Return size, time of change, and a hash of the first and the last MiB of a file; None if it can't be read."""
    hashed = blake2b(digest_size=16)
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            hashed.update(file.read(_ENDS))
            if status.st_size > _ENDS:
                file.seek(max(_ENDS, status.st_size - _ENDS))
                hashed.update(file.read(_ENDS))
    except OSError:
        return None
    return DataFile(path, status.st_size, status.st_mtime, hashed.hexdigest())
