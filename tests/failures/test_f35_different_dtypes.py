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


# gloo takes as much of the memory of these tensors as they have elements.
TURNED = "x = torch.arange(6.).reshape(2, 3).t() if rank else torch.arange(6.).reshape(3, 2)"


@pytest.mark.parametrize("call", ["dist.all_reduce(x)", "dist.broadcast(x, 0)", "dist.reduce(x, 1)"])
def test_ranks_with_other_strides_are_refused(cells: Cells, call: str) -> None:
    text = cells.fails(f"{TURNED}; before = x.clone(); {call}")
    assert f"call {call[5:].partition('(')[0]} with different strides" in text
    assert "of float32 (3, 2) with strides (1, 3)" in text
    assert cells.ok("torch.equal(x, before)") == (True, True)
    cells.form()


COLUMN = "x = torch.arange(8.).reshape(4, 2)[:, 0]"
OF_MEMORY = (
    "dist.all_reduce(x)",
    "dist.broadcast(x, 0)",
    "dist.reduce(x, 0)",
    "dist.scatter(x, [torch.ones(4)] * 2 if rank == 0 else None, 0)",
    "dist.scatter(torch.zeros(4), [x, x] if rank == 0 else None, 0)",
    "dist.reduce_scatter(torch.zeros(4), [x, x])",
)


@pytest.mark.parametrize("call", OF_MEMORY)
def test_a_tensor_with_gaps_is_refused(cells: Cells, call: str) -> None:
    text = cells.fails(f"{COLUMN}; before = x.clone(); {call}")
    assert "of float32 (4) with strides (2), which is not contiguous" in text
    assert "x = x.contiguous()" in text
    assert cells.ok("torch.equal(x, before)") == (True, True)
    cells.form()


def test_tensors_with_gaps_are_sent_where_they_are_copied(cells: Cells) -> None:
    cells.ok(f"{COLUMN}; from torch.distributed import _functional_collectives as functional")
    assert cells.ok("torch.equal(functional.all_reduce(x, 'sum', dist.group.WORLD) / 2, x)") == (True, True)
    for call in ("dist.all_gather([a, b], x)", "dist.gather(x, [a, b] if rank == 0 else None, 0)"):
        assert cells.ok(f"a, b = torch.zeros(4), torch.zeros(4); {call}; torch.equal(a, x) or rank > 0") == (True, True)
    turned = "y = torch.arange(4.0).reshape(2, 2).t(); before = y.clone()"
    assert cells.ok(f"{turned}; dist.all_reduce(y); torch.equal(y, 2 * before)") == (True, True)
