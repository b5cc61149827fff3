"""Ranks that die and are replaced from the notebook: other ranks keep their state; actors and process groups work again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.notebook.kernel.conftest import Notebook
from tests.support.timing import Bar
from tests.support.waiting import wait_until

ALL_REDUCE = """%%remote d
import torch, torch.distributed as dist
x = torch.tensor([float(rank)]); dist.all_reduce(x); print(x.item())
"""
ACTOR = """
from monarch_kernel.actor import Actor, endpoint
class Counter(Actor):
    def __init__(self, begin):
        self.n = begin
    @endpoint
    def add(self):
        self.n += 1
        return self.n
counter = d.spawn('counter', Counter, 10)
counter.add.call().get().values()
"""


@pytest.fixture
def doomed(notebook: Notebook) -> Iterator[Notebook]:
    """The notebook, with a mesh ``d`` of four ranks for this test only."""
    notebook.ok("%mesh up d -n 4 --device cpu")
    yield notebook
    notebook.ok("%mesh down d")


def kill(notebook: Notebook, rank: int, mesh: str = "d") -> int:
    """Kill a rank, and wait until the controller knows of its death."""
    pid = notebook.pids(mesh)[rank]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: rank in notebook.value(f"list({mesh}.deaths())"), "the news of the death")
    return pid


def test_other_dead_ranks_are_not_listed_as_keeping_variables(doomed: Notebook) -> None:
    kill(doomed, 1)
    kill(doomed, 2)
    said = doomed.ok("%mesh heal d[2]").stdout
    assert "it has no variables yet, [0,3] kept theirs" in said


def test_dead_ranks_are_replaced_and_the_others_keep_their_variables(doomed: Notebook) -> None:
    doomed.ok("%%remote d\nstate = rank * 10")
    before = doomed.pids("d")
    kill(doomed, 2)
    assert "3 idle, 1 dead" in doomed.ok("%mesh").stdout
    said = doomed.ok("%mesh heal d").stdout
    assert re.match(r"d: \[2\] replaced in \d+\.\d", said), said
    assert "it has no variables yet, [0-1,3] kept theirs" in said
    after = doomed.pids("d")
    assert [a == b for a, b in zip(before, after)] == [True, True, False, True]
    cell = doomed.run("%%remote d\nstate")
    assert "[2] NameError: name 'state' is not defined" in cell.error
    assert "state is on [0-1,3] of d only" in cell.error
    assert "[2] of d started again, in place of processes that ended" in cell.error
    assert "restarts" in doomed.ok("%mesh show d").text
    assert doomed.ok("%%remote d[[0, 1, 3]]\nstate").plain == "[0] 0\n[1] 10\n[3] 30"
    assert doomed.ok("%%remote d\nrank, world_size, local_rank").plain.splitlines()[2] == "[2] (2, 4, 2)"


def test_the_process_group_is_formed_again(doomed: Notebook, bar: Bar) -> None:
    assert set(doomed.ok(ALL_REDUCE).stdout.split()) == {"[0-3]", "6.0"}
    kill(doomed, 1)
    with bar.below(2.0, "%mesh heal"):
        said = doomed.ok("%mesh heal").stdout
    assert re.search(r"process group formed again in \d\.\d\d s", said), said
    assert set(doomed.ok(ALL_REDUCE).stdout.split()) == {"[0-3]", "6.0"}


def test_a_rank_that_dies_in_a_collective_is_replaced(doomed: Notebook) -> None:
    cell = doomed.run(
        "%%remote d\nimport os, torch, torch.distributed as dist\nkept = 5\nif rank == 3: os._exit(3)\n"
        "dist.all_reduce(torch.ones(1))"
    )
    assert cell.ename == "SupervisionError"
    assert "%mesh heal d puts a new process in place of [3]; the others keep their state" in cell.error
    doomed.ok("%mesh heal d")
    assert set(doomed.ok(ALL_REDUCE).stdout.split()) == {"[0-3]", "6.0"}
    assert doomed.ok("%%remote d[:3]\nkept").plain == "[0-2] 5"


def test_actors_of_the_notebook_are_created_again(doomed: Notebook) -> None:
    assert doomed.ok(ACTOR).plain == "(11, 11, 11, 11)"
    kill(doomed, 0)
    refused = doomed.run("counter.add.call().get()")
    assert "it was not sent, because [0] is gone; slice it out\n" in refused.error
    assert refused.error.count("heal") == 1, "%mesh heal d ..."
    of_all = doomed.run("%mesh torchrun d -m a_script")
    assert "it was not sent, because [0] is gone, and it needs all ranks\n" in of_all.error
    doomed.ok("d.heal().get()")
    assert doomed.ok("counter.add.call().get().values()").plain == "(11, 12, 12, 12)"
    doomed.ok("counter.stop().get()")
    kill(doomed, 0)
    doomed.ok("%mesh heal d")
    assert doomed.run("counter.add.call().get()").ename == "SupervisionError"


def test_an_actor_is_created_again_with_its_current_class(doomed: Notebook) -> None:
    doomed.ok(ACTOR)
    doomed.ok(ACTOR.partition("counter = ")[0].replace("self.n += 1", "self.n += 100") + "counter.reload()")
    assert doomed.ok("counter.add.call().get().values()").plain == "(111, 111, 111, 111)"
    kill(doomed, 2)
    doomed.ok("%mesh heal d")
    assert doomed.ok("counter.add.call().get().values()").plain == "(211, 211, 110, 211)"


def test_a_mesh_with_dead_ranks_is_not_brought_up_again(doomed: Notebook) -> None:
    kill(doomed, 3)
    cell = doomed.run("%mesh up d -n 4 --device cpu")
    assert "'d' is already up, but [3] died; %mesh heal d replaces it" in cell.text


def test_requests_wait_for_a_rank_that_starts(doomed: Notebook) -> None:
    kill(doomed, 1)
    assert doomed.ok("future = d.heal(); d.run('rank').get().values()").plain == "(0, 1, 2, 3)"
    assert doomed.ok("future.get()").plain == "(1,)"


def test_the_report_of_a_death_names_the_commands(doomed: Notebook) -> None:
    cell = doomed.ok("1")
    kill(doomed, 2)
    says = "%mesh heal d puts a new process in place of [2]"
    cell.wait_for(lambda _: any(says in each.stderr for each in doomed.cells.values()))


def test_heal_does_nothing_if_no_rank_is_dead(doomed: Notebook) -> None:
    before = doomed.pids("d")
    assert doomed.ok("%mesh heal d").stdout == "d: no rank is dead; %mesh restart replaces live ranks\n"
    kill(doomed, 3)
    assert "no rank is dead there" in doomed.ok("%mesh heal d[:3]").stdout
    doomed.ok("%mesh heal d[3]")
    assert doomed.pids("d")[:3] == before[:3]


def test_ranks_are_restarted_automatically(notebook: Notebook) -> None:
    notebook.ok("%mesh up e -n 2 --device cpu --restart rank --max-restarts 1")
    try:
        notebook.ok("%%remote e\nimport os; x = rank")
        cell = notebook.run("%%remote e[1]\nos._exit(3)")
        assert "exit code 3" in cell.error
        assert "a new process replaces it" in cell.error
        assert "%mesh heal" not in cell.error, "there is nothing to do"
        cell = notebook.run("%%remote e\nimport torch, os; y = torch.ones(1); torch.distributed.all_reduce(y); int(y)")
        assert cell.plain == "[0-1] 2"
        assert notebook.ok("%%remote e[0]\nx").plain == "[0] 0"
        cell = notebook.run("%%remote e[1]\nos._exit(3)")
        assert "it is not restarted, because it was restarted 1 time within 300 s" in cell.error
        assert "%mesh heal e puts a new process in place of [1]" in cell.error
    finally:
        notebook.ok("%mesh down e")


def test_living_ranks_are_restarted(doomed: Notebook) -> None:
    doomed.ok("%%remote d\nimport atexit; x = 1; atexit.register(lambda: print('good bye', flush=True))")
    before = doomed.pids("d")
    cell = doomed.ok("%mesh restart d[1:3]")
    assert cell.stdout.startswith("d: [1-2] replaced in ")
    assert "they have no variables yet, [0,3] kept theirs" in cell.stdout
    after = doomed.pids("d")
    assert [a == b for a, b in zip(before, after)] == [True, False, False, True]
    assert set(doomed.ok(ALL_REDUCE).stdout.split()) == {"[0-3]", "6.0"}
    assert "good bye" in doomed.ok("%mesh logs d[1]").stdout, "what the former process wrote is kept"


def test_a_rank_that_is_restarted_is_it(notebook: Notebook) -> None:
    for n_ranks, says in ((1, "it has no variables yet"), (2, "it has no variables yet, [1] kept its own")):
        notebook.ok(f"%mesh up few -n {n_ranks} --device cpu", 60.0)
        said = notebook.ok("%mesh restart few[0]").stdout
        assert re.fullmatch(rf"few: \[0\] replaced in \d+\.\d\d s; {re.escape(says)}\n", said), said
        notebook.ok("%mesh down few")


def test_a_restart_ends_the_running_cell(doomed: Notebook) -> None:
    cell = doomed.send("%%remote --background d\nimport time; print('go', flush=True)\nwhile True: time.sleep(0.01)")
    cell.wait_for(lambda cell: len(cell.lines()) == 4)
    doomed.ok("%mesh restart d")
    cell.wait_for(lambda cell: "[0-3] RankDied: ended to be restarted; it was running cell [" in cell.error)
    assert doomed.ok("%%remote d\nrank").plain.splitlines()[0] == "[0] 0"


@pytest.mark.slow
def test_a_restart_frees_ranks_that_nothing_else_stops(doomed: Notebook) -> None:
    """The text about an interrupt without effect says so, and claims no abort that the ranks have not reported."""
    doomed.ok("%%remote d\nkept = 7")
    stuck = (  # the signal by which the agent asks for stacks does not end this call, as it would end a sleep
        "import ctypes, os\nprint('go', flush=True)\nempty, _ = os.pipe()\n"
        "if rank in (1, 2): ctypes.PyDLL(None).read(empty, ctypes.create_string_buffer(1), 1)"
    )
    cell = doomed.send(f"%%remote d\n{stuck}")
    cell.wait_for(lambda cell: len(cell.lines()) == 4)
    doomed.interrupt()
    cell.wait()
    restart = "%mesh restart d[1:3] replaces them, and their state is lost; the other ranks keep theirs."
    assert cell.evalue.endswith(restart)
    said = doomed.run("%mesh interrupt d --abort").stdout
    assert "[1-2] can't say whether their process groups were aborted." in said
    queued = doomed.send("%%remote d\nrank")
    queued.wait_for(lambda cell: "waits for cell" in cell.stderr)
    assert restart in queued.stderr
    doomed.interrupt()
    queued.wait()
    assert doomed.ok("%mesh restart d[1:3]").stdout.startswith("d: [1-2] replaced in ")
    assert doomed.ok("%%remote d[[0, 3]]\nkept").plain == "[0,3] 7"
    assert set(doomed.ok(ALL_REDUCE).stdout.split()) == {"[0-3]", "6.0"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%mesh restart", "specify the ranks"),
        ("%mesh heal t u", "give one selector, such as t"),
        ("%mesh heal nobody", "there is no mesh 'nobody'"),
    ],
)
def test_a_usage_error_is_one_line(notebook: Notebook, line: str, says: str) -> None:
    cell = notebook.run(line)
    assert not cell.ok
    assert says in cell.text


def test_a_mesh_that_is_down_can_not_be_healed(notebook: Notebook) -> None:
    notebook.ok("%mesh up other -n 1 --device cpu\nmesh = other")
    notebook.ok("%mesh down other")
    cell = notebook.run("mesh.heal()")
    assert cell.ename == "SupervisionError"
    assert "it was stopped; bring up another" in cell.error
