"""Kernel > Interrupt of cells that run in the kernel: cells with ``await``, and local and remote cells in subshells."""

from __future__ import annotations

import random
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.notebook.kernel.subshells import in_control, send_to
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)

BOUND_S = 2.0
GO = "print('go', flush=True)\n"


@pytest.fixture
def subshell(notebook: Notebook) -> Iterator[str]:
    """A subshell of the shared notebook."""
    name = str(in_control(notebook, "create_subshell_request")["subshell_id"])
    yield name
    in_control(notebook, "delete_subshell_request", subshell_id=name)


WAYS: dict[str, Callable[[Notebook], object]] = {
    "signal": lambda notebook: notebook.interrupt(),
    "message": lambda notebook: in_control(notebook, "interrupt_request"),
}
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def stopped(bar: Bar) -> Callable[..., Cell]:
    """Interrupt a cell that has printed "go", and check that it ends with the right error."""

    def stop(notebook: Notebook, cell: Cell, way: str = "signal", ename: str = "KeyboardInterrupt") -> Cell:
        cell.wait_for(lambda cell: "go" in cell.stdout or cell.reply)
        assert not cell.reply, cell.text
        with bar.below(BOUND_S, "the interrupt"):
            WAYS[way](notebook)
            cell.wait()
        assert (cell.reply["status"], cell.ename) == ("error", ename)
        return cell

    return stop


# -- cells with await


AWAITS = {
    "sleep": "import asyncio; await asyncio.sleep(60)",
    "never": "import asyncio; await asyncio.get_running_loop().create_future()",
    "gather": "import asyncio; await asyncio.gather(asyncio.sleep(60), asyncio.sleep(60))",
    "computes": "import asyncio; await asyncio.sleep(0)\nwhile True: pass",
    "ranks": "await t.run('import time; print(\"go\", flush=True); time.sleep(60)')",
}


@ways
@pytest.mark.parametrize("awaits", AWAITS.values(), ids=AWAITS.keys())
def test_a_cell_with_await(notebook: Notebook, awaits: str, way: str, stopped: Callable[..., Cell]) -> None:
    ename = "RemoteInterrupt" if "t.run" in awaits else "KeyboardInterrupt"
    stopped(notebook, notebook.send(awaits if "go" in awaits else GO + awaits), way, ename)
    assert notebook.ok("import asyncio; await asyncio.sleep(0.01); 7").plain == "7"
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"


# Another thread receives the signal, while the main thread waits in a system call.
TO_ANOTHER_THREAD = """
import asyncio, signal, threading, time
def interrupt():
    looks = 0
    while looks < 100:
        with open(f"/proc/self/task/{threading.main_thread().native_id}/stat") as stat:
            looks = looks + 1 if stat.read().rpartition(")")[2].split()[0] == "S" else 0
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=interrupt).start()
"""


@pytest.mark.parametrize("wait", ["await asyncio.sleep(1000)", "time.sleep(1000)", "threading.Event().wait()"])
def test_a_signal_that_another_thread_receives_interrupts_the_cell(notebook: Notebook, wait: str) -> None:
    cell = notebook.run(TO_ANOTHER_THREAD + wait)
    assert (cell.reply["status"], cell.ename) == ("error", "KeyboardInterrupt")
    assert notebook.ok("signal.getsignal(signal.SIGINT); time.sleep(0.1); 7").plain == "7"


def test_a_cell_with_await_may_catch_the_interrupt(notebook: Notebook) -> None:
    cell = notebook.send(
        "import asyncio\ntry:\n    print('go', flush=True); await asyncio.sleep(60)\nexcept KeyboardInterrupt: 'caught'\n1 + 1"
    )
    cell.wait_for(lambda cell: "go" in cell.stdout)
    notebook.interrupt()
    assert cell.wait().plain == "2"


