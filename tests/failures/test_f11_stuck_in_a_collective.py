"""F11: ranks are stuck in a collective, or in native code; they are named, an abort frees them, and their state is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_kernel.errors import RanksError
from monarch_kernel.notebook.view.interrupts import InterruptOutcome, interrupt_text
from tests.failures.cells import Cells
from tests.support.ranks import wait_until_in_collective
from tests.support.waiting import LONG_S, wait_for_files

N = 2


def test_an_abort_frees_a_collective_and_keeps_the_state(cells: Cells, tmp_path: Path) -> None:
    cells.ok("kept = rank * 7")
    group = cells.mesh.run_cell(
        f"kept += 1\nopen({str(tmp_path / 'started')!r} + str(rank), 'w').close()\n"
        "work = dist.all_reduce(torch.ones(1)) if rank == 0 else time.sleep(600)",
        cell=4,
    )
    wait_for_files(tmp_path, "started0", "started1")
    wait_until_in_collective(cells.mesh.slice(gpus=0))
    cells.mesh.interrupt(abort=True)
    with pytest.raises(RanksError):
        group.get(LONG_S)
    cells.form()
    assert cells.ok("x = torch.ones(1); dist.all_reduce(x); (kept, x.item())") == ((1, 2.0), (8, 2.0))


def test_an_interrupt_reads_few_collectives_of_the_past(cells: Cells) -> None:
    """A read holds the GIL, and takes longer on a busy machine the more collectives torch has kept."""
    cells.ok("from monarch_kernel.train.process_group.flight_recorder import FlightRecorder")
    cells.ok("x = torch.ones(1)\nfor _ in range(600): dist.all_reduce(x)")
    assert cells.ok("len(FlightRecorder().entries())") == (500, 500)


def test_a_rank_that_does_not_stop_is_named_with_its_stack_and_what_to_do() -> None:
    doing = ["[1] cell [5], line 2: np.linalg.svd(a)", "    in gufunc(a) (numpy/linalg/_linalg.py, line 1841)"]
    text = interrupt_text(InterruptOutcome("t", stopped=[0], stuck=[1], n_ranks=2, waited_s=1.8, doing=doing))
    assert "[1] did not stop within 1.8 s" in text
    assert "[1] cell [5], line 2: np.linalg.svd(a)" in text
    assert "%mesh interrupt t[1] --abort" in text
    assert "%mesh restart t[1] replaces it" in text
