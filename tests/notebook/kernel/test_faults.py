"""A failure that no actor handles is shown in the notebook, and fails only the cells that need what has failed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.notebook.kernel.conftest import ANSI, Cell, Notebook

ACTORS = """
import time
from monarch_kernel.actor import Actor, endpoint, this_host

class Worker(Actor):
    @endpoint
    def fail(self, text):
        raise ValueError(text)

    @endpoint
    def ok(self):
        return 1

class Boss(Actor):
    @endpoint
    def hire(self, procs):
        self.workers = procs.spawn("workers", Worker)
        return self.workers
"""


@pytest.fixture(scope="module")
def book(notebook: Notebook) -> Notebook:
    notebook.ok(ACTORS)
    return notebook


def plain(*cells: Cell) -> str:
    return ANSI.sub("", "".join(cell.stderr for cell in cells))


def shows(cell: Cell, text: str) -> None:
    cell.wait_for(lambda cell: text in plain(cell))


BUSY = "import os\nwhile not os.path.exists({gate!r}): time.sleep(0.01)\nprint('went on')"
HOOKED = """
import monarch_kernel.actor
before = monarch_kernel.actor.unhandled_fault_hook
found = []
monarch_kernel.actor.unhandled_fault_hook = found.append
lone.fail.broadcast("mine")
while not found: time.sleep(0.01)
monarch_kernel.actor.unhandled_fault_hook = before
"""
TWO_LINES = """
class Two(Actor):
    @endpoint
    def first(self):
        raise ValueError('no good')

    @endpoint
    def second(self):
        raise ValueError('no good')
