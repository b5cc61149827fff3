"""F06: ranks call one collective with different shapes; it is refused with the shapes by rank."""

from __future__ import annotations

from tests.failures.cells import Cells


def test_the_shapes_are_named_by_rank(cells: Cells) -> None:
    text = cells.fails("x = torch.ones((2, 6) if rank else (3, 4))\ndist.all_reduce(x)")
    assert "call all_reduce with different shapes" in text
    assert "[0] all_reduce of float32 (3, 4), sum" in text
    assert "[1] all_reduce of float32 (2, 6), sum" in text
    cells.form()
