"""Plans which part of a tensor is read from which rank, in boxes of its index space. No I/O.

A *box* is a range of indices along each dim of the whole tensor. A rank holds some *parts* of a tensor: boxes, each with its
place in the rank's own tensor. A reader cuts the box that it wants into pieces, one for each holder of a part of it. This is
the same whether the tensor is sharded, replicated, or both along several axes of a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

__all__ = [
    "Box",
    "Cut",
    "Part",
    "Step",
    "common",
    "cut_evenly",
    "cut_up",
    "join_up",
    "numel",
    "parts_of",
    "shape_of",
    "uncovered",
    "whole",
]

Box = tuple[tuple[int, int], ...]
"""First and last index (exclusive) along each dim. The box of a scalar is empty, and has one element."""


class Part(NamedTuple):
    """A box of the whole tensor that a rank holds; ``at`` is the index in the rank's own tensor where it begins."""

    box: Box
    at: tuple[int, ...]


class Cut(NamedTuple):
    """One step of sharding, along one dim of a device mesh.

    Attributes:
        dim: dim of the tensor that is cut.
        shards: number of shards, cut as by `torch.chunk`: all but the last ones have the same size.
        shard: number of this shard.
        strides: number of pieces that the dim is cut into first; the shard takes its share of each piece. This is DTensor's
            ``_StridedShard``, where a later dim of the device mesh was sharded first, as with FSDP on top of tensor
            parallelism.
    """

    dim: int
    shards: int
    shard: int
    strides: int = 1


class Step(NamedTuple):
    """A box to read from a source."""

    source: int
    box: Box


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Sizes of a box."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(shape_of(box))


def common(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in shared) else shared


def _without(box: Box, taken: Box) -> list[Box]:
    """The rest of a box, in boxes, without a box that lies within it."""
    left = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, taken, strict=True)):
        before, after = taken[:dim], box[dim + 1 :]
        left += [(*before, span, *after) for span in ((start, first), (last, stop)) if span[0] < span[1]]
    return left


def cut_up(wanted: Box, holders: Iterable[tuple[int, Sequence[Box]]]) -> tuple[list[Step], list[Box]]:
    """Assign each part of a box to a source.

    Args:
        wanted: the box.
        holders: sources, with the boxes that each holds; the first source that holds an element provides it.

    Returns:
        Steps with disjoint boxes, and the boxes that no source holds.
    """
    steps: list[Step] = []
    left = [wanted] if numel(wanted) else []
    for source, boxes in holders:
        for held in boxes:
            rest: list[Box] = []
            for box in left:
                shared = common(box, held)
                if shared is None:
                    rest.append(box)
                else:
                    steps.append(Step(source, shared))
                    rest += _without(box, shared)
            left = rest
        if not left:
            break
    return steps, left


def uncovered(wanted: Box, boxes: Iterable[Box]) -> list[Box]:
    """The parts of a box that no other box covers."""
    return cut_up(wanted, [(0, [box]) for box in dict.fromkeys(boxes)])[1]


def cut_evenly(size: int, count: int, index: int) -> tuple[int, int]:
    """Cut a dim like `torch.tensor_split`: sizes differ by at most one, the larger ones come first."""
    least, more = divmod(size, count)
    start = index * least + min(index, more)
    return start, start + least + (index < more)


def join_up(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last index (exclusive) of parts that follow each other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return list(zip([0, *ends], ends, strict=False))


def parts_of(shape: Sequence[int], cuts: Iterable[Cut]) -> list[Part]:
    """The parts of a sharded tensor that one rank holds.

    Args:
        shape: shape of the whole tensor.
        cuts: the cuts, in the order in which they apply.
    """
    spans = [[(0, size)] for size in shape]
    for cut in cuts:
        spans[cut.dim] = _shard(spans[cut.dim], cut)
    along = [list(zip(each, [start for start, _ in join_up([b - a for a, b in each])], strict=True)) for each in spans]
    return [Part(tuple(span for span, _ in one), tuple(at for _, at in one)) for one in product(*along)]


def _shard(spans: Sequence[tuple[int, int]], cut: Cut) -> list[tuple[int, int]]:
    """Cut one shard out of the spans of a dim."""
    size = sum(stop - start for start, stop in spans)
    taken: list[tuple[int, int]] = []
    for piece in range(cut.strides):
        first, last = _chunk(size, cut.strides, piece)
        start, stop = _chunk(last - first, cut.shards, cut.shard)
        for span in _within(spans, first + start, first + stop):
            if taken and taken[-1][1] == span[0]:
                span = (taken.pop()[0], span[1])
            taken.append(span)
    return taken


def _chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """Cut like `torch.chunk`, but keep empty chunks, which `torch.chunk` leaves out."""
    most = -(-size // count)
    return min(size, index * most), min(size, (index + 1) * most)


def _within(spans: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The part of spans from ``first`` up to ``last``, counted through all spans."""
    found = []
    for start, stop in spans:
        begin, end = start + max(0, first), min(stop, start + last)
        if begin < end:
            found.append((begin, end))
        first, last = first - (stop - start), last - (stop - start)
    return found
