"""The picture of placements names the ranks of each part, as torch places them."""

from __future__ import annotations

import pytest
import torch

from monarch_kernel.tensor.picture import Picture, boxes_of

AXES = {"dp": 2, "tp": 2}


def picture(shape: tuple[int, ...], *placements: str) -> Picture:
    return Picture(shape, placements, AXES, (0, 1, 2, 3))


def test_parts_of_partial_sums_are_added() -> None:
    assert repr(picture((4096, 512), "S(0)", "P(sum)")) == (
        "rows 0-2047     ranks 0+1 (sum)\nrows 2048-4095  ranks 2+3 (sum)"
    )
    assert repr(picture((2, 2), "R", "P(sum)")) == "all of it  ranks 0+1,2+3 (sum)"


def test_two_dimensions_are_a_grid() -> None:
    assert repr(picture((4, 6), "S(0)", "S(1)")).splitlines() == [
        "          columns 0-2  columns 3-5",
        "rows 0-1  rank 0       rank 1",
        "rows 2-3  rank 2       rank 3",
    ]
    assert repr(picture((8, 2, 3), "S(0)", "S(0)")).splitlines()[1] == "dim 0 2-3  rank 1"
    assert repr(picture((8, 2), "S(1)", "R")) == "columns 0  ranks 0,1\ncolumns 1  ranks 2,3"


def test_parts_along_three_dimensions_are_a_list() -> None:
    cube = Picture((2, 2, 2), ("S(0)", "S(1)", "S(2)"), {"a": 2, "b": 2, "c": 2}, tuple(range(8)))
    assert repr(cube).splitlines()[:3] == [
        "part             ranks",
        "[0:1, 0:1, 0:1]  rank 0",
        "[0:1, 0:1, 1:2]  rank 1",
    ]


@pytest.mark.parametrize("size", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_uneven_parts_are_cut_as_torch_cuts_them(size: int, count: int) -> None:
    chunks = [len(each) for each in torch.arange(size).chunk(count)] if size else []
    boxes = boxes_of((size,), ("S(0)",), (count,))
    assert [end - start for ((start, end),) in boxes] == chunks + [0] * (count - len(chunks))


def test_html_colours_parts_by_their_ranks() -> None:
    html = picture((4, 6), "S(0)", "S(1)")._repr_html_()
    assert html.count("<td") == 4
    assert len({part.split(",")[0] for part in html.split("hsla(")[1:]}) == 4
    assert picture((4, 6), "S(0)", "R")._repr_html_().count("<td") == 2, (
        "a picture without a head colours its first row"
    )
