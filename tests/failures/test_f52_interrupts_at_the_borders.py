"""F52: an interrupt arrives in the first or the last moments of a cell; it is never lost, and never hits the next cell."""

from __future__ import annotations

import pytest

from monarch_kernel.errors import RanksError, RemoteInterrupt
from tests.failures.cells import Cells
from tests.support.waiting import LONG_S


def test_an_interrupt_directly_after_the_start_stops_the_cell(cells: Cells) -> None:
    for _ in range(20):
        future = cells.mesh.run("while True: pass")
        future.interrupt()
        with pytest.raises((RanksError, RemoteInterrupt)):
            future.get(LONG_S)


def test_an_interrupt_at_the_end_does_not_hit_the_next_cell(cells: Cells) -> None:
    for turn in range(20):
        future = cells.mesh.run("sum(range(1000))")
        future.interrupt()
        assert cells.mesh.run(f"sum(range(1000)) + {turn}").get(LONG_S).values() == (499500 + turn,) * 2
        future.exception(LONG_S)