def test_a_task_of_an_earlier_cell_keeps_running(notebook: Notebook, stopped: Callable[..., Cell]) -> None:
    notebook.ok(
        "import asyncio\nasync def count():\n    global n\n    for n in range(10**6): await asyncio.sleep(0.01)"
    )
    notebook.ok("n = 0; task = asyncio.create_task(count())")
    stopped(notebook, notebook.send(GO + "await asyncio.sleep(60)"))
    before = notebook.value("n")
    notebook.ok("await asyncio.sleep(0.1)")
    assert notebook.value("n") > before
    notebook.ok("task.cancel();")


STRIKES = """
import asyncio, os, signal, threading, time
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.3)  # the main thread handles the signal meanwhile
"""


BETWEEN = "asyncio.get_running_loop().call_soon(interrupt); await asyncio.sleep(0)\nwhile True: pass"


def test_an_interrupt_while_the_event_loop_runs_something_before_the_cell(notebook: Notebook) -> None:
    """The cell continues before its cancellation takes effect, and never awaits again."""
    notebook.ok(STRIKES)
    cell = notebook.send(BETWEEN).wait()
    assert (cell.reply["status"], cell.ename) == ("error", "KeyboardInterrupt")
    assert notebook.ok("import asyncio; await asyncio.sleep(0.01); 7").plain == "7"


def test_an_interrupt_at_the_start_of_a_cell_with_await(notebook: Notebook) -> None:
    notebook.ok(STRIKES)
    notebook.ok("""
        ip = get_ipython()
        def once(info):
            if "never" in info.raw_cell:
                ip.events.unregister("pre_run_cell", once)
                interrupt()
        ip.events.register("pre_run_cell", once)
    """)
    cell = notebook.send("never = True\nawait asyncio.sleep(0)").wait()
    assert (cell.reply["status"], cell.ename) == ("error", "KeyboardInterrupt")
    assert notebook.ok("await asyncio.sleep(0.01); 'never' in globals()").plain == "False"


# -- at the start of a cell, between two of its statements, and at its end


TRACES = """
import signal, sys
from codeop import Compile
from IPython.core.interactiveshell import InteractiveShell
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from monarch_kernel.notebook.kernel.interrupts import KernelInterrupts
from monarch_kernel.notebook.kernel.kernel import MonarchKernel
from monarch_kernel.notebook.kernel.status import SteadyStatus

def strike_in(function, call=1, interrupt=lambda: signal.raise_signal(signal.SIGINT)):
    \"\"\"Interrupt the next request that has the mark in it, where it calls a function for the n-th time.\"\"\"
    kernel, calls, mark = get_ipython().kernel, [], "mark" + "ed"
    def trace(frame, event, argument):
        if frame.f_code is function.__code__ and mark in str(kernel.get_parent("shell").get("content")):
            calls.append(frame)
            if len(calls) == call:
                sys.settrace(None)
                interrupt()
    sys.settrace(trace)
"""
BEFORE = {
    "busy": "SteadyStatus._publish_status",
    "taken": "Kernel.should_handle",
    "handled": "MonarchKernel.pre_handler_hook",
    "echoed": "Kernel._publish_execute_input",
    "read": "InteractiveShell.transform_cell",
    "compiled": "Compile.__call__",
    "run": "InteractiveShell.run_code",
}
MARKED = {
    "plain": "marked = 1",
    "awaits": "marked = 1\nimport asyncio; await asyncio.sleep(0)",
    "magic": "%time marked = 1",
    "remote": "%%remote\nmarked = 1",
}


@pytest.mark.parametrize("code", MARKED.values(), ids=MARKED.keys())
@pytest.mark.parametrize("place", BEFORE.values(), ids=BEFORE.keys())
def test_an_interrupt_between_busy_and_the_first_statement(notebook: Notebook, place: str, code: str) -> None:
    notebook.ok(f"{TRACES}strike_in({place})")
    cell = notebook.send(code).wait()
    assert (cell.reply["status"], cell.ename) == ("error", "KeyboardInterrupt")
    ran = "'mark' + 'ed' in globals()"
    assert notebook.ok(f"%remote {ran}" if "remote" in code else ran).plain in ("False", "[0-1] False")


