"""Waits of a notebook for actors: a note under the cell after a while, and an error for waits that can never end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook.kernel.conftest import Notebook
from tests.support.waiting import wait_until

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


CALLERS = """
from monarch_kernel.actor import Actor, current_rank, endpoint

class Trainer(Actor):
    @endpoint
    def sync(self, gate):
        import os, time, torch, torch.distributed as dist
        while current_rank().rank == 1 and not os.path.exists(gate): time.sleep(0.01)
        dist.all_reduce(torch.ones(4))

    @endpoint
    def fetch(self, other, gate):
        return other.sleep.call_one(gate).get()

class Source(Actor):
    @endpoint
    def sleep(self, gate):
        import os, time
        while not os.path.exists(gate): time.sleep(0.01)

trainer, source = w.spawn("trainer", Trainer), w.spawn("source", Source)
trainer.initialized.get()
"""


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("trainer.sync.call({gate!r})", r"\[0\] waits for .* in all_reduce #\d+ \(shape 4\), actor trainer: "),
        (
            "trainer.slice(gpus=0).fetch.call_one(source.slice(gpus=1), {gate!r})",
            r"\[0\] waits for .* for source.sleep of \[1\], actor trainer: .*; \[1\] is at actor source: ",
        ),
    ],
)
def test_the_view_shows_waits_in_calls_of_actors(notebook: Notebook, tmp_path: Path, call: str, text: str) -> None:
    notebook.ok("%mesh up w -n 2 --warn-after 0.3")
    notebook.ok("%%remote w\nimport torch")  # with the process group
    notebook.ok(CALLERS)
    gate = tmp_path / "gate"
    notebook.ok(f"call = {call.format(gate=str(gate))}")
    wait_until(lambda: notebook.value("w.view().waits != ()"), "the view to show the wait")
    assert re.match(text, notebook.value("w.view().waits[0].text"))
    assert notebook.value("w.view().waits[0][1:]") == ((0,), (1,))
    gate.touch()
    notebook.ok("call.get()")
    wait_until(lambda: notebook.value("w.view().waits == ()"), "the end of the wait in the view")
    notebook.ok("%mesh down w")


def test_a_deadlock_of_actors_is_an_error_of_the_cell(notebook: Notebook) -> None:
    notebook.ok(ACTORS)
    cell = notebook.run("a, b = slow.slice(gpus=0), slow.slice(gpus=1)\na.go.call_one(b, a).get()")
    assert cell.ename == "ActorError"
    assert "DeadlockError: calls wait for each other in a circle" in cell.error
    assert "slow.go on t[0]" in cell.error
    assert "slow.go on t[1]" in cell.error
    assert notebook.ok("await a.go.call_one(b)").text.strip() == "'the end'"
