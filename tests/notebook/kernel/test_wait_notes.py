"""Ranks that wait for others in a collective: the running cell says so unasked, and says when the wait has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.timeout(120)

WAIT = "while not os.path.exists({path!r}): time.sleep(0.01)\n"
HEAD = "import os, time, torch, torch.distributed as dist\n"


def test_a_wait_is_shown_with_the_missing_rank_until_it_ends(notebook: Notebook, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    late = f"if rank == 1:\n    {WAIT.format(path=str(gate))}dist.all_reduce(torch.ones(4))"
    cell = notebook.ok(f"%%remote --background --out run --warn-after 0.3\n{HEAD}{late}")
    cell.wait_for(lambda cell: cell.stderr)
    assert "[0] waits for 0." in cell.stderr
    assert " in all_reduce #1 (shape 4), cell [" in cell.stderr
    assert "], line 5; [1] has not started it: cell [" in cell.stderr
    assert "[0] waits for" in notebook.value("repr(t.view().waits)")
    gate.touch()
    notebook.ok("run.result()")
    cell.wait_for(
        lambda cell: cell.stderr.splitlines()[-1].startswith("[0]: the wait in all_reduce #1 (shape 4) has ended")
    )
    assert notebook.value("repr(t.view().waits)") == "()"


def test_a_receive_and_a_peer_that_has_finished(notebook: Notebook) -> None:
    cell = notebook.send(f"%%remote --warn-after 0.3\n{HEAD}if rank == 0: dist.recv(torch.ones(4), 1, tag=3)")
    cell.wait_for(lambda cell: cell.stderr)
    assert " in recv from [1] with tag 3 (shape 4), cell [" in cell.stderr
    assert "line 3; [1] has finished the cell\n" in cell.stderr
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"


def test_an_interrupt_says_what_the_ranks_waited_for(notebook: Notebook) -> None:
    cell = notebook.send(f"%%remote --warn-after 1.2\n{HEAD}if rank: dist.all_reduce(torch.ones(4))")
    cell.wait_for(lambda cell: cell.stderr)  # the wait is old enough
    notebook.interrupt()
    first, second = cell.wait().evalue.split("\n")
    assert first == "interrupted on [1]; its state is kept; [0] had finished"
    assert second.startswith("  [1] waited for 1.")
    assert " in all_reduce #" in second
    assert second.endswith("line 3; [0] had finished the cell")