@pytest.mark.parametrize("call", [2, 3])
def test_an_interrupt_while_a_magic_checks_its_cell(notebook: Notebook, call: int) -> None:
    """The magic rewrites the code for the ranks as IPython rewrites cells, but within a statement of the user."""
    notebook.ok(f"{TRACES}strike_in(InteractiveShell.transform_cell, {call})")
    cell = notebook.send("%%remote\nmarked = 1").wait()
    assert (cell.reply["status"], cell.ename) == ("error", "KeyboardInterrupt")
    assert notebook.ok("%remote 'mark' + 'ed' in globals()").plain == "[0-1] False"


FOREGROUND, BACKGROUND = ("", "RemoteInterrupt"), ("--background --out handle", "")


@pytest.mark.parametrize(
    ("place", "options", "ename"),
    [
        ("CellQueue.enter", *FOREGROUND),
        ("CellQueue.enter", *BACKGROUND),
        ("RemoteCell.__repr__", *FOREGROUND),
        ("RemoteCell.__repr__", *BACKGROUND),
        ("Conversation.__init__", *FOREGROUND),  # before the loop that drives the cell
    ],
)
def test_an_interrupt_while_a_cell_is_queued(notebook: Notebook, options: str, ename: str, place: str) -> None:
    """A cell that no code drives would block all later cells."""
    calls = (
        "enter = CellQueue.enter\nCellQueue.enter = lambda *two: (enter(*two), repr(two[1]))\n"
        if "repr" in place
        else ""
    )
    try:
        notebook.ok(
            f"{TRACES}from monarch_kernel.notebook.cells.cell import CellQueue, RemoteCell\n"
            f"from monarch_kernel.notebook.magics.debug import Conversation\n{calls}strike_in({place})"
        )
        cell = notebook.send(f"%%remote {options}\nimport time; time.sleep(60)\nmarked = 1").wait()
        assert cell.ename == ename
        if options:
            assert notebook.value("type(handle.exception(10)).__name__, handle.state") == (
                "RemoteInterrupt",
                "cancelled",
            )
        assert notebook.ok("%remote 'mark' + 'ed' in globals()").plain == "[0-1] False"
    finally:
        if calls:
            notebook.ok("CellQueue.enter = enter")


STRIKES_WITHIN = """
import monarch_kernel.notebook.magics.magics as magics
space, parse = {}, magics.parse_remote
exec(compile("def parse_remote(line): import signal; signal.raise_signal(signal.SIGINT)", magics.__file__, "exec"), space)
magics.parse_remote = space["parse_remote"]
"""


@pytest.mark.parametrize("place", ["before", "within"])
def test_an_interrupt_outside_the_users_code_shows_no_frames(notebook: Notebook, place: str) -> None:
    notebook.ok(STRIKES_WITHIN if place == "within" else f"{TRACES}strike_in(InteractiveShell.transform_cell)")
    cell = notebook.send("%%remote --background\nmarked = 1").wait()
    notebook.ok("if 'parse' in globals(): magics.parse_remote = parse")
    assert cell.error.startswith("KeyboardInterrupt: the interrupt came")
    assert notebook.ok("%remote 'mark' + 'ed' in globals()").plain == "[0-1] False"


@pytest.mark.parametrize("rest", ["second = 'marked'", "import asyncio\nawait asyncio.sleep(0)\nsecond = 'marked'"])
@pytest.mark.parametrize("place", ["Compile.__call__", "InteractiveShell.run_code"])
def test_an_interrupt_between_two_statements(notebook: Notebook, place: str, rest: str) -> None:
    notebook.ok(f"{TRACES}first = second = None\nstrike_in({place}, 2)")
    cell = notebook.send(f"first = 1\n{rest}").wait()
    assert (cell.reply["status"], cell.ename) == ("error", "KeyboardInterrupt")
    assert notebook.value("first, second") == (1, None)


def test_an_interrupt_while_an_error_is_shown_does_not_continue_the_cell(notebook: Notebook) -> None:
    notebook.ok(f"{TRACES}second = None\nstrike_in(InteractiveShell.showtraceback)")
    assert notebook.send("raise ValueError('marked')\nsecond = 2").wait().ename == "ValueError"
    assert notebook.value("second") is None
    assert "----> 2 1 / 0" in notebook.run("%%remote\n1 / 0").error  # later errors have the usual format


