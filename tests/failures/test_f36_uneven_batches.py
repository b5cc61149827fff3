"""F36: one rank has a batch less than the others; the line names it, and the step in which the others wait."""

from __future__ import annotations

from tests.failures.cells import Cells

N = 4


def test_the_rank_that_ended_early_is_named(cells: Cells) -> None:
    cells.ok("step = None")
    code = "for step in range(4 if rank == 2 else 5):\n    x = torch.ones(1); dist.all_reduce(x)"
    with cells.waits(code, 2, says=("[0-1,3] wait for", "[2]")) as told:
        assert "all_reduce #5 (shape 1)" in told
        assert f"cell [{cells.number}], line 2, step = 4" in told
        assert "; [2] has finished the cell with step = 3" in told
