"""F13: memory runs out; the error says how much was asked for, held and free, and by which variables."""

from __future__ import annotations

from tests.failures.cells import Cells


def test_sizes_and_the_largest_variables_are_named(cells: Cells) -> None:
    text = cells.fails("big = torch.zeros(4 << 20)\nhuge = torch.empty(1 << 60)")
    assert "you tried to allocate 4611686018427387904 bytes" in text
    assert "16 MiB big: Tensor[4194304] float32 cpu" in text
    assert "the process held" in text
    assert "free when this was reported" in text
    cells.ok("del big")
