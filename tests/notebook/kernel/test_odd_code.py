"""Unusual user code that could break a rank or its notebook."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.timing import Bar
from tests.support.waiting import wait_until

Notebook = Any  # the class in conftest.py

WORKER_FAILS = """%%remote
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 4
    def __getitem__(self, i): raise KeyError("bad item")
for batch in DataLoader(Data(), num_workers=1): pass
"""


def test_an_error_with_a_str_subclass_as_text_is_shown(notebook: Notebook) -> None:
    code = "class Text(str):\n    def __repr__(self): return self\nraise KeyError(Text('caught in a worker'))"
    cell = notebook.run(f"%%remote\n{code}")
    assert cell.ename == "RemoteError"
    assert "KeyError: caught in a worker" in cell.error


@pytest.mark.slow
def test_an_error_of_a_worker_of_a_data_loader_is_shown(notebook: Notebook) -> None:
    cell = notebook.run(WORKER_FAILS, 60.0)
    assert cell.ename == "RemoteError"
    assert "KeyError: Caught KeyError in DataLoader worker process 0." in cell.error
    assert "----> 6 for batch in DataLoader(Data(), num_workers=1): pass" in cell.error
    # The failed cell's frames keep the worker, and torch waits 5 s for it.
    notebook.ok("%%remote\nimport gc; gc.collect()")


def test_a_signal_handler_that_raises_while_a_rank_is_idle_does_no_harm(notebook: Notebook) -> None:
    code = "import os, signal\ndef alarm(*_): raise RuntimeError('a worker died')\nsignal.signal(signal.SIGALRM, alarm)"
    cell = notebook.ok(f"%%remote\n{code}\nsignal.setitimer(signal.ITIMER_REAL, 0.05)")
    # The traceback is written line by line, and arrives in one or more messages.
    cell.wait_for(
        lambda cell: "[0-1] RuntimeError: a worker died" in cell.stderr or cell.stderr.count("a worker died") == 2
    )
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"


def test_a_repr_that_is_a_str_subclass_is_shown(notebook: Notebook) -> None:
    code = "class S(str): pass\nclass R:\n    def __repr__(self): return S('a derived str')\nR()"
    assert notebook.ok(f"%%remote\n{code}").plain == "[0-1] a derived str"


def test_the_errors_in_an_exception_group_are_shown(notebook: Notebook) -> None:
    pytest.importorskip("asyncio.taskgroups")
    code = "import asyncio\nasync with asyncio.TaskGroup() as g:\n    g.create_task(asyncio.sleep('x'))"
    assert "TypeError: '<=' not supported" in notebook.run(f"%%remote\n{code}").error


CAUSED_BY_RANK = """%%remote
def load():
    raise FileNotFoundError(2, "No such file or directory", f"/data/shard-{rank}.pt")
try:
    load()
except OSError as error:
    raise RuntimeError("step failed") from error
"""


def test_causes_that_differ_by_rank_are_shown_by_rank(notebook: Notebook) -> None:
    error = notebook.run(CAUSED_BY_RANK).error
    assert "[0-1] RuntimeError: step failed" in error
    missing = [
        f"on [{rank}] FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-{rank}.pt'"
        for rank in (0, 1)
    ]
    assert f"    caused by, {'; '.join(missing)}" in error


CALLED_FROM_TWO_LINES = """%%remote
def check():
    raise ValueError("not finite")
if rank == 0:
    check()
else:
    check()
