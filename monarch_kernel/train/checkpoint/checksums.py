"""Checksums of the files of a checkpoint, which are verified before anything of it is used.

Theory of operation. A rank computes checksums (BLAKE2b) of what it writes, while it writes: one of each tensor in a file of
`torch.distributed.checkpoint`, so that a damaged tensor has a name, and one of each other file. Rank 0 writes all of them to
``checksums.json``. The checksum of that file is in ``monarch.json``, which ends with its own (`atomic_directory`).

To load, each rank verifies the small files that it reads, and the ranks divide the tensors among them: all are verified, each
by one rank, before any rank changes an object.
"""

from __future__ import annotations

import io
import json
import os
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from monarch_kernel.base.text import one_line
from monarch_kernel.errors import CheckpointError

__all__ = [
    "CHECKSUMS",
    "WRONG",
    "Checksums",
    "HashedFiles",
    "Part",
    "check_kind",
    "checksum",
    "damaged",
    "dumped",
    "shares_of",
]

CHECKSUMS = "checksums.json"
WRONG = "has a wrong checksum"
_CHUNK = 1 << 22
_LARGEST = 1 << 62  # no file is larger
_MAX_LISTED = 8


def checksum(content: bytes | memoryview) -> str:
    """The checksum of bytes in memory."""
    return blake2b(content, digest_size=16).hexdigest()


class Part(NamedTuple):
    """A part of a file, with its checksum.

    Attributes:
        at: where it begins.
        nbytes: its size.
        checksum: checksum of its bytes.
    """

    at: int
    nbytes: int
    checksum: str


