"""Ranks that wait for others in a collective: the running cell says so unasked, and says when the wait has ended."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.timeout(120)

WAIT = "while not os.path.exists({path!r}): time.sleep(0.01)\n"
HEAD = "import os, time, torch, torch.distributed as dist\n"


def test_a_wait_is_shown_with_the_missing_rank_until_it_ends(notebook: Notebook, tmp_path: Any) -> None:
    gate, here = tmp_path / "gate", str(tmp_path / "here")
    late = (
        f"if rank == 1:\n    open({here!r}, 'w').close()\n    {WAIT.format(path=str(gate))}"
        f"else:\n    {WAIT.format(path=here)}dist.all_reduce(torch.ones(4))"
    )
    cell = notebook.ok(f"%%remote --background --out run --warn-after 0.3\n{HEAD}{late}")
    cell.wait_for(lambda cell: cell.stderr)
    line = r"\[0\] waits for ([\d.]+) s in all_reduce #1 \(shape 4\), cell \[\d+\], line 8; \[1\] has not started it: cell \["
    found = re.search(line, cell.stderr)
    assert found, cell.stderr
    assert float(found[1]) >= 0.3
    assert "[0] waits for" in notebook.value("repr(t.view().waits)")
    gate.touch()
    notebook.ok("run.result()")
    cell.wait_for(
        lambda cell: cell.stderr.splitlines()[-1].startswith("[0]: the wait in all_reduce #1 (shape 4) has ended")
    )
    assert notebook.value("repr(t.view().waits)") == "()"


def test_a_receive_and_a_peer_that_has_finished(notebook: Notebook, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    late = f"if rank == 0:\n    {WAIT.format(path=str(gate))}    dist.recv(torch.ones(4), 1, tag=3)"
    cell = notebook.ok(f"%%remote --background --out run --warn-after 0.3\n{HEAD}{late}")
    wait_until(lambda: notebook.value("t.view().ranks[1].state") == "idle", "rank 1 to finish")
    gate.touch()
    cell.wait_for(lambda cell: cell.stderr)
    assert " in recv from [1] with tag 3 (shape 4), cell [" in cell.stderr
    assert "line 5; [1] has finished the cell\n" in cell.stderr
    notebook.ok("%mesh interrupt t")
    assert notebook.run("run.result()").ename == "RemoteInterrupt"


def test_an_interrupt_says_what_the_ranks_waited_for(notebook: Notebook) -> None:
    cell = notebook.send(f"%%remote --warn-after 1.2\n{HEAD}if rank: dist.all_reduce(torch.ones(4))")
    cell.wait_for(lambda cell: cell.stderr)  # the wait is old enough
    notebook.interrupt()
    first, second = cell.wait().evalue.split("\n")
    assert first == "interrupted on [1]; its state is kept; [0] had finished"
    assert re.match(r"  \[1\] waited for [\d.]+ s in all_reduce #", second), second
    assert second.endswith("line 3; [0] had finished the cell")
