"""F54: pools, processes that are terminated, and loader workers in cells, again and again: nothing hangs."""

from __future__ import annotations

import pytest

from tests.failures.cells import Cells

POOLS = """
import multiprocessing as mp, concurrent.futures as futures
def square(x): return x * x
for turn in range({n}):
    with mp.Pool(2) as pool: assert pool.map(square, range(4)) == [0, 1, 4, 9]
    process = mp.Process(target=time.sleep, args=(600,)); process.start(); process.terminate(); process.join()
    with futures.ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as pool: assert list(pool.map(square, [3])) == [9]
turn
"""


def test_pools_and_processes_end(cells: Cells) -> None:
    assert cells.ok(POOLS.format(n=3)) == (2, 2)


@pytest.mark.slow
def test_pools_and_processes_end_many_times(cells: Cells) -> None:
    assert cells.ok(POOLS.format(n=50)) == (49, 49)
