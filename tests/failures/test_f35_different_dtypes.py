"""F35: a collective has as many bytes but other dtypes on some rank; it is refused before bytes move."""

from __future__ import annotations

import pytest

from tests.failures.cells import Cells

CASES = {
    "x = torch.ones(4, dtype=torch.int32 if rank else torch.float32); dist.all_reduce(x)": ("float32 (4)", "int32 (4)"),
    "x = torch.ones(2) if rank else torch.ones(1, dtype=torch.float64); dist.broadcast(x, 0)": (
        "float64 (1)",
        "float32 (2)",
    ),
}


@pytest.mark.parametrize("code", CASES)
def test_the_dtypes_are_named_and_values_are_kept(cells: Cells, code: str) -> None:
    text = cells.fails(code)
    assert "with different dtypes" in text
    assert "it was refused" in text
    for rank, what in enumerate(CASES[code]):
        assert f"[{rank}] {'broadcast' if 'broadcast' in code else 'all_reduce'} of {what}" in text
    assert cells.ok("x.sum().item() == x.numel()") == (True, True)
    cells.form()
