"""F47: native code of a rank holds the GIL, or its process is stopped; the line says so, and what can be done."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from monarch_kernel.base.events import MeshView, RankView
from monarch_kernel.errors import Failure
from monarch_kernel.notebook.cells.inspection import Inspection
from monarch_kernel.notebook.view.interrupts import InterruptOutcome, interrupt_text
from monarch_kernel.notebook.view.stacks import doing_lines
from monarch_kernel.runtime.diagnostics.dumped_stacks import HELD
from monarch_kernel.runtime.diagnostics.stacks import Collective, Doing
from monarch_kernel.runtime.diagnostics.waits import stalls
from tests.failures.cells import Cells
from tests.support.waiting import LONG_S, wait_until

HOLDS = """
import ctypes, os
if rank == 1:
    empty, _ = os.pipe()
    open({path!r}, 'w').close()
    ctypes.PyDLL(None).read(empty, ctypes.create_string_buffer(1), 1)
"""


def stacks_of(cells: Cells, rank: int) -> dict[int, Doing]:
    return cells.mesh.silent_stacks([rank], LONG_S)


def waits_of(cells: Cells) -> str:
    """What a cell that runs long says of waits now."""
    look = Inspection(cells.mesh, time.monotonic())
    doing = wait_until(lambda: look.poll(time.monotonic()), "what the ranks do")
    return "\n".join(stall.text for stall in stalls(cells.mesh.view(), doing, (), 0.0))


def test_the_rank_that_does_not_answer_is_named() -> None:
    view = MeshView("t", (("gpus", 2),), tuple(RankView(i, (("gpus", i),), "running") for i in range(2)))
    waits = Doing((), (Collective("all_reduce", 3, "", (0, 1), "4", 12.0),), {"": 3})
    (stall,) = stalls(view, {0: waits, 1: Failure("interrupted", "CancelledError", "")}, (), 10.0)
    assert "[1] has not answered: what runs there is not known" in stall.text


def test_the_way_out_is_named() -> None:
    text = interrupt_text(InterruptOutcome("t", stopped=[0], stuck=[1], n_ranks=2, waited_s=1.8))
    assert "%mesh restart t[1] replaces it, and its state is lost; the other ranks keep theirs" in text


def test_a_stopped_process_that_others_wait_for_is_named(cells: Cells) -> None:
    pid = cells.mesh.view().ranks[1].pid
    says = f"stopped by a signal, such as SIGSTOP (kill -CONT {pid} lets it go on)"
    os.kill(pid, signal.SIGSTOP)
    try:
        waits = cells.mesh.run_cell("dist.all_reduce(torch.ones(4))", cell=47)
        wait_until(lambda: f"; [1] is {says}" in waits_of(cells), "the line about the wait")
        assert doing_lines(cells.mesh.view(), stacks_of(cells, 1), [1]) == [f"[1] is {says}, while it runs cell [47]"]
    finally:
        os.kill(pid, signal.SIGCONT)
    waits.get(LONG_S)


def test_its_line_is_read_from_outside_and_the_other_ranks_go_on(cells: Cells, tmp_path: Path) -> None:
    stuck = cells.mesh.run_cell(HOLDS.format(path=f"{tmp_path}/started"), cell=47)
    wait_until((tmp_path / "started").exists, "the native code to run")

    def lines() -> list[str]:
        """Ask again: the rank may just have made the file, and the agent waits for its stacks only briefly."""
        return doing_lines(cells.mesh.view(), stacks_of(cells, 1), [1])

    expected = ["[1] cell [47], line 6", f"    its collectives are not known: {HELD}"]
    wait_until(lambda: lines() == expected, "the line of the native code")
    assert cells.mesh.slice(gpus=0).run("rank").get(LONG_S).item() == 0
    assert cells.mesh.view().ranks[1].state == "running"  # the signal has not harmed it
    stuck.cancel()
