"""F14: a module gets a tensor of another dtype or device; the error has the module's full name and both tensors."""

from __future__ import annotations

import pytest

from tests.failures.cells import Cells


@pytest.mark.parametrize(
    ("how", "given"),
    [("dtype=torch.bfloat16", "bfloat16 cpu"), pytest.param("device='meta'", "float32 meta", marks=pytest.mark.slow)],
)
def test_the_module_and_both_tensors_are_named(cells: Cells, how: str, given: str) -> None:
    cells.ok(
        "net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ModuleDict({'out': torch.nn.Linear(4, 2)})['out'])"
    )
    text = cells.fails(f"net(torch.ones(3, 4, {how}))")
    assert f"in 0 (Linear), called with input: Tensor[3, 4] {given}" in text
    assert "0.weight: Parameter[4, 4] float32 cpu" in text
