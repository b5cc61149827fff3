"""F31: a rank calls a collective on another group than the others; the line names the group, its ranks and both places."""

from __future__ import annotations

from tests.failures.cells import Cells

N = 4


def test_the_group_and_both_places_are_named(cells: Cells) -> None:
    cells.ok("pair = dist.new_group([0, 1]); rest = dist.new_group([2, 3])")
    with cells.waits(
        "x = torch.ones(3)\ndist.all_reduce(x, group=pair if rank == 0 else None)", says=("[1-3] wait", "[0] waits")
    ) as told:
        assert "all_reduce #1 of group" in told
        assert "[0-1]" in told
        assert told.count(f"cell [{cells.number}], line 2") >= 2
