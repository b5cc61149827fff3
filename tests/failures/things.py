"""Tensors, arrays and bytes of any shape and strides, with contents that are checked byte for byte."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Content", "Sketch", "Thing", "pattern", "some_near", "some_sketch"]

Content = Sequence[tuple[int, int, int]]
"""Content of the elements, in order: (version of the pattern, first byte of the pattern, byte after the last)."""

GUARD = 0xA5
ITEMSIZES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8,
    "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_SIZES = ((0, 3), (64, 16), (4 << 10, 24), (256 << 10, 30), (2 << 20, 22), (12 << 20, 4))
"""Largest number of bytes, and its weight; (0, ...) is an empty thing."""
_HUGE = (64 << 20, 80 << 20)
_HUGE_OF = 300  # one sketch in this many
_SCATTERED_NBYTES = 64 << 10  # such sketches are copied row by row
_MASK = (1 << 64) - 1


class Sketch(NamedTuple):
    """Description of a thing: its ``kind`` (tensor, array or bytes), and where its elements lie in a block of bytes."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    block_nbytes: int

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.shape)


class Thing:
    """A thing made from a sketch, in its own memory, where all bytes but those of the elements are guards.

    Attributes:
        block: all bytes.
        elements: the bytes of the elements, by element.
    """

    def __init__(self, sketch: Sketch, block: np.ndarray[Any, Any] | None = None) -> None:
        self._sketch = sketch
        self.block = np.full(sketch.block_nbytes, GUARD, np.uint8) if block is None else block
        self.elements = _elements(sketch, self.block)

    def view(self) -> Any:
        """The object that a user would pass."""
        kind, dtype, shape, strides, offset, _ = self._sketch
        if kind == "bytes":
            return memoryview(self.block)[offset : offset + self._sketch.nbytes]
        if kind == "array":
            return np.ndarray(shape, dtype, self.block, offset, strides)
        whole = torch.from_numpy(self.block).view(getattr(torch, dtype))
        itemsize = self._sketch.itemsize
        return whole.as_strided(shape, [stride // itemsize for stride in strides], offset // itemsize)

    def fill(self, content: Content) -> None:
        """Write this content into the elements."""
        self.elements[...] = _packed(content).reshape(self.elements.shape)

    def difference(self, content: Content) -> str:
        """Compare the elements with this content, and all other bytes with the guards; gives the difference."""
        expected = np.full(len(self.block), GUARD, np.uint8)
        _elements(self._sketch, expected)[...] = _packed(content).reshape(self.elements.shape)
        if np.array_equal(expected, self.block):
            return ""
        wrong = np.flatnonzero(expected != self.block)
        return (
            f"{len(wrong)} of {len(expected)} bytes are wrong, from {wrong[0]} to {wrong[-1]}, as "
            f"{self.block[wrong[:8]].tolist()} for {expected[wrong[:8]].tolist()}; {self._sketch} should hold {content}"
        )


def pattern(version: int, start: int, stop: int) -> np.ndarray[Any, Any]:
    """Give a part of the pattern of a version; its bytes identify the version and the place."""
    first = start // 8
    words = np.arange(first, -(-stop // 8), dtype=np.uint64)
    words += np.uint64(version * 0x9E3779B97F4A7C15 & _MASK)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(31)
    return words.view(np.uint8)[start - 8 * first : stop - 8 * first]


def _packed(content: Content) -> np.ndarray[Any, Any]:
    return np.concatenate([np.empty(0, np.uint8), *(pattern(*part) for part in content)])


def _elements(sketch: Sketch, block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ndarray((*sketch.shape, sketch.itemsize), np.uint8, block, sketch.offset, (*sketch.strides, 1))


def some_sketch(dice: random.Random) -> Sketch:
    """Any sketch: mostly small, sometimes empty, rarely more than 64 MiB."""
    dtype = dice.choice(list(ITEMSIZES))
    if dice.randrange(_HUGE_OF) == 0:
        nbytes = dice.randrange(*_HUGE)
    else:
        (most, _), *_ = dice.choices(_SIZES, [often for _, often in _SIZES])
        nbytes = dice.randrange(most) if most else 0
    count = nbytes // ITEMSIZES[dtype]
    rows = dice.randrange(1, 1 + min(64, max(1, count)))
    shape: tuple[int, ...] = dice.choice(((count,), (count,), (rows, count // rows)))
    if count > 8 and len(shape) == 2 and dice.random() < 0.5:
        shape = (shape[0], 2, shape[1] // 2)
    if dice.random() < 0.02:
        shape = ()
    return _sketched(dice, shape, dtype)


def some_near(dice: random.Random, shape: tuple[int, ...], dtype: str) -> Sketch:
    """A sketch that can be copied to or from elements of this shape: the same shape, flat, or bytes."""
    what = dice.choice(("same", "same", "flat", "bytes"))
    count = math.prod(shape)
    if what == "flat":
        return _sketched(dice, (count,), dtype)
    if what == "bytes":
        return _sketched(dice, (count * ITEMSIZES[dtype],), "uint8", is_packed=True)
    return _sketched(dice, shape, dtype)


def _sketched(dice: random.Random, shape: tuple[int, ...], dtype: str, *, is_packed: bool = False) -> Sketch:
    """A sketch in a block: the axes in any order, with gaps between rows, and also between elements if there are few."""
    itemsize = ITEMSIZES[dtype]
    kinds = ["tensor"] if dtype == "bfloat16" else ["tensor", "array"]
    if dtype == "uint8" and len(shape) == 1:
        kinds.append("bytes")
    kind = dice.choice(kinds)
    is_packed = is_packed or kind == "bytes" or dice.random() < 0.4
    is_small = math.prod(shape) * itemsize <= _SCATTERED_NBYTES
    axes = list(range(len(shape)))
    step = itemsize
    if not is_packed and is_small:
        dice.shuffle(axes)
        step *= dice.choice((1, 1, 2, 3, 7))
    strides = [0] * len(shape)
    for axis in reversed(axes):
        strides[axis] = step
        step = step * max(1, shape[axis])
        if not is_packed:
            step += itemsize * dice.choice((0, 0, 1, 5))
    head, tail = (itemsize * dice.randrange(1, 9) for _ in range(2))
    offset = head
    if kind == "array" and not is_packed:
        for axis, size in enumerate(shape):
            if size and dice.random() < 0.2:  # negative strides
                offset += (size - 1) * strides[axis]
                strides[axis] = -strides[axis]
    return Sketch(kind, dtype, shape, tuple(strides), offset, head + step + tail)
