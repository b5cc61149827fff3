"""Which part of a tensor is read from which rank: boxes of its index space, and no I/O.

A *box* is a range of indices along each dim of the whole tensor. What a rank holds of a tensor is some *parts*: boxes, and
where each lies in the rank's own tensor. Whoever wants a box cuts it up among those that hold parts of it. That a tensor is
sharded, replicated, or both along several axes of a mesh makes no difference from then on.
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
"""From which index up to which (exclusive), for each dim; that of a scalar is empty, and has one element."""


class Part(NamedTuple):
    """A box of the whole tensor that a rank holds; ``at`` is the index in the rank's own tensor where it begins."""

    box: Box
    at: tuple[int, ...]


class Cut(NamedTuple):
    """One step of sharding, as of one dim of a device mesh.

    Attributes:
        dim: of the tensor, along which it is cut.
        shards: into how many, as `torch.chunk` cuts: all but the last ones are of the same size.
        shard: which of them is meant.
        strides: into how many pieces the dim is cut before; the shard takes its share of each. DTensor has that
            (``_StridedShard``) where a later dim of the device mesh was the first to be cut along, as FSDP on top of tensor
            parallelism does it.
    """

    dim: int
    shards: int
    shard: int
    strides: int = 1


class Step(NamedTuple):
    """A box that is read from a source."""

    source: int
    box: Box


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Sizes of a box."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """How many elements a box has."""
    return math.prod(shape_of(box))


def common(one: Box, other: Box) -> Box | None:
    """The box that two have in common; None if that is empty."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in shared) else shared


def _without(box: Box, taken: Box) -> list[Box]:
    """What is left of a box, in boxes, without one that lies within it."""
    left = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, taken, strict=True)):
        before, after = taken[:dim], box[dim + 1 :]
        left += [(*before, span, *after) for span in ((start, first), (last, stop)) if span[0] < span[1]]
    return left


def cut_up(wanted: Box, holders: Iterable[tuple[int, Sequence[Box]]]) -> tuple[list[Step], list[Box]]:
    """Say from whom each part of a box is read.

    Args:
        wanted: the box.
        holders: sources, with the boxes that each holds; the first one that holds something is asked for it.

    Returns:
        Steps, whose boxes do not overlap; and the boxes that nobody holds.
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
    """What of a box lies in none of some boxes."""
    return cut_up(wanted, [(0, [box]) for box in dict.fromkeys(boxes)])[1]


def cut_evenly(size: int, count: int, index: int) -> tuple[int, int]:
    """Cut a dim as `torch.tensor_split` does: sizes differ by one at most, the larger come first."""
    least, more = divmod(size, count)
    start = index * least + min(index, more)
    return start, start + least + (index < more)


def join_up(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where parts begin and end that lie one after the other."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return list(zip([0, *ends], ends, strict=False))


def parts_of(shape: Sequence[int], cuts: Iterable[Cut]) -> list[Part]:
    """What one rank holds of a sharded tensor.

    Args:
        shape: of the whole.
        cuts: in the order in which they are made.
    """
    spans = [[(0, size)] for size in shape]
    for cut in cuts:
        spans[cut.dim] = _shard(spans[cut.dim], cut)
    along = [list(zip(each, [start for start, _ in join_up([b - a for a, b in each])], strict=True)) for each in spans]
    return [Part(tuple(span for span, _ in one), tuple(at for _, at in one)) for one in product(*along)]


def _shard(spans: Sequence[tuple[int, int]], cut: Cut) -> list[tuple[int, int]]:
    """Take one shard of a dim of which there are these spans."""
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
    """Cut as `torch.chunk` does, but for the empty ones that there it leaves out."""
    most = -(-size // count)
    return min(size, index * most), min(size, (index + 1) * most)


def _within(spans: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """The part from ``first`` up to ``last`` of spans, counted through all of them."""
    found = []
    for start, stop in spans:
        begin, end = start + max(0, first), min(stop, start + last)
        if begin < end:
            found.append((begin, end))
        first, last = first - (stop - start), last - (stop - start)
    return found
