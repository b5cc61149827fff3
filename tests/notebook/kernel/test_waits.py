"""Waits of a notebook for actors: a note under the cell after a while, and an error for waits that can never end."""

from __future__ import annotations

import re
from pathlib import Path

from tests.notebook.kernel.conftest import Notebook

ACTORS = """
import asyncio, os, time
from monarch_kernel.actor import Actor, current_rank, endpoint

class Slow(Actor):
    @endpoint
    def load(self, gate):
        while current_rank().rank == 1 and not os.path.exists(gate):
            time.sleep(0.01)

    @endpoint
    def go(self, *way):
        return way[0].go.call_one(*way[1:]).get() if way else "the end"

slow = t.spawn("slow", Slow)
slow.initialized.get()
"""


def test_a_cell_that_waits_long_names_the_ranks(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok(ACTORS)
    gate = tmp_path / "gate"
    cell = notebook.send(f"slow.load.call({str(gate)!r}).get(warn_after_s=0.4)")
    cell.wait_for(lambda cell: "in load: " in cell.stderr)
    gate.touch()
    assert cell.wait().ok
    assert re.match(r"slow\.load: no answer for \d+\.\d+ s from \[1\] of 2\n", cell.stderr), cell.stderr
    assert cell.stderr.count("no answer") == 1


def test_a_deadlock_of_actors_is_an_error_of_the_cell(notebook: Notebook) -> None:
    notebook.ok(ACTORS)
    cell = notebook.run("a, b = slow.slice(gpus=0), slow.slice(gpus=1)\na.go.call_one(b, a).get()")
    assert cell.ename == "ActorError"
    assert "DeadlockError: calls wait for each other in a circle" in cell.error
    assert "slow.go on t[0]" in cell.error
    assert "slow.go on t[1]" in cell.error
    assert notebook.ok("await a.go.call_one(b)").text.strip() == "'the end'"
