"""Random numbers of parts equal those of the whole tensor, wherever it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_kernel.features.tensors import drawing
from monarch_kernel.features.tensors.drawing import Draw, fill_part


def drawn(shape: Sequence[int], offset: Sequence[int], whole: Sequence[int], sizes: list[int] | None = None) -> Any:
    """Draw a part of a tensor."""
    draw = Draw(0, 0)

    def fill(block: int, values: torch.Tensor) -> None:
        if sizes is not None:
            sizes.append(values.numel())
        values.normal_(generator=torch.Generator().manual_seed(draw.seed_of(block)))

    part = torch.empty(tuple(shape))
    fill_part(part, tuple(whole), tuple(offset), fill)
    return part


@st.composite
def cuts(draw: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """A shape, and the first and the last index of a part along each dimension."""
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    return shape, [tuple(sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in shape]


@settings(max_examples=60, deadline=None)
@given(cuts())
def test_a_part_has_the_numbers_of_the_whole(cut: tuple[list[int], list[tuple[int, int]]]) -> None:
    whole, ends = cut
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "BLOCK", 5)
        everything = drawn(whole, [0] * len(whole), whole)
        part = drawn([end - start for start, end in ends], [start for start, _ in ends], whole)
    assert torch.equal(part, everything[tuple(slice(start, end) for start, end in ends)])


def test_a_rank_draws_only_blocks_that_it_has_a_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "BLOCK", 10)
    sizes: list[int] = []
    drawn((2, 5), (5, 0), (7, 5), sizes)
    assert sizes == [10, 5]  # elements 25 to 34


def test_draws_and_blocks_have_different_seeds() -> None:
    seeds = [Draw(seed, number).seed_of(block) for seed in (0, 1) for number in (0, 1) for block in (0, 1)]
    assert len(set(seeds)) == 8
    assert Draw(1, 2).seed_of(3) == Draw(1, 2).seed_of(3)


def test_a_part_that_is_no_dense_memory_is_filled() -> None:
    part = torch.zeros(4, 3).t()
    fill_part(part, (3, 4), (0, 0), lambda block, values: values.copy_(torch.arange(12.0)))
    assert part.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