@pytest.mark.parametrize(
    "place", ["InteractiveShell.user_expressions", "IPythonKernel.finish_metadata", "Kernel._abort_queues"]
)
def test_an_interrupt_after_the_last_statement_has_no_effect(notebook: Notebook, place: str) -> None:
    notebook.ok(f"{TRACES}strike_in({place})")
    cell = notebook.send("'marked'; 1 / 0" if "abort" in place else "'marked'").wait()
    assert cell.ename == ("ZeroDivisionError" if "abort" in place else "")
    assert notebook.ok("x = 1\nx + 1").plain == "2"


# Ends when this many cells wait for it.
WAITED_FOR = """
import time
'marked'
while len(get_ipython().kernel._interrupts._waiting.arrived) <= {n}: time.sleep(0.001)
"""
AFTER = {
    "post hook": "InteractiveShell.user_expressions",
    "reply": "IPythonKernel.finish_metadata",
    "idle": "MonarchKernel.post_handler_hook",
    "between": "KernelInterrupts.cell_ended",
}


@pytest.mark.parametrize("first", ["", "import asyncio; await asyncio.sleep(0)\n"], ids=["plain", "awaits"])
@pytest.mark.parametrize("place", AFTER.values(), ids=AFTER.keys())
def test_an_interrupt_after_the_last_statement_ends_the_cells_that_wait(
    notebook: Notebook, place: str, first: str
) -> None:
    """As "Run All" sends them; the signal comes when no statement of the first cell is left to interrupt."""
    notebook.ok(f"{TRACES}second = third = 0\nstrike_in({place})")
    cells = [notebook.send(code) for code in (first + WAITED_FOR.format(n=2), "second = 1", "third = 1")]
    assert [cell.wait().reply["status"] for cell in cells] == ["ok", "error", "aborted"]
    assert cells[1].ename == "KeyboardInterrupt"
    assert notebook.value("second, third") == (0, 0)
    assert notebook.ok("x = 1\nx + 1").plain == "2"


def test_an_interrupt_between_cells_passes_over_what_extensions_send(notebook: Notebook) -> None:
    notebook.ok(f"{TRACES}seen = []\nstrike_in(KernelInterrupts.cell_ended)")
    first = notebook.send(WAITED_FOR.format(n=1))
    notebook.client.execute("seen.append('silent')", silent=True, store_history=False)
    second = notebook.send("seen.append('second')")
    assert first.wait().ok
    assert second.wait().ename == "KeyboardInterrupt"
    assert notebook.value("seen") == ["silent"]


def test_an_interrupt_of_a_failed_cell_never_hits_a_later_one(notebook: Notebook) -> None:
    """The cell that waited is aborted, as the first one fails."""
    notebook.ok(f"{TRACES}strike_in(KernelInterrupts.cell_ended)")
    cells = [notebook.send(WAITED_FOR.format(n=1) + "1 / 0"), notebook.send("1")]
    assert [cell.wait().reply["status"] for cell in cells] == ["error", "aborted"]
    assert notebook.ok("x = 1\nx + 1").plain == "2"


@pytest.mark.parametrize("kind", ["input_transformers_cleanup", "ast_transformers"])
def test_an_interrupt_of_code_that_rewrites_cells_ends_the_cell(notebook: Notebook, kind: str) -> None:
    notebook.ok(f"""
        result = None
        class Transformer:
            def __call__(self, lines):
                if any("marked" in line for line in lines): self.loop()
                return lines
            def visit(self, node):
                import ast
                if "marked" in ast.dump(node): self.loop()
                return node
            def loop(self):
                print("go", flush=True)
                while True: pass
        get_ipython().{kind}.append(Transformer())
    """)
    cell = notebook.send("%time result = 'marked'" if "input" in kind else "result = 'marked'")
    cell.wait_for(lambda cell: "go" in cell.stdout or cell.reply)
    notebook.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    notebook.ok(f"get_ipython().{kind}.pop();")
    assert notebook.value("result") is None


