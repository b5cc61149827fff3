"""Processes that cells fork, on ranks and in the notebook: they have their own signal handlers, and end on SIGTERM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.notebook.kernel.subshells import in_control, send_to

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

HANDLERS = """
import os, signal
def handlers_of_a_child():
    pid = os.fork()
    if pid == 0:
        is_default = (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
            and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        )
        os._exit(0 if is_default else 1)
    return "default" if os.waitpid(pid, 0)[1] == 0 else "of its parent"
"""


@pytest.mark.parametrize("line", ["", "%%remote\n"], ids=["notebook", "ranks"])
def test_the_child_of_a_cell_has_the_handlers_of_a_new_process(notebook: Notebook, line: str) -> None:
    notebook.ok(line + HANDLERS)
    shown = notebook.ok(f"{line}handlers_of_a_child()").plain
    assert shown == ("[0-1] 'default'" if line else "'default'")


def test_the_child_of_a_subshell_has_the_handlers_of_a_new_process(notebook: Notebook) -> None:
    """The main thread waits for ranks meanwhile, and defers interrupts."""
    notebook.ok(HANDLERS)
    subshell = str(in_control(notebook, "create_subshell_request")["subshell_id"])
    waits = notebook.send("%%remote\nimport time\nprint('go', flush=True)\ntime.sleep(600)")
    waits.wait_for(lambda cell: "go" in cell.stdout or cell.reply)
    assert send_to(notebook, subshell, "handlers_of_a_child()").wait().plain == "'default'"
    notebook.interrupt()
    assert waits.wait().ename == "RemoteInterrupt"
    in_control(notebook, "delete_subshell_request", subshell_id=subshell)


IN_A_HOOK = """
import os, signal, sys
from monarch_kernel.runtime.worker.executor import working
from monarch_kernel.net.transport.forks import {hook} as hook

pid = os.getpid()
def trace(frame, event, argument):
    if frame.f_code is hook.__code__ and os.getpid() == pid:
        sys.settrace(None)
        print("go", flush=True)
        while not working.get().interrupted: pass
        signal.raise_signal(signal.SIGINT)

sys.settrace(trace)
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
while True: pass
"""


@pytest.mark.parametrize("hook", ["_before", "_after_in_parent"])
def test_an_interrupt_as_a_rank_forks_is_not_lost(notebook: Notebook, hook: str) -> None:
    """Python ignores exceptions in functions that run at a fork."""
    cell = notebook.send("%%remote\n" + IN_A_HOOK.format(hook=hook))
    cell.wait_for(lambda cell: len(cell.lines()) == 2 or cell.reply)
    notebook.interrupt()
    assert cell.wait().evalue == "interrupted on [0-1]; their state is kept"
    assert "Exception ignored" not in cell.stderr
    assert notebook.ok("%remote rank").plain == "[0] 0\n[1] 1"


FORKS_AND_IS_STRUCK = """
import os, signal, sys
from monarch_kernel.net.transport.forks import {hook} as hook

pid = os.getpid()
def trace(frame, event, argument):
    if frame.f_code is hook.__code__ and os.getpid() == pid:
        sys.settrace(None)
        signal.raise_signal(signal.SIGINT)

sys.settrace(trace)
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
while True: pass
"""


@pytest.mark.parametrize("hook", ["_before", "_after_in_parent"])
def test_an_interrupt_as_the_kernel_forks_is_not_lost(notebook: Notebook, hook: str) -> None:
    cell = notebook.run(FORKS_AND_IS_STRUCK.format(hook=hook))
    assert cell.ename == "KeyboardInterrupt"
    assert "Exception ignored" not in cell.stderr
    assert notebook.ok("1 + 1").plain == "2"


FORKS = """
import os
print("go", flush=True)
while True:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_an_interrupt_ends_a_cell_that_forks_forever(notebook: Notebook) -> None:
    for _ in range(40):
        cell = notebook.send(FORKS)
        cell.wait_for(lambda cell: "go" in cell.stdout)
        notebook.interrupt()
        assert cell.wait().ename == "KeyboardInterrupt"


POOLS = """
import multiprocessing
def pools(n):
    for _ in range(n):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map_async(abs, range(4)).get(60)  # `with` ends the pool by SIGTERM, as soon as the first results are there
    return n
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pools_on_ranks_end(four: Notebook) -> None:
    four.ok("%%remote\n" + POOLS)
    assert four.ok("%remote pools(200)", timeout_s=300).plain == "[0-3] 200"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pools_in_the_notebook_end(bare: Notebook) -> None:
    bare.ok(POOLS)
    assert bare.ok("pools(100)", timeout_s=300).plain == "100"
