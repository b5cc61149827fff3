"""F05: ranks call different collectives, or in another order; both calls and lines are named by rank."""

from __future__ import annotations

from tests.failures.cells import Cells


def test_both_calls_are_named_with_their_lines(cells: Cells) -> None:
    text = cells.fails("x = torch.ones(4)\nif rank == 0:\n    dist.all_reduce(x)\nelse:\n    dist.broadcast(x, 1)")
    assert "CollectiveError: the ranks of the default process group call different collectives" in text
    assert f"[0] all_reduce of float32 (4), sum: cell [{cells.number}], line 3" in text
    assert f"[1] broadcast of float32 (4), from rank 1: cell [{cells.number}], line 5" in text
    cells.form()