HOOK = """
import sys
ip = get_ipython()
def hook(*info):
    ip.events.unregister({event!r}, hook)
    print("go", flush=True)
    while True: pass
ip.events.register({event!r}, hook)
"""


@pytest.mark.parametrize("line", ["", "%%remote\n"], ids=["notebook", "ranks"])
def test_an_interrupt_of_a_pre_run_hook_ends_the_cell(notebook: Notebook, line: str) -> None:
    notebook.ok(line + HOOK.format(event="pre_run_cell"))
    cell = notebook.send(f"{line}ran = True")
    cell.wait_for(
        lambda cell: len(cell.lines() if line else cell.stdout.splitlines()) == (2 if line else 1) or cell.reply
    )
    notebook.interrupt()
    assert cell.wait().ename == ("RemoteInterrupt" if line else "KeyboardInterrupt")
    assert notebook.ok(f"{line}'ran' in globals()").plain == ("[0-1] False" if line else "False")


def test_an_interrupt_of_a_post_execute_hook_ends_the_hook(notebook: Notebook) -> None:
    notebook.ok("from IPython import get_ipython")
    cell = notebook.send(HOOK.format(event="post_execute"))
    cell.wait_for(lambda cell: "go" in cell.stdout)
    notebook.interrupt()
    assert cell.wait().ok
    assert notebook.ok("x = 1\nx + 1").plain == "2"


def test_an_interrupt_of_a_callback_of_a_comm_ends_the_callback(notebook: Notebook) -> None:
    notebook.ok("""
        def opened(comm, message):
            @comm.on_msg
            def loop(message):
                print("go", flush=True)
                while True: pass
        get_ipython().kernel.comm_manager.register_target("loops", opened)
    """)
    client, content = notebook.client, {"comm_id": "of the test", "data": {}}
    client.shell_channel.send(client.session.msg("comm_open", {**content, "target_name": "loops"}))
    said: list[str] = []
    notebook.on_message = lambda message: said.append(message["content"].get("text", ""))
    client.shell_channel.send(client.session.msg("comm_msg", content))
    wait_until(lambda: (notebook.pump(0.02), "go\n" in said)[1], "the callback to start")
    notebook.interrupt()
    assert notebook.ok("x = 1\nx + 1").plain == "2"
    client.shell_channel.send(client.session.msg("comm_close", content))


@pytest.mark.parametrize("kind", ["comm_open", "comm_msg", "comm_close"])
def test_an_interrupt_before_the_callback_of_a_comm_ends_the_callback(notebook: Notebook, kind: str) -> None:
    notebook.ok("""
        seen = []
        def opened(comm, message):
            seen.append("comm_open")
            comm.on_msg(lambda message: seen.append("comm_msg"))
            comm.on_close(lambda message: seen.append("comm_close"))
        get_ipython().kernel.comm_manager.register_target("seen", opened)
    """)
    notebook.ok(f"{TRACES}strike_in(MonarchKernel.should_handle)")
    client = notebook.client
    for each in ("comm_open", "comm_msg", "comm_close"):
        data = {"text": "marked" if each == kind else ""}
        content = {"comm_id": f"struck in {kind}", "data": data, "target_name": "seen"}
        client.shell_channel.send(client.session.msg(each, content))
    expected = ["comm_open", "comm_msg", "comm_close"]
    assert notebook.value("seen") == ([] if kind == "comm_open" else [each for each in expected if each != kind])


