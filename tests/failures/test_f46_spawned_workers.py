"""F46: a rank starts workers by fork and by spawn; they have the cell's code, or the error says why not."""

from __future__ import annotations

import pytest

from tests.failures.cells import Cells

PREPARE = """
import multiprocessing as mp
def square(x): return x * x
"""
MAP = "with mp.get_context({how!r}).Pool(1) as pool:\n    squares = pool.map(square, range(4))\nsquares"


def test_a_forked_pool_runs_functions_of_cells(cells: Cells) -> None:
    cells.ok(PREPARE)
    assert cells.ok(MAP.format(how="fork")) == ([0, 1, 4, 9],) * 2


@pytest.mark.slow
def test_a_spawned_pool_runs_functions_of_cells(cells: Cells) -> None:
    cells.ok(PREPARE)
    assert cells.ok(MAP.format(how="spawn")) == ([0, 1, 4, 9],) * 2


@pytest.mark.slow
def test_a_function_that_a_worker_does_not_have_is_named(cells: Cells) -> None:
    cells.ok(PREPARE + "pool = mp.get_context('spawn').Pool(1)\npool.map(square, [1])\ndef late(x): return x")
    text = cells.fails("pool.map(late, [1])")
    assert "does not have 'late' of a cell: it was defined after" in text
    cells.ok("pool.terminate()")
