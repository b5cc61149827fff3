"""Draws a curve as a PNG image, for programs that show no SVG: some viewers of notebooks, mail, office programs.

Only zlib is needed. A plotting library would take a second to import, and would have to be installed beside the kernel.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Place", "png"]

_CLEAR, _AXIS, _BAND, _LINE = 0, 1, 2, 3
_LEVELS = 16
"""Degrees to which a pixel is covered by the line."""

_RGB = bytes((0x1E, 0x88, 0xE5))
_PALETTE = bytes(3) + bytes((0x88,) * 3) + _RGB * (1 + _LEVELS)
_ALPHA = bytes((0, 128, 64, *(255 * (level + 1) // _LEVELS for level in range(_LEVELS))))


class Place(NamedTuple):
    """A point of the curve and its band, in pixels from the left and from the top."""

    x: float
    y: float
    top: float
    bottom: float


def png(runs: Sequence[Sequence[Place]], width: int, height: int, line_width: float) -> bytes:
    """Return an image of curves, with an axis at its bottom.

    Args:
        runs: the points of each part of the curve, from left to right; between the parts is a gap.
        width: in pixels.
        height: in pixels.
        line_width: in pixels.
    """
    rows = [bytearray(width) for _ in range(height)]
    rows[-1][:] = bytes((_AXIS,)) * width
    for run in runs:
        for column, before, after in _columns(run, width, line_width):
            for row in range(
                math.ceil(max(0.0, min(before.top, after.top))), min(height, int(max(before.bottom, after.bottom)))
            ):
                rows[row][column] = max(rows[row][column], _BAND)
            low = min(before.y, after.y) - line_width / 2
            high = max(before.y, after.y) + line_width / 2
            for row in range(max(0, math.floor(low)), min(height, math.ceil(high))):
                covered = min(high, row + 1) - max(low, row)
                level = _LINE - 1 + round(covered * _LEVELS)
                rows[row][column] = max(rows[row][column], level)
    pixels = b"".join(b"\0" + row for row in rows)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", head),
        (b"PLTE", _PALETTE),
        (b"tRNS", _ALPHA),
        (b"IDAT", zlib.compress(pixels, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _columns(run: Sequence[Place], width: int, line_width: float) -> Iterator[tuple[int, Place, Place]]:
    """Yield the columns of pixels that a part of the curve covers, each with the curve at its left and right edge."""
    if len(run) == 1:
        (only,) = run
        first = max(0, min(width - 1, int(only.x - line_width)))
        for column in range(first, min(width, math.ceil(first + 2 * line_width))):
            yield column, only, only
        return
    for left, right in pairwise(run):
        for column in range(max(0, int(left.x)), min(width, max(int(left.x) + 1, math.ceil(right.x)))):
            yield column, _between(left, right, column), _between(left, right, column + 1)


def _between(left: Place, right: Place, x: float) -> Place:
    """The curve at a position between two points."""
    part = min(1.0, max(0.0, (x - left.x) / (right.x - left.x))) if right.x > left.x else 1.0
    return Place(*(a + (b - a) * part for a, b in zip(left, right)))
