"""Compares random layouts with torch, which cuts real tensors, and with a reference that assembles the whole tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from monarch_kernel.features.resharding.plan import (
    Box,
    Cut,
    Part,
    common,
    cut_evenly,
    cut_up,
    join_up,
    numel,
    parts_of,
    shape_of,
    uncovered,
    whole,
)

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[Cut]]:
    """Cuts for each rank of a random device mesh, each of whose dims shards some dim of the tensor, or replicates it."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=2))
    dims = [draw(st.none() if not shape else st.none() | st.integers(0, len(shape) - 1)) for _ in sizes]
    strides = [draw(st.sampled_from((1, 1, 2, 3))) for _ in sizes]
    return [
        [Cut(dim, size, index, many) for dim, size, index, many in zip(dims, sizes, at, strides) if dim is not None]
        for at in itertools.product(*map(range, sizes))
    ]


def slices(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes))


def inside(part: Part, box: Box) -> tuple[slice, ...]:
    """The slices of a box in the tensor of the rank that holds a part."""
    starts = [at + start - first for at, (start, _), (first, _) in zip(part.at, box, part.box)]
    return slices(starts, shape_of(box))


def of_whole(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def held(tensor: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """The part that torch gives a rank."""
    for cut in cuts:
        how = Shard(cut.dim) if cut.strides == 1 else _StridedShard(cut.dim, split_factor=cut.strides)
        tensor = how._split_tensor(tensor, cut.shards, with_padding=False)[0][cut.shard]
    return tensor


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Cut]]]:
    shape = draw(shapes)
    return shape, draw(layouts(shape))


@given(sharded())
def test_a_rank_holds_the_same_part_as_in_torch(case: tuple[tuple[int, ...], list[list[Cut]]]) -> None:
    shape, ranks = case
    tensor = torch.arange(int(np.prod(shape))).reshape(shape)
    for cuts in ranks:
        there = held(tensor, cuts)
        parts = parts_of(shape, cuts)
        assert sum(numel(part.box) for part in parts) == there.numel()
        for part in parts:
            assert torch.equal(there[slices(part.at, shape_of(part.box))], tensor[of_whole(part.box)])


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Cut]], list[list[Cut]], list[int]]:
    shape = draw(shapes)
    sources = draw(layouts(shape))
    return shape, sources, draw(layouts(shape)), draw(st.permutations(range(len(sources))))


@given(moves())
def test_every_rank_gets_its_parts_whatever_both_layouts_are(
    case: tuple[tuple[int, ...], list[list[Cut]], list[list[Cut]], list[int]],
) -> None:
    shape, sources, targets, order = case
    reference = torch.arange(int(np.prod(shape))).reshape(shape)
    there = [held(reference, cuts) for cuts in sources]
    parts = [parts_of(shape, cuts) for cuts in sources]
    holders = [(rank, [part.box for part in parts[rank]]) for rank in order]
    for cuts in targets:
        expected = held(reference, cuts)
        got = torch.full_like(expected, -1)
        for wanted in parts_of(shape, cuts):
            steps, left = cut_up(wanted.box, holders)
            assert not left
            assert sum(numel(step.box) for step in steps) == numel(wanted.box)  # each element once
            for source, box in steps:
                part = next(part for part in parts[source] if common(part.box, box) == box)
                got[inside(wanted, box)] = there[source][inside(part, box)]
        assert torch.equal(got, expected)


def test_the_first_holder_of_a_part_provides_it() -> None:
    everything = whole((4, 2))
    steps, left = cut_up(everything, [(7, [((0, 1), (0, 2))]), (3, [everything]), (5, [everything])])
    assert ([step.source for step in steps], left) == ([7, 3], [])
    assert numel(steps[1].box) == 6
    assert cut_up(whole((0, 5)), []) == ([], [])
    assert cut_up(whole(()), [(1, [()])]) == ([(1, ())], [])


def test_parts_that_no_source_holds_are_returned() -> None:
    halves = [((0, 2), (0, 4)), ((3, 5), (0, 4))]
    assert uncovered(whole((5, 4)), halves) == [((2, 3), (0, 4))]
    assert uncovered(whole((5, 4)), [*halves, ((1, 4), (0, 3))]) == [((2, 3), (3, 4))]
    assert uncovered(whole((5, 4)), [whole((5, 4))]) == []
    assert uncovered(whole(()), []) == [()]


@given(st.integers(0, 40), st.integers(1, 9))
def test_even_cuts_are_those_of_tensor_split(size: int, count: int) -> None:
    spans = [cut_evenly(size, count, index) for index in range(count)]
    split = torch.arange(size).tensor_split(count)
    assert [list(range(*span)) for span in spans] == [part.tolist() for part in split]
    assert join_up([stop - start for start, stop in spans]) == spans


@pytest.mark.parametrize(("dp", "tp"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_fsdp_on_top_of_tensor_parallelism_is_one_part(dp: int, tp: int) -> None:
    # 8 rows, cut along tp first, although it is the last dim of the device mesh.
    (part,) = parts_of((8, 8), [Cut(0, 2, dp, strides=2), Cut(0, 2, tp)])
    assert part == Part(((4 * tp + 2 * dp, 4 * tp + 2 * dp + 2), (0, 8)), (0, 0))
