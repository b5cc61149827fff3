"""F01: one rank of four raises; the error names the rank, the line and the tensors there, and the other results are kept."""

from __future__ import annotations

import pytest

from monarch_kernel.errors import RemoteError
from tests.failures.cells import Cells, shown
from tests.support.waiting import LONG_S

N = 4


def test_the_error_names_rank_line_and_shapes(cells: Cells) -> None:
    cells.ok("x, w = torch.zeros(4, 16), torch.zeros(8, 2)")
    code = "y = rank\nif rank == 2:\n    y = x @ w\ny"
    with pytest.raises(RemoteError) as caught:
        cells.mesh.run_cell(code, cell=7, want_value=True).get(LONG_S)
    text = shown(caught.value)
    assert "[2] RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x16 and 8x2)" in text
    assert "remote cell [7], line 3" in text
    assert "x: Tensor[4, 16] float32 cpu" in text
    assert "w: Tensor[8, 2] float32 cpu" in text
    assert "[0-1,3] finished" in text
    assert sorted(point.rank for point in caught.value.results) == [0, 1, 3]