"""


def test_errors_with_equal_text_from_two_lines_are_shown_separately(notebook: Notebook) -> None:
    error = notebook.run(CALLED_FROM_TWO_LINES).error
    first, second = error.index("[0] ValueError: not finite"), error.index("[1] ValueError: not finite")
    assert "----> 5     check()" in error[first:second]
    assert "----> 7     check()" in error[second:]


def test_a_child_that_a_cell_forks_does_not_act_as_a_second_rank(notebook: Notebook) -> None:
    code = "import os\npid = os.fork()\nif pid == 0: raise ValueError('in the child')\n"
    code += "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    cell = notebook.ok(f"%%remote\n{code}")
    assert cell.plain == "[0-1] 1"
    assert "ValueError: in the child" in cell.stderr
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"


def test_a_child_that_an_endpoint_forks_does_not_act_as_a_second_rank(notebook: Notebook) -> None:
    code = "import os\nfrom monarch_kernel.actor import Actor, endpoint\nclass Forks(Actor):\n    @endpoint\n"
    code += "    def fork(self):\n        pid = os.fork()\n        if pid == 0: raise ValueError('in the child')\n"
    code += "        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
    cell = notebook.ok(f"{code}list(t.spawn('forks', Forks).fork.call().get(60).values())")
    assert cell.plain == "[1, 1]"
    assert "ValueError: in the child" in cell.stderr


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "signal.SIG_IGN", "lambda *_: calls.append(1)"])
def test_a_user_signal_handler_does_no_harm(notebook: Notebook, handler: str, bar: Bar) -> None:
    pids = notebook.pids()
    code = f"import signal, time\ncalls = []\nsignal.signal(signal.SIGINT, {handler})\nprint('go', flush=True)\n"
    cell = notebook.send(f"%%remote\n{code}while not calls: pass")
    cell.wait_for(lambda cell: len(cell.lines()) == 2)
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    assert notebook.pids() == pids
    assert notebook.value("max(map(len, t['calls'].values()))") == (1 if "lambda" in handler else 0)
    # The next cell has the kernel's handler again.
    cell = notebook.send("%%remote\nprint('go', flush=True)\ntime.sleep(60)")
    cell.wait_for(lambda cell: len(cell.lines()) == 2)
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    bar.check(cell.elapsed_s, 20, "the interrupt of the next cell")


def test_return_outside_a_function_is_found_before_anything_is_sent(notebook: Notebook) -> None:
    cell = notebook.run("%%remote\nsent = True\nreturn 5")
    assert "SyntaxError in line 3: 'return' outside function; nothing was sent" in cell.stderr
    assert "sent" in notebook.run("t['sent']").evalue  # the variable is not defined


def test_a_value_that_cannot_be_shown_hides_no_other(notebook: Notebook) -> None:
    assert "int whose repr failed" in notebook.ok("t['huge'] = 10**6000\nprint(t['huge'])").stdout


def test_the_error_of_a_failed_pull_has_no_frames_of_the_package(notebook: Notebook) -> None:
    notebook.ok("%%remote\nimport threading\nlock = threading.Lock()")
    cell = notebook.run("t['lock']")
    assert "cannot pickle '_thread.lock' object" in cell.error
    assert "codec.py" not in cell.error


def test_a_wrong_type_is_reported_before_anything_is_sent(notebook: Notebook) -> None:
    assert notebook.run("t.run(5)").ename == "TypeError"
    spawn = "from monarch_kernel.actor import this_host\nthis_host().spawn_procs({'x': 1}, env={'A': 1})"
    assert notebook.run(spawn).ename == "TypeError"
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"


def test_the_output_of_an_actor_is_shown(notebook: Notebook) -> None:
    code = (
        "from monarch_kernel.actor import Actor, endpoint\nclass Talker(Actor):\n    @endpoint\n"
        "    def talk(self): print('from an endpoint')\ntalker = t.spawn('talker', Talker)\ntalker.talk.call().get()"
    )
    cell = notebook.send(f"{code}\nimport time\ntime.sleep(1)").wait()
    assert cell.ok
    seen = [line for line in cell.stdout.splitlines() if "from an endpoint" in line]
    assert sorted(seen) in (["t[0-1] from an endpoint"], ["t[0] from an endpoint", "t[1] from an endpoint"])


def test_an_interrupt_while_a_mesh_comes_up_is_one_line(notebook: Notebook) -> None:
    (zygote,) = notebook.zygotes()
    zygote.suspend()  # so that the mesh is not up before the interrupt
    try:
        cell = notebook.send("%mesh up u -n 2 --device cpu")
        cell.wait_for(lambda cell: "waiting for ranks to start" in cell.plain)
        notebook.interrupt()
        cell.wait()
    finally:
        zygote.resume()
    assert cell.error == "RemoteInterrupt: interrupted while u was starting; the ranks that were up have been ended"
    assert "there is no mesh 'u'" in notebook.run("%mesh show u").evalue


def test_after_an_interrupt_at_any_time_a_mesh_is_up_or_not(notebook: Notebook) -> None:
    """An interrupt cancels the start of a mesh, or comes too late; in both cases the kernel has the right state."""
    for i in range(10):
        before = set(notebook.processes())
        cell = notebook.send("%mesh up u -n 2 --device cpu")
        if i:  # as soon as the mesh has processes
            wait_until(lambda before=before: set(notebook.processes()) - before, "a process to start")
        time.sleep(i * 0.008)
        notebook.interrupt()
        cell.wait()
        if not cell.ok:
            assert "monarch_kernel" not in cell.error
        is_up = notebook.value(
            "'u' in globals()"
        )  # even if the interrupt came between the start of the mesh and the end of the cell
        assert is_up or not cell.ok
        if is_up:
            notebook.ok("%mesh down u")
        else:
            assert "there is no mesh 'u'" in notebook.run("%mesh show u").evalue
