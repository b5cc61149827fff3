"""Waits of a notebook for actors: what is shown under the cell when they take long, and when they could never end."""

from __future__ import annotations

from tests.kernel.conftest import Notebook

ACTORS = """
import asyncio, time
from monarch_kernel.actor import Actor, current_rank, endpoint

class Slow(Actor):
    @endpoint
    def load(self, seconds):
        if current_rank().rank == 1:
            time.sleep(seconds)

    @endpoint
    def go(self, *way):
        return way[0].go.call_one(*way[1:]).get() if way else "the end"

slow = t.spawn("slow", Slow)
slow.initialized.get()
"""


def test_a_cell_that_waits_for_long_says_for_whom(notebook: Notebook) -> None:
    notebook.ok(ACTORS)
    cell = notebook.ok("slow.load.call(1.0).get(warn_after_s=0.4)")
    assert cell.stderr.startswith("slow.load: no answer for 0.")
    assert " s from [1] of 2\n" in cell.stderr
    assert "in load: time.sleep(seconds)" in cell.stderr
    assert cell.stderr.count("no answer") == 1


def test_actors_that_wait_for_each_other_are_an_error_of_the_cell(notebook: Notebook) -> None:
    notebook.ok(ACTORS)
    cell = notebook.run("a, b = slow.slice(gpus=0), slow.slice(gpus=1)\na.go.call_one(b, a).get()")
    assert cell.ename == "ActorError"
    assert "DeadlockError: calls wait for each other in a circle" in cell.error
    assert "slow.go on t[0]" in cell.error
    assert "slow.go on t[1]" in cell.error
    assert notebook.ok("await a.go.call_one(b)").text.strip() == "'the end'"