@pytest.mark.parametrize("call", [1, 2], ids=["after the first", "between"])
def test_an_interrupt_between_two_callbacks_of_a_comm_ends_the_second(notebook: Notebook, call: int) -> None:
    """As the moves of a slider wait for each other; the third one goes on."""
    notebook.ok("""
        import time
        seen = []
        def opened(comm, message):
            @comm.on_msg
            def note(message):
                data = message["content"]["data"]
                while len(get_ipython().kernel._interrupts._waiting.arrived) <= data["behind"]: time.sleep(0.001)
                seen.append(data["text"])
        get_ipython().kernel.comm_manager.register_target("slider", opened)
    """)
    notebook.ok(f"{TRACES}strike_in(KernelInterrupts.cell_ended, {call})")
    client = notebook.client
    content = {"comm_id": f"slider {call}", "target_name": "slider", "data": {}}
    client.shell_channel.send(client.session.msg("comm_open", content))
    for text, behind in (("marked", 2), ("second", 0), ("third", 0)):
        data = {"text": text, "behind": behind}
        client.shell_channel.send(client.session.msg("comm_msg", {**content, "data": data}))
    assert notebook.value("seen") == ["marked", "third"]
    client.shell_channel.send(client.session.msg("comm_close", content))


def test_an_interrupt_ends_the_target_of_a_comm(notebook: Notebook) -> None:
    notebook.ok("""
        def opened(comm, message):
            print("go", flush=True)
            while True: pass
        get_ipython().kernel.comm_manager.register_target("loops", opened)
    """)
    client, said = notebook.client, list[str]()
    notebook.on_message = lambda message: said.append(message["content"].get("text", ""))
    content = {"comm_id": "of a loop", "data": {}, "target_name": "loops"}
    client.shell_channel.send(client.session.msg("comm_open", content))
    wait_until(lambda: (notebook.pump(0.02), "go\n" in said)[1], "the target to start")
    notebook.interrupt()
    assert notebook.ok("x = 1\nx + 1").plain == "2"


# -- subshells


@pytest.mark.parametrize("place", BEFORE.values(), ids=BEFORE.keys())
def test_an_interrupt_between_busy_and_the_first_statement_of_a_subshell(
    notebook: Notebook, subshell: str, place: str
) -> None:
    interrupt = "get_ipython().kernel._interrupts.interrupt_subshells"  # what the handler in the main thread calls
    assert send_to(notebook, subshell, f"{TRACES}strike_in({place}, interrupt={interrupt})").wait().ok
    cell = send_to(notebook, subshell, "marked = 1").wait()
    assert (cell.reply["status"], cell.ename) == ("error", "KeyboardInterrupt")
    assert notebook.ok("'mark' + 'ed' in globals()").plain == "False"


WAITED_FOR_BY_SUBSHELL = WAITED_FOR.replace("_waiting.arrived", "_subshells._by_id[{subshell!r}].arrived")


@pytest.mark.parametrize("first", ["", "import asyncio; await asyncio.sleep(0)\n"], ids=["plain", "awaits"])
@pytest.mark.parametrize("place", AFTER.values(), ids=AFTER.keys())
def test_an_interrupt_after_the_last_statement_ends_the_cells_that_wait_for_a_subshell(
    notebook: Notebook, subshell: str, place: str, first: str
) -> None:
    interrupt = "get_ipython().kernel._interrupts.interrupt_subshells"  # what the handler in the main thread calls
    code = f"{TRACES}second = third = 0\nstrike_in({place}, interrupt={interrupt})"
    assert send_to(notebook, subshell, code).wait().ok
    waits = first + WAITED_FOR_BY_SUBSHELL.format(n=2, subshell=subshell)
    cells = [send_to(notebook, subshell, code) for code in (waits, "second = 1", "third = 1")]
    assert [cell.wait().reply["status"] for cell in cells] == ["ok", "error", "aborted"]
    assert cells[1].ename == "KeyboardInterrupt"
    assert notebook.value("second, third") == (0, 0)
    assert send_to(notebook, subshell, "x = 1\nx + 1").wait().plain == "2"
    known = "list(get_ipython().kernel._interrupts._subshells._by_id)"
    wait_until(lambda: notebook.value(known) == [], "the kernel to forget a subshell that is idle")


def test_an_interrupt_while_the_event_loop_of_a_subshell_runs_something_else(notebook: Notebook, subshell: str) -> None:
    notebook.ok(STRIKES)
    cell = send_to(notebook, subshell, BETWEEN).wait()
    assert (cell.reply["status"], cell.ename) == ("error", "KeyboardInterrupt")
    assert send_to(notebook, subshell, "await asyncio.sleep(0.01); 7").wait().plain == "7"


