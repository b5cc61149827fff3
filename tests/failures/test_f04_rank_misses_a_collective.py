"""F04: one rank never calls a collective; the cell says which ranks wait, in what, and where the missing rank is."""

from __future__ import annotations

from tests.failures.cells import Cells

N = 4


def test_the_missing_rank_and_its_line_are_named(cells: Cells) -> None:
    code = "x = torch.ones(4)\nif rank == 2:\n    while True: time.sleep(0.01)\ndist.all_reduce(x)"
    with cells.waits(code, says=("[0-1,3] wait for", "[2]")) as told:
        assert f"in all_reduce #1 (shape 4), cell [{cells.number}], line 4" in told
        assert f"cell [{cells.number}], line 3" in told
    assert cells.ok("x = torch.ones(1); dist.all_reduce(x); x.item()") == (4.0,) * 4