class _HashedFile:
    """A file that is being written; each call of `tell` ends a part.

    `torch.distributed.checkpoint` calls it before and after each tensor.
    """

    def __init__(self, file: Any, parts: list[Part]) -> None:
        self._file = file
        self._parts = parts
        self._at = self._nbytes = 0
        self._hash = blake2b(digest_size=16)
        self._thread: ThreadPoolExecutor | None = None
        self.flush = file.flush
        self.fileno = file.fileno

    def write(self, data: Any) -> int:
        if len(data) < _CHUNK:
            self._hash.update(data)
            written: int = self._file.write(data)
        else:  # both release the GIL
            self._thread = self._thread or ThreadPoolExecutor(1, "monarch-checksum")
            hashed = self._thread.submit(self._hash.update, data)
            try:
                written = self._file.write(data)
            finally:
                hashed.result()
        self._nbytes += written
        return written

    def tell(self) -> int:
        self.end_part()
        return self._at

    def close(self) -> None:
        self.end_part()
        self.end_thread()
        self._file.close()

    def end_thread(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def end_part(self) -> None:
        if self._nbytes:
            self._parts.append(Part(self._at, self._nbytes, self._hash.hexdigest()))
            self._at, self._nbytes, self._hash = self._at + self._nbytes, 0, blake2b(digest_size=16)


class HashedFiles(FileSystem):
    """Writes files for `torch.distributed.checkpoint`.

    Attributes:
        parts: the parts of the files that were written, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, list[Part]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            hashed = _HashedFile(file, self.parts.setdefault(Path(path).name, []))
            try:
                yield hashed  # type: ignore[misc]
                hashed.end_part()
            finally:
                hashed.end_thread()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.parts[Path(new_path).name] = self.parts.pop(Path(path).name)


def dumped(by_rank: Sequence[Mapping[str, Sequence[Part]]]) -> bytes:
    """The content of ``checksums.json``.

    Args:
        by_rank: the parts of the files that each rank has written.
    """
    files = {name: {"rank": rank, "parts": parts} for rank, its in enumerate(by_rank) for name, parts in its.items()}
    return json.dumps({"files": files}).encode()


class _File(NamedTuple):
    rank: int
    parts: list[Part]


class Checksums:
    """The checksums of a checkpoint.

    Args:
        folder: folder of the checkpoint.
        expected: the checksum of ``checksums.json``; empty if an earlier version wrote the checkpoint, which has none.

    Raises:
        CheckpointError: ``checksums.json`` is damaged.
    """

    def __init__(self, folder: Path, expected: str) -> None:
        self.folder = folder
        self._files: dict[str, _File] | None = None
        if expected:
            content = _read(folder / CHECKSUMS)
            if content is None or checksum(content) != expected:
                why = "is missing" if content is None else WRONG
                raise damaged(folder, [f"  {CHECKSUMS}, written by rank 0, {why}"])
            try:
                self._files = _parsed(content)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(
                    f"{folder / CHECKSUMS} can't be read: {type(error).__name__}: {error}; load another checkpoint"
                ) from None

    def content(self, name: str, what: Iterable[str] = ()) -> bytes:
        """Read a whole file.

        Args:
            name: name of the file.
            what: names of the values in it, for the error.

        Raises:
            CheckpointError: it is damaged or missing.
        """
        content = _read(self.folder / name) if self._files is None else self.intact(name)
        if content is None:
            raise damaged(self.folder, [self.line(name, sorted(what))])
        return content

    def intact(self, name: str) -> bytes | None:
        """Read a whole file; None if it is damaged."""
        content = _read(self.folder / name)
        file = (self._files or {}).get(name)
        return content if content is not None and file is not None and _is_whole(content, file.parts) else None

    def damaged_tensors(self, index: Metadata, names: Iterable[str], share: int = 0, shares: int = 1) -> list[str]:
        """Verify tensors.

        Args:
            index: their locations.
            names: names of the modules and optimizers that they are of.
            share: the share of them that this rank verifies.
            shares: the number of shares.

        Returns:
            A line about each file in which some are damaged: its name, the rank that wrote it, and the tensors.
        """
        if self._files is None:
            return []
        wanted = tuple(f"{name}." for name in names)
        todo = [
            (file, part, tensors)
            for file, items in sorted(_items_of(index).items())
            for part, tensors in self._parts_of(file, items)
            if any(tensor.startswith(wanted) for tensor in tensors)
        ]
        found: dict[str, list[str]] = {}
        for at in shares_of([part.nbytes for _, part, _ in todo], shares)[share]:
            file, part, tensors = todo[at]
            if not _is_intact(self.folder / file, part):
                found.setdefault(file, []).extend(tensors)
        return [self.line(file, tensors) for file, tensors in found.items()]

    def _parts_of(self, name: str, items: list[tuple[int, str]]) -> Iterator[tuple[Part, list[str]]]:
        """The parts of a file, with the tensors in them."""
        file = (self._files or {}).get(name)
        if file is None:
            raise damaged(self.folder, [f"  {name} has no checksum"])
        items = sorted(items)
        begins = [at for at, _ in items]
        for part in file.parts:
            first = max(0, bisect_right(begins, part.at) - 1)
            last = bisect_left(begins, part.at + part.nbytes)
            yield part, [tensor for _, tensor in items[first:last]]

    def line(self, name: str, what: Sequence[str] = ()) -> str:
        """A line about a damaged file and what is in it."""
        file = (self._files or {}).get(name)
        writer = f", written by rank {file.rank}," if file is not None else ""
        listed = ", ".join(what[:_MAX_LISTED]) + (
            f" and {len(what) - _MAX_LISTED:,} more" if len(what) > _MAX_LISTED else ""
        )
        return f"  {name}{writer} {_what_is_wrong(self.folder / name, file)}{f': {listed}' if listed else ''}"


def check_kind(path: Path) -> None:
    """Check that a path is a file, if there is anything: reading a pipe or a device might never end.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # a circle of links; a name with a NUL
        raise CheckpointError(f"{path} can't be read: {error}; load another checkpoint") from None
    if not stat.S_ISREG(kind):
        what = next((text for is_it, text in _KINDS if is_it(kind)), "no file")
        raise CheckpointError(f"{path} was not read: it is {what}, and checkpoints have files only")


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def damaged(folder: Path, lines: Sequence[str]) -> CheckpointError:
    """Create the error about damaged files.

    Args:
        folder: folder of the checkpoint.
        lines: a line about each file.
    """
    listed = "\n".join(map(one_line, lines))
    return CheckpointError(
        f"{folder} is damaged, and was not used; nothing has changed:\n{listed}\n"
        "Load another checkpoint; checkpoint.verify(path) lists all that is damaged in one"
    )


def shares_of(sizes: Sequence[int], shares: int) -> list[list[int]]:
    """Divide places in a list of sizes into successive shares of about the same total."""
    total = sum(sizes) or 1
    found: list[list[int]] = [[] for _ in range(shares)]
    before = 0
    for place, size in enumerate(sizes):
        found[min(before * shares // total, shares - 1)].append(place)
        before += size
    return found


def _items_of(index: Metadata) -> dict[str, list[tuple[int, str]]]:
    """The places and names of the tensors in each file."""
    found: dict[str, list[tuple[int, str]]] = {}
    for item, info in (index.storage_data or {}).items():
        found.setdefault(info.relative_path, []).append((info.offset, item.fqn))
    return found


def _parsed(content: bytes) -> dict[str, _File]:
    """Parse ``checksums.json``.

    Raises:
        Exception: it has other values than `dumped` writes.
    """
    files: dict[str, _File] = {}
    for name, its in json.loads(content)["files"].items():
        parts = [Part(*part) for part in its["parts"]]
        for number in (its["rank"], *(number for part in parts for number in part[:2])):
            if type(number) is not int or not 0 <= number < _LARGEST:
                raise ValueError(f"{str(number)[:40]} is no number of a rank or of bytes")
        files[name] = _File(its["rank"], parts)
    return files


def _read(path: Path) -> bytes | None:
    check_kind(path)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _what_is_wrong(path: Path, file: _File | None) -> str:
    """The way in which a file is damaged."""
    try:
        nbytes = path.stat().st_size
    except FileNotFoundError:
        return "is missing"
    if file is None:
        return "has no checksum"
    return "is cut short" if nbytes < sum(part.nbytes for part in file.parts) else WRONG


def _is_whole(content: bytes, parts: Sequence[Part]) -> bool:
    whole = memoryview(content)
    return len(whole) == sum(part.nbytes for part in parts) and all(
        checksum(whole[part.at : part.at + part.nbytes]) == part.checksum for part in parts
    )


def _is_intact(path: Path, part: Part) -> bool:
    check_kind(path)
    hashed = blake2b(digest_size=16)
    left = part.nbytes
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(part.at)
            buffer = memoryview(bytearray(min(_CHUNK, left)))
            while left:
                n = file.readinto(buffer[: min(left, len(buffer))])
                if not n:
                    return False
                hashed.update(buffer[:n])
                left -= n
    except FileNotFoundError:
        return False
    return hashed.hexdigest() == part.checksum