LOCAL = {
    "loop": "while True: pass",
    "loop of a function": "def f():\n    while True: pass\nf()",
    "sleeps": "import time\nwhile True: time.sleep(0.05)",
    "awaits": "import asyncio; await asyncio.sleep(60)",
    "awaits and computes": "import asyncio; await asyncio.sleep(0)\nwhile True: pass",
}


@ways
@pytest.mark.parametrize("code", LOCAL.values(), ids=LOCAL.keys())
def test_local_code_in_a_subshell(
    notebook: Notebook, subshell: str, code: str, way: str, stopped: Callable[..., Cell]
) -> None:
    stopped(notebook, send_to(notebook, subshell, GO + code), way)
    assert send_to(notebook, subshell, "1 + 1").wait().plain == "2"
    assert notebook.ok("1 + 1").plain == "2"


@ways
@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "while True: pass"])
def test_a_remote_cell_in_a_subshell(
    notebook: Notebook, subshell: str, code: str, way: str, stopped: Callable[..., Cell]
) -> None:
    pids = notebook.pids()
    cell = stopped(notebook, send_to(notebook, subshell, f"%%remote\n{GO}{code}"), way, "RemoteInterrupt")
    assert cell.evalue == "interrupted on [0-1]; their state is kept"
    assert send_to(notebook, subshell, "%%remote\nrank").wait().plain == "[0] 0\n[1] 1"
    assert notebook.pids() == pids


@pytest.mark.parametrize("wait", ["t.run('print(1); time.sleep(60)').get()", "t['x']"])
def test_a_wait_for_ranks_in_a_subshell(
    notebook: Notebook, subshell: str, wait: str, stopped: Callable[..., Cell]
) -> None:
    notebook.ok("%%remote\nimport time\nclass Slow:\n    def __reduce__(self): time.sleep(60)\nx = Slow()")
    cell = send_to(notebook, subshell, GO + wait)
    states = "[rank.state for rank in t.view().ranks]"
    wait_until(lambda: notebook.value(states) == ["running"] * 2, "the ranks to be asked")
    stopped(notebook, cell, ename="RemoteInterrupt")
    assert send_to(notebook, subshell, "%%remote\nrank").wait().plain == "[0] 0\n[1] 1"
    assert notebook.ok("%%remote\nrank").plain == "[0] 0\n[1] 1"


@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "%%remote\nprint('go')\nwhile True: pass"])
def test_an_interrupt_reaches_the_main_shell_and_subshells(
    notebook: Notebook, subshell: str, code: str, stopped: Callable[..., Cell]
) -> None:
    main = notebook.send(code if "remote" in code else GO + code)
    main.wait_for(lambda cell: "go" in cell.stdout)
    busy = send_to(notebook, subshell, GO + "while True: pass")
    busy.wait_for(lambda cell: "go" in cell.stdout)
    notebook.wait_blocked()
    stopped(notebook, busy)
    assert main.wait().reply["status"] == "error"
    assert main.ename in ("KeyboardInterrupt", "RemoteInterrupt")


def test_an_interrupt_while_nothing_runs_has_no_effect(notebook: Notebook, subshell: str) -> None:
    for way in WAYS:
        for _ in range(8):
            WAYS[way](notebook)
        code = "import time\nfor _ in range(20): time.sleep(0.005)\n'whole'"
        assert notebook.ok(code).plain == "'whole'"
        assert send_to(notebook, subshell, code).wait().plain == "'whole'"