two = t.slice(gpus=1).spawn('two', Two)
"""
LONE = "lone = t.slice(gpus=1).spawn('lone', Worker); lone.ok.call_one().get()"


def test_a_failure_is_shown_in_the_running_cell_which_continues(book: Notebook, tmp_path: Path) -> None:
    book.ok(LONE)
    cell = book.send("lone.fail.broadcast('nobody asked')\n" + BUSY.format(gate=str(tmp_path / "gate")))
    shows(cell, "ValueError: nobody asked")
    assert not cell.idle
    (tmp_path / "gate").touch()
    cell.wait()
    assert cell.ok
    assert cell.stdout == "went on\n"
    assert "MeshFailure: lone[0] failed, and no actor handled the failure" in plain(cell)
    after = book.run("lone.ok.call_one().get()")
    assert after.ename == "SupervisionError"
    assert "nobody asked" in after.error


def test_a_failure_is_shown_in_the_last_cell_if_none_runs(book: Notebook) -> None:
    book.ok(LONE)
    cell = book.ok("lone.fail.broadcast('much later')")
    shows(cell, "ValueError: much later")


def test_a_failure_is_not_shown_twice_if_a_cell_waits_for_it(book: Notebook) -> None:
    book.ok(LONE)
    book.ok(
        "def leave(self): raise SystemExit(3)\nWorker.leave = endpoint(leave)\nother = t.slice(gpus=1).spawn('other', Worker)"
    )
    cell = book.run("other.leave.call_one().get()")
    assert cell.ename == "ActorError"
    probe = book.ok("lone.fail.broadcast('the next one')")
    shows(probe, "the next one")
    assert "SystemExit" not in plain(cell, probe)


def test_an_equal_error_of_another_line_is_shown_too(book: Notebook) -> None:
    book.ok(TWO_LINES)
    assert "ValueError: no good" in book.run("two.first.call_one().get()").error
    shows(book.ok("two.second.broadcast()"), ", in second")


def test_the_chain_of_causes_is_shown(book: Notebook) -> None:
    book.ok("boss = t.slice(gpus=0).spawn('boss', Boss); workers = boss.hire.call_one(t.slice(gpus=1)).get()")
    book.ok("workers.ok.call().get()")
    cell = book.ok("workers.fail.broadcast('below')")
    shows(cell, "caused by: workers[0] failed")
    assert "MeshFailure: boss[0] failed, and no actor handled the failure" in plain(cell)
    assert "actor 'boss' did not handle the failure of workers[0]" in plain(cell)
    assert "raise ValueError(text)" in plain(cell)


def test_a_user_hook_is_called_instead(book: Notebook) -> None:
    book.ok(LONE)
    cell = book.ok(HOOKED)
    assert book.value("(len(found), found[0].mesh is lone, found[0].crashed_ranks)") == (1, True, (0,))
    assert not cell.stderr


def test_the_death_of_an_idle_process_is_shown(book: Notebook) -> None:
    book.ok("%mesh up u -n 2 --device cpu", 60.0)
    os.kill(book.pids("u")[1], signal.SIGKILL)
    book.sync()
    cell = next(reversed(book.cells.values()))
    cell.wait_for(lambda _: "MeshFailure: u[1] died" in plain(*book.cells.values()))
    everything = plain(*book.cells.values())
    _, *shown = everything.split("MeshFailure: u[1] died")
    (text,) = shown  # once
    assert "killed by SIGKILL" in text
    assert "Cells and calls that need u[1] fail until it is replaced." in text
    assert "actor" not in text
    assert book.run("%%remote u[0]\n1").ok
    book.ok("%mesh down u")


def test_a_death_that_a_cell_needs_is_shown_only_by_that_cell(book: Notebook) -> None:
    book.ok("%mesh up u -n 2 --device cpu\nlone = u.spawn('lone', Worker); lone.ok.call().get()", 60.0)
    cell = book.run("%%remote u[1]\nimport os; os._exit(9)")
    assert "exit code 9" in cell.error
    book.ok("time.sleep(0.6)")  # time to show the failure again
    assert "exit code 9" not in plain(*book.cells.values())
    book.ok("%mesh down u")


def test_failures_caused_by_one_death_are_shown_in_full_once(book: Notebook) -> None:
    book.ok("%mesh up u -n 2 --device cpu\nones, twos = u.spawn('ones', Worker), u.spawn('twos', Worker)", 60.0)
    book.ok("ones.ok.call().get(), twos.ok.call().get()")
    os.kill(book.pids("u")[1], signal.SIGKILL)
    last = next(reversed(book.cells.values()))
    last.wait_for(lambda _: "twos[1] failed" in plain(*book.cells.values()))
    everything = plain(*book.cells.values())
    assert everything.count("MeshFailure: ones[1] failed, and no actor handled the failure") == 1
    assert (
        everything.count(
            "twos[1] failed for the same reason, and no actor handled the failure: RankDied: killed by SIG"
        )
        == 1
    )
    assert "%mesh heal u puts a new process in place of [1]; the other keeps its state" in everything
    book.ok("%mesh down u")


def test_a_hook_that_fails_hides_nothing(book: Notebook) -> None:
    book.ok(LONE)
    code = HOOKED.replace(
        "found = []", "def bad(failure): found.append(failure); raise SystemExit('enough')\nfound = []"
    )
    cell = book.ok(code.replace("= found.append", "= bad"))
    shows(cell, "unhandled failure: lone[0] failed: ValueError: mine")
    assert "unhandled_fault_hook failed:" in plain(cell)
    assert "SystemExit: enough" in plain(cell)
    assert "monarch_kernel/" not in plain(cell)


def test_places_in_quoted_errors_have_their_cell_numbers(book: Notebook) -> None:
    book.ok(LONE)
    book.ok("""class Caller(Actor):
    @endpoint
    def call(self, worker):
        worker.fail.call_one("below").get()
""")
    cell = book.run("t.slice(gpus=0).spawn('caller', Caller).call.call_one(lone).get()")
    assert "ValueError: below (notebook cell [" in cell.error
    assert "ipykernel_" not in cell.error


def test_ranks_that_fail_one_after_the_other_are_shown_together(book: Notebook) -> None:
    book.ok("both = t.spawn('both', Worker); both.ok.call().get()")
    # A longer hold, since the second failure may come late on a busy machine.
    book.ok("from monarch_kernel.notebook.magics import unhandled; held_s, unhandled._HOLD_S = unhandled._HOLD_S, 3")
    code = "both.slice(gpus=0).fail.broadcast('alike'); time.sleep(0.1); both.slice(gpus=1).fail.broadcast('alike')\n"
    cell = book.ok(code)
    shows(cell, "MeshFailure: both[0-1] failed, and no actor handled the failure")
    book.ok("unhandled._HOLD_S = held_s")
    assert plain(cell).count("ValueError: alike") == 1
