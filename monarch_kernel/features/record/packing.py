"""Blocks of rows of a record that no longer change, compressed: each takes half as much room. Pure.

SQLite stores some 16 bytes beside the values of a row, and equal upper bytes of numbers again and again. A block holds the
columns of many rows one after another, the first bytes of all numbers before their second bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["BATCHES", "Summary", "pack_digests", "pack_metrics", "unpack_digests", "unpack_metrics"]

BATCHES = 0
"""Stands in place of the number of a metric for blocks that hold digests of batches."""

_MAX_NBYTES = 64 << 20
"""Of a block that is not compressed. One of this package has some kilobytes a rank; a few bytes can become gigabytes."""

_HAS_MEAN, _HAS_ENDS = 1, 2


class Summary(NamedTuple):
    """The value of a metric in a step: `tables.Metric` without its loop and name.

    ``mean`` is None if no value is finite; ``least`` and ``most`` are None if they are equal to it.
    """

    step: int
    mean: float | None
    least: float | None
    most: float | None
    ranks: int
    size: int


def pack_metrics(rows: Sequence[Summary]) -> bytes:
    """Pack the values of one metric."""
    flags = bytes(
        _HAS_MEAN * (row.mean is not None) | _HAS_ENDS * (row.least is not None and row.most is not None)
        for row in rows
    )
    ends = [row for row, flag in zip(rows, flags) if flag & _HAS_ENDS]
    return _compressed(
        [row.step for row in rows],
        flags,
        _column("d", [row.mean for row in rows if row.mean is not None]),
        _column("d", [row.least for row in ends if row.least is not None]),
        _column("d", [row.most for row in ends if row.most is not None]),
        _column("q", [row.ranks for row in rows]),
        _column("q", [row.size for row in rows]),
    )


def unpack_metrics(data: bytes) -> list[Summary]:
    """Return the values that `pack_metrics` has packed.

    Raises:
        ValueError: the block is damaged.
    """
    try:
        steps, rest = _decompressed(data)
        n = len(steps)
        flags, at = rest[:n], n
        columns: list[list[float]] = []
        n_means, n_ends = sum(flag & _HAS_MEAN for flag in flags), sum(bool(flag & _HAS_ENDS) for flag in flags)
        for kind, count in (("d", n_means), ("d", n_ends), ("d", n_ends), ("q", n), ("q", n)):
            columns.append(_values(kind, rest[at : at + 8 * count]))
            at += 8 * count
        means, least, most = (iter(column) for column in columns[:3])
        return [
            Summary(
                step,
                next(means) if flag & _HAS_MEAN else None,
                next(least) if flag & _HAS_ENDS else None,
                next(most) if flag & _HAS_ENDS else None,
                int(ranks),
                int(size),
            )
            for step, flag, ranks, size in zip(steps, flags, columns[3], columns[4], strict=True)
        ]
    except (zlib.error, struct.error, StopIteration, ValueError) as error:
        raise ValueError(f"a block of metrics is damaged ({error})") from None


def pack_digests(rows: Sequence[tuple[int, bytes]]) -> bytes:
    """Pack the digests of the batches of steps."""
    return _compressed(
        [step for step, _ in rows], _column("q", [len(each) for _, each in rows]), *(each for _, each in rows)
    )


def unpack_digests(data: bytes) -> list[tuple[int, bytes]]:
    """Return the digests that `pack_digests` has packed.

    Raises:
        ValueError: the block is damaged.
    """
    try:
        steps, rest = _decompressed(data)
        at, found = 8 * len(steps), []
        for step, length in zip(steps, _values("q", rest[:at]), strict=True):
            found.append((step, rest[at : at + int(length)]))
            at += int(length)
        return found
    except (zlib.error, struct.error, ValueError) as error:
        raise ValueError(f"a block of digests is damaged ({error})") from None


def _compressed(steps: Sequence[int], *parts: bytes) -> bytes:
    """Compress steps, each as the distance from the one before, and what belongs to them."""
    apart = [step - before for before, step in zip([0, *steps], steps)]
    return zlib.compress(b"".join([struct.pack("<q", len(steps)), _column("q", apart), *parts]), 6)


def _decompressed(data: bytes) -> tuple[list[int], bytes]:
    """Return the steps and what comes after them."""
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(data, _MAX_NBYTES)
    if not unpacker.eof:
        raise ValueError("it is cut off, or far too large")
    (n,) = struct.unpack_from("<q", raw)
    steps, step = [], 0
    for apart in _values("q", raw[8 : 8 + 8 * n]):
        step += int(apart)
        steps.append(step)
    if len(steps) != n:
        raise ValueError("it is too short")
    return steps, raw[8 + 8 * n :]


def _column(kind: str, values: Iterable[float]) -> bytes:
    """Numbers of 8 bytes: the lowest bytes of all, then their second ones ..."""
    values = list(values)
    raw = struct.pack(f"<{len(values)}{kind}", *values)
    return b"".join(raw[at::8] for at in range(8))


def _values(kind: str, column: bytes) -> list[float]:
    n = len(column) // 8
    raw = bytearray(8 * n)
    for at in range(8):
        raw[at::8] = column[at * n : (at + 1) * n]
    return list(struct.unpack(f"<{n}{kind}", raw))