def test_a_late_interrupt_of_a_subshell_never_hits_its_next_cell(notebook: Notebook, subshell: str) -> None:
    outcomes = set()
    for i in range(40):
        runs_s = 600 if i == 0 else 0.02
        code = f"import time\nend = time.monotonic() + {runs_s}\n{GO}while time.monotonic() < end: pass"
        cell = send_to(notebook, subshell, code)
        if i == 0:  # while the cell runs
            cell.wait_for(lambda cell: "go" in cell.stdout)
        elif i == 1:  # after the cell has run
            cell.wait()
        else:
            until = time.monotonic() + i * 0.001
            while time.monotonic() < until:
                notebook.pump(0.001)
        notebook.interrupt()
        outcomes.add(cell.wait().ename)
        notebook.value("1")  # the main thread has handled the signal
        following = send_to(notebook, subshell, "sum(range(1000))")
        assert following.wait().plain == "499500", following.text
    assert outcomes == {"", "KeyboardInterrupt"}


def test_an_interrupt_of_user_expressions_ends_only_the_cell(notebook: Notebook) -> None:
    """User expressions are user code, too, so an interrupt may arrive there, even if there are none."""
    code = """
        import signal, sys
        from IPython.core.interactiveshell import InteractiveShell
        def interrupt(frame, event, argument):
            if frame.f_code is InteractiveShell.user_expressions.__code__:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        sys.settrace(interrupt)
    """
    assert notebook.ok(textwrap.dedent(code)).reply["user_expressions"] == {}
    assert notebook.value("1 + 1") == 2


# -- campaigns


LOOPS = {
    "plain": "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass",
    "awaits": "import asyncio\nfor _ in range(2000): await asyncio.sleep(0.01)",
    "magic": "%time for _ in range(10**9): pass",
    "remote": "%%remote\nimport time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass",
    "subshell": "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass",
}
CAMPAIGNS = {
    "plain": (500, 0.005),
    "awaits": (200, 0.005),
    "magic": (50, 0.015),
    "remote": (100, 0.015),
    "subshell": (100, 0.015),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", CAMPAIGNS)
def test_no_interrupt_is_lost_in_the_first_milliseconds(notebook: Notebook, subshell: str, kind: str) -> None:
    n, within_s = CAMPAIGNS[kind]
    rng, busy, lost = random.Random(3), set(), []
    notebook.on_message = lambda message: (
        busy.add(message["parent_header"].get("msg_id"))
        if message["content"].get("execution_state") == "busy"
        else None
    )
    notebook.ok("%time pass")  # IPython loads this magic at its first use, and never again after an interrupt of that
    for i in range(n):
        cell = send_to(notebook, subshell, LOOPS[kind]) if kind == "subshell" else notebook.send(LOOPS[kind])
        while cell.id not in busy:
            notebook.pump(0.001)
        until = time.monotonic() + rng.random() * within_s
        while time.monotonic() < until:
            pass
        notebook.interrupt()
        if cell.wait().ename not in ("KeyboardInterrupt", "RemoteInterrupt"):
            lost.append((i, cell.so_far))
        following = send_to(notebook, subshell, "1 + 1") if kind == "subshell" else notebook.send("1 + 1")
        assert following.wait().plain == "2", following.text
    assert not lost


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("short", ["x = 1", "import asyncio; await asyncio.sleep(0)"], ids=["plain", "awaits"])
@pytest.mark.parametrize("where", ["main", "subshell"])
def test_no_interrupt_of_a_run_of_many_cells_is_lost(notebook: Notebook, subshell: str, short: str, where: str) -> None:
    """The interrupt comes within the run's first short cells, between two of them, or in the long last one.

    It never applies to cells that reach the kernel later, so the first cell waits for the others.
    """
    rng, lost = random.Random(5), []
    waits = (WAITED_FOR if where == "main" else WAITED_FOR_BY_SUBSHELL).format(n=6, subshell=subshell)
    for i in range(200):
        codes = (waits, *[short] * 5, LOOPS["plain"])
        cells = [notebook.send(code) if where == "main" else send_to(notebook, subshell, code) for code in codes]
        until = time.monotonic() + rng.random() * 0.04
        cells[0].wait_for(lambda cell: cell.reply)
        while time.monotonic() < until:
            pass
        notebook.interrupt()
        if cells[-1].wait().ok:
            lost.append((i, [cell.reply["status"] for cell in cells]))
        notebook.value("1")
    assert not lost
