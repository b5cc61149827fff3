"""Debugging in the notebook: breakpoints and post-mortems of ranks at a prompt in the cell, and the kernel's own debugger."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.notebook.kernel.conftest import Cell
from tests.notebook.kernel.subshells import in_control
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook, Terminal
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)

ASK_S = 60.0


class Asking(Cell):
    """A cell in a frontend that allows input."""

    def prompt(self, timeout_s: float = ASK_S) -> str:
        """Wait for the next prompt, and give it."""
        found: list[str] = []

        def asks(_: Cell) -> bool:
            with suppress(Empty):
                request = self._notebook.client.stdin_channel.get_msg(timeout=0)
                assert request["parent_header"]["msg_id"] == self.id
                found.append(request["content"]["prompt"])
            return bool(found) or (self.idle and bool(self.reply))

        self.wait_for(asks, timeout_s)
        assert found, f"it ended instead: {self.text}"
        self._notebook.sync()
        return found[0]

    def type(self, line: str) -> str:
        """Answer the prompt; gives the output until the next prompt or the end."""
        before = len(self.stdout)
        self._notebook.client.input(line)
        found: list[str] = []

        def is_next(_: Cell) -> bool:
            with suppress(Empty):
                found.append(self._notebook.client.stdin_channel.get_msg(timeout=0)["content"]["prompt"])
            return bool(found) or (self.idle and bool(self.reply))

        self.wait_for(is_next)
        self.asks = found[0] if found else ""
        self._notebook.sync()
        return self.stdout[before:]

    asks = ""


def send(notebook: Notebook, code: str) -> Asking:
    """Send a cell from a frontend that allows input."""
    for left in [cell for cell in notebook.cells.values() if isinstance(cell, Asking) and not cell.reply]:
        notebook.interrupt()  # a failed test left this cell; later tests must not fail for it
        left.wait()
    cell = Asking(notebook, notebook.client.execute(code, allow_stdin=True))
    notebook.cells[cell.id] = cell
    return cell


FAILS = "%%remote t[1]\ndef divide(a):\n    b = a * 2\n    return b / 0\nfor i in range(3, 5):\n    divide(i)"


def test_post_mortem(notebook: Notebook) -> None:
    assert notebook.run(FAILS).ename == "RemoteError"
    cell = send(notebook, "%mesh debug t[1]")
    assert cell.prompt() == "[1] (Pdb) "
    cell.wait_for(lambda cell: "-> return b / 0" in cell.stdout)
    assert "[1] ZeroDivisionError: division by zero (cell [" in cell.stdout
    assert cell.type("p a, b") == "(3, 6)\n"
    assert cell.type("rank") == "1\n"
    assert "    3  \t    b = a * 2\n    4  ->\t    return b / 0\n".replace("    3", "  3").replace(
        "    4", "  4"
    ) in cell.type("ll")
    assert "-> divide(i)" in cell.type("up")
    assert cell.type("pp i") == "3\n"
    assert "-> return b / 0" in cell.type("down")
    walk = cell.type("w")
    assert [line.partition("]>")[2] for line in walk.splitlines()[::2]] == ["(6)<module>()", "(4)divide()"]
    assert cell.type("!kept = 7 * b") == ""
    assert "not available" in cell.type("interact")
    assert "input() does not work on a rank" in cell.type("!input()")
    cell.type("!import builtins; builtins.kept = kept")
    cell.type("q")
    assert cell.ok
    assert not cell.asks
    assert notebook.ok("%remote t[1] kept").plain == "[1] 42"


def test_post_mortem_selects_the_lowest_failed_rank_and_lists_others(notebook: Notebook) -> None:
    notebook.ok("%%remote\nfine = 1")
    cell = send(notebook, "%mesh debug t").wait()
    assert cell.ename == "UsageError"
    assert "nothing to debug on t: no rank has failed or stopped since its last cell or call" in cell.evalue
    assert notebook.run("%%remote\n1 / (rank - 1) if rank else [].pop()").ename == "RemoteError"
    cell = send(notebook, "%mesh debug")
    assert cell.prompt() == "[0] (Pdb) "
    cell.wait_for(lambda cell: "also failed: [1]" in cell.stdout)
    cell.type("c")
    assert cell.ok
    notebook.ok("%%remote t[0]\nfine = 1")
    cell = send(notebook, "%mesh debug t[0]").wait()
    assert cell.ename == "UsageError"
    assert (
        "nothing to debug on t[0]: its last cell or call has not failed or stopped; [1] failed: %mesh debug t[1]"
        in (cell.evalue)
    )
    assert notebook.ok("print([rank.state for rank in t.view().ranks])").stdout == "['idle', 'failed']\n"


def test_without_input_there_is_no_prompt_and_no_wait(notebook: Notebook) -> None:
    assert notebook.run(FAILS).ename == "RemoteError"
    cell = notebook.run("%mesh debug t[1]")
    assert cell.ename == "UsageError"
    assert "this frontend takes no input" in cell.evalue
    cell = notebook.ok("%%remote\nx = 1\nbreakpoint()\nx += 1\nx")
    assert "[0-1] breakpoint at cell [" in cell.stderr
    assert "], line 4 was skipped: this frontend takes no input" in cell.stderr
    assert cell.plain == "[0-1] 2"


def test_a_breakpoint_in_the_background_waits_while_extensions_run_code(notebook: Notebook) -> None:
    """An extension that inspects variables allows no input; the kernel still stops at the user's breakpoints."""
    send(notebook, "%%remote --background --out run\nbreakpoint()\nx = 1").wait()
    try:
        shows(notebook, "debugger at")
        for _ in range(20):
            notebook.ok("import time; time.sleep(0.05)")
        activities = notebook.value("[rank.activity for rank in t.view().ranks]")
        assert [activity[:11] for activity in activities] == ["debugger at"] * 2
        cell = send(notebook, "%mesh debug t")
        assert cell.prompt() == "[0] (Pdb) "
        notebook.interrupt()
        cell.wait()
    finally:
        notebook.ok("run.cancel()")


@pytest.mark.slow
def test_a_breakpoint_without_input_is_skipped(new_notebook: Callable[..., Notebook]) -> None:
    notebook = new_notebook(n=2)
    notebook.ok("%%remote --background --out run\nbreakpoint()\nrank")
    assert notebook.value("run.result().values()") == (0, 1)


def test_breakpoint(notebook: Notebook) -> None:
    cell = send(
        notebook,
        "%%remote\nprint('before')\ndef step(k):\n    print('only here')\n    breakpoint()\n    k += rank\n    return k\n"
        "if rank:\n    step(5)\n    print('after')",
    )
    assert cell.prompt() == "[1] (Pdb) "
    cell.wait_for(lambda cell: "-> k += rank" in cell.stdout)
    stopped = cell.stdout.index("[1] stopped at breakpoint: cell [")
    assert cell.stdout.index("before") < cell.stdout.index("[1] only here") < stopped
    assert "], line 6, in step" in cell.stdout
    assert "-> return k" in cell.type("n")
    assert cell.type("p k") == "6\n"
    assert cell.type("") == "6\n"  # an empty line repeats the last command
    assert "--Return--" in cell.type("n")
    assert "(9)<module>" in cell.type("w")
    cell.type("c")
    assert cell.ok
    assert "[1] after\n" in cell.stdout


def test_stopped_ranks_get_their_prompts_one_after_the_other(four: Notebook, bar: Bar) -> None:
    cell = send(
        four, "%%remote\nimport torch.distributed as dist\nif rank < 3: breakpoint()\nx = 10 * rank\ndist.barrier()\nx"
    )
    assert cell.prompt() == "[0] (Pdb) "
    cell.wait_for(lambda cell: "[0-2] stopped at breakpoint: cell [" in cell.stdout and "-> x = 10" in cell.stdout)
    assert "[0-2] cell [" in cell.type("ranks")
    assert cell.type("all p rank") == "[0] 0\n[1] 1\n[2] 2\n"
    assert cell.type("all p world_size") == "[0-2] 4\n"
    assert "has not stopped" in cell.type("rank 3")
    cell.type("rank 2")
    assert cell.asks == "[2] (Pdb) "
    cell.type("c")
    assert cell.asks == "[0] (Pdb) "
    with bar.below(10, "the barrier that waits for rank 1"):
        cell.type("n")
        assert cell.asks == "[0] (Pdb) "
        cell.type("n")  # the barrier, which waits for rank 1
        assert cell.asks == "[1] (Pdb) "
        assert "[0] continues to run" in cell.stdout
    cell.type("all c")
    while cell.asks:
        cell.type("c")
    assert cell.ok
    assert cell.plain == "[0] 0\n[1] 10\n[2] 20\n[3] 30"


def test_quit_fails_the_cell_there(notebook: Notebook) -> None:
    cell = send(notebook, "%%remote\ny = 1\nif rank: breakpoint()\ny = 2")
    cell.prompt()
    cell.type("q")
    assert cell.ename == "RemoteError"
    assert "[1] BdbQuit: debugger quit" in cell.error
    assert notebook.ok("%remote y").plain == "[0] 2\n[1] 1"


def test_end_of_input_quits(notebook: Notebook) -> None:
    cell = send(notebook, "%%remote t[0]\nbreakpoint()\ny = 2")
    cell.prompt()
    cell.type("\x04")
    assert "[0] BdbQuit: debugger quit" in cell.error


def test_an_interrupt_at_the_prompt_ends_the_cell(notebook: Notebook, bar: Bar) -> None:
    notebook.ok("%%remote\nkept = 5")
    for _ in range(2):
        cell = send(notebook, "%%remote\nkept += 1\nbreakpoint()\nkept = 0")
        cell.prompt()
        with bar.below(3, "the interrupt"):
            notebook.interrupt()
            cell.wait()
        assert cell.ename == "RemoteInterrupt"
        assert "[0-1]; their state is kept" in cell.evalue
    assert notebook.ok("%remote kept").plain == "[0-1] 7"


@pytest.mark.slow
def test_a_rank_that_dies_at_the_prompt_ends_it(new_notebook: Callable[..., Notebook]) -> None:
    notebook = new_notebook(n=2)
    pids = notebook.pids()
    cell = send(notebook, "%%remote\nif rank: breakpoint()\ny = 2")
    assert cell.prompt() == "[1] (Pdb) "
    psutil.Process(pids[1]).kill()
    cell.wait()
    assert cell.ename == "SupervisionError"
    cell = send(notebook, "%mesh debug t[1]").wait()
    assert "nothing to debug on t[1]: [1] is dead" in cell.evalue
    cell = send(notebook, "%%remote t[0]\nbreakpoint()\ny = 3")
    cell.prompt()
    notebook.close()  # the fixture checks that nothing is left


@pytest.mark.slow
def test_a_timeout_pauses_at_the_prompt(notebook: Notebook) -> None:
    cell = send(notebook, "%%remote t[1] --timeout 3\nimport time\nbreakpoint()\ntime.sleep(0.5)\n'whole'")
    cell.prompt()
    think_until = time.monotonic() + 3.5
    cell.wait_for(lambda _: time.monotonic() > think_until)
    cell.type("c")
    assert cell.plain == "[1] 'whole'"


def test_a_cell_in_the_background_waits_until_a_prompt_is_opened(notebook: Notebook) -> None:
    started = send(notebook, "%%remote --background --out h\nz = rank\nbreakpoint()\nz += 1\nz").wait()
    started.wait_for(lambda cell: "t[0-1] stopped at breakpoint: cell [" in cell.stdout)
    assert "%mesh debug t[0] opens the prompt" in started.stdout
    assert notebook.value("[rank.activity for rank in t.view().ranks]")[0].startswith("debugger at cell [")
    cell = send(notebook, "%mesh debug t[1]")
    assert cell.prompt() == "[1] (Pdb) "
    assert cell.type("p z") == "1\n"
    cell.type("c")
    assert cell.ok
    cell = send(notebook, "%mesh debug t")
    assert cell.prompt() == "[0] (Pdb) "
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    assert "[0] still wait" in cell.evalue
    cell = send(notebook, "%mesh debug t")
    cell.prompt()
    cell.type("c")
    assert cell.ok
    assert notebook.ok("h.result().values()").plain == "(1, 2)"


ACTOR = """\
from monarch_kernel.actor import Actor, endpoint
class Counter(Actor):
    def __init__(self): self.n = 0
    @endpoint
    def add(self, k):
        self.n += k
        breakpoint()
        return self.n
    @endpoint
    def fail(self, k):
        return self.n / k
counter = t.spawn("counter", Counter)
"""


def test_endpoints(notebook: Notebook) -> None:
    notebook.ok(ACTOR)
    cell = send(notebook, "counter.add.call(0).get().values()")  # the prompt is in the cell that waits
    assert cell.prompt() == "[0] (Pdb) "
    cell.wait_for(lambda cell: "-> return self.n\n" in cell.stdout)
    assert "[0-1] stopped at breakpoint: a cell of the notebook, line 8, in add\n" in cell.stdout
    assert "  8  ->\t        return self.n\n" in cell.type("ll")
    cell.type("all c")
    assert cell.plain == "(0, 0)"
    assert "%mesh debug" not in cell.stdout
    cell = send(notebook, "counter.add.call(0).get().values()")
    cell.prompt()
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    cell = send(notebook, "future = counter.add.call(3)").wait()
    assert cell.ok
    activities = "[rank.activity for rank in t.view().ranks]"
    cell.wait_for(lambda _: all(activity.startswith("debugger at") for activity in notebook.value(activities)))
    cell = send(notebook, "%mesh debug t[1]")
    assert cell.prompt() == "[1] (Pdb) "
    assert cell.type("p self.n").endswith("3\n")  # perhaps after the message that rank 0 has stopped, too
    cell.type("c")
    cell = send(notebook, "%mesh debug t[0]")
    cell.prompt()
    cell.type("c")
    assert notebook.ok("future.get().values()").plain == "(3, 3)"
    assert notebook.run("counter.fail.call(0).get()").ename == "ActorError"
    cell = send(notebook, "%mesh debug t[1]")
    cell.prompt()
    assert cell.type("p self.n, k") == "(3, 0)\n"
    cell.type("q")
    assert cell.ok


@pytest.mark.parametrize("what", ["input('?')", "__import__('getpass').getpass()"])
def test_a_rank_has_no_input(notebook: Notebook, what: str) -> None:
    cell = send(notebook, f"%%remote\n{what}").wait()
    assert "StdinNotImplementedError" in cell.error
    assert "Ask in a local cell and push the answer" in cell.error


def test_the_debugger_of_the_kernel_itself(new_notebook: Callable[..., Notebook], bar: Bar) -> None:
    """Use the debugger as JupyterLab does: stop at a breakpoint in a local cell that calls a function, then continue."""
    notebook = new_notebook()
    code = "def double(x):\n    y = 2 * x\n    return y\nprint(double(21))"
    debugger = _Adapter(notebook)
    assert debugger.ask("debugInfo")["isStarted"] is False
    debugger.ask("initialize", clientID="test", adapterID="", pathFormat="path")
    debugger.ask("attach")
    path = debugger.ask("dumpCell", code=code)["sourcePath"]
    points = [{"line": 2}]
    found = debugger.ask("setBreakpoints", source={"path": path}, breakpoints=points, sourceModified=False)
    assert [point["verified"] for point in found["breakpoints"]] == [True]
    debugger.ask("configurationDone")
    with bar.below(5, "the stop at the breakpoint"):
        cell = notebook.send(code)
        thread = debugger.event("stopped")["threadId"]
    frame = debugger.ask("stackTrace", threadId=thread)["stackFrames"][0]
    assert (frame["name"], frame["line"]) == ("double", 2)
    debugger.ask("next", threadId=thread)
    debugger.event("stopped")
    assert debugger.ask("stackTrace", threadId=thread)["stackFrames"][0]["line"] == 3
    debugger.ask("continue", threadId=thread)
    assert cell.wait().stdout == "42\n"
    assert debugger.ask("debugInfo")["isStarted"] is True
    debugger.ask("disconnect", restart=False, terminateDebuggee=False)
    assert notebook.ok("print(double(4))").stdout == "8\n"


class _Adapter:
    """Speaks the Debug Adapter Protocol with a kernel, over its control channel."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._seq = 0
        self._events: list[dict[str, Any]] = []

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Make a request; gives the body of the response."""
        self._seq += 1
        client = self._notebook.client
        content = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments}
        message = client.session.msg("debug_request", content)
        client.control_channel.send(message)
        deadline = time.monotonic() + ASK_S
        while True:
            assert time.monotonic() < deadline, command
            with suppress(Empty):
                reply = client.control_channel.get_msg(timeout=0.1)
                if reply["parent_header"]["msg_id"] == message["header"]["msg_id"]:
                    assert reply["content"]["success"], reply["content"]
                    return dict(reply["content"].get("body") or {})

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event; gives its body."""
        deadline = time.monotonic() + ASK_S
        client = self._notebook.client
        while time.monotonic() < deadline:
            with suppress(Empty):
                message = client.iopub_channel.get_msg(timeout=0.1)
                self._notebook._take(message)
                if message["msg_type"] == "debug_event" and message["content"]["event"] == name:
                    return dict(message["content"]["body"])
        pytest.fail(f"no event {name}")


@pytest.mark.slow
def test_in_a_terminal(terminal: Terminal) -> None:
    process = terminal.process
    terminal.enter("%remote t 1 / (1 - rank)")
    process.sendline("%mesh debug t[1]")
    process.expect_exact("[1] (Pdb) ")
    process.sendline("p rank")
    process.expect(r"1\r\n\[1\] \(Pdb\) ")
    terminal.enter("q")
    process.sendline("%remote t (breakpoint(), rank)[1]")
    process.expect_exact("[0] (Pdb) ")
    terminal.interrupt_prompt()
    process.expect("RemoteInterrupt: interrupted on")
    process.expect(terminal.PROMPT)
    process.sendline("%remote t (breakpoint(), rank)[1]")
    process.expect_exact("[0] (Pdb) ")
    process.sendline("all c")
    process.expect(r"\[0\] 0\s+\[1\] 1")
    process.expect(terminal.PROMPT)
    terminal.leave()


def shows(notebook: Notebook, what: str) -> None:
    """Wait until the table of the mesh shows a text."""
    wait_until(lambda: re.search(what, notebook.ok("%mesh show t").plain), f"{what} in the table")


def test_post_mortem_after_an_interrupt_at_a_prompt(notebook: Notebook) -> None:
    cell = send(notebook, "%%remote t[0]\ndef f(k):\n    breakpoint()\n    return k\nf(7)")
    cell.prompt()
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    cell = send(notebook, "%mesh debug t[0]")
    cell.prompt()
    assert cell.type("p k") == "7\n"
    assert "debugger.py" not in cell.type("w")
    cell.type("q")


def test_quitting_at_the_end_of_a_cell_shows_no_frame_of_the_debugger(notebook: Notebook) -> None:
    cell = send(notebook, "%%remote t[0]\n1\nbreakpoint()")
    cell.prompt()
    cell.type("q")
    assert "[0] BdbQuit: debugger quit" in cell.error
    assert "debugger.py" not in cell.error
    assert "bdb.py" not in cell.error


def test_choosing_a_rank_shows_its_line(notebook: Notebook) -> None:
    cell = send(notebook, "%%remote t\ndef f(k):\n    breakpoint()\n    return k\nf(rank)")
    cell.prompt()
    cell.type("all p k")
    assert re.fullmatch(r"\[1\] cell \[\d+\], line 4, in f\n", cell.type("rank 1"))
    assert cell.asks == "[1] (Pdb) "
    cell.type("all c")


def test_stacks_end_where_the_code_has_stopped(notebook: Notebook) -> None:
    notebook.ok("%%remote t[0] --background --out run\nbreakpoint()")
    shows(notebook, "debugger at")
    stacks = notebook.ok("%mesh stacks t").stdout
    assert "line 2: breakpoint()\n[1] idle\n" in stacks
    assert "threading" not in stacks
    notebook.ok("run.cancel()")


def test_classes_of_the_notebook_have_a_cell_as_their_place(notebook: Notebook) -> None:
    notebook.ok(
        "from monarch_kernel.actor import Actor, endpoint\n"
        "class Waits(Actor):\n    @endpoint\n    async def go(self, k):\n        breakpoint()\n        return k\n"
        "waits = t[0].spawn('waits', Waits)"
    )
    cell = send(notebook, "waits.go.call_one(3).get()")
    cell.prompt()
    assert "stopped at breakpoint: a cell of the notebook, line 6, in go" in cell.stdout
    notebook.interrupt()
    assert cell.wait().ename == "RemoteInterrupt"
    shows(notebook, "2 idle|1 failed")
    cell = send(notebook, "%mesh debug t[0]")
    cell.prompt()
    assert "[0] KeyboardInterrupt (a cell of the notebook, line 6, in go)" in cell.stdout
    assert cell.type("p k") == "3\n"
    cell.type("q")
    notebook.ok("waits.stop().get()")


def test_one_prompt_at_a_time(notebook: Notebook) -> None:
    """Cells of subshells share one channel for answers, which two threads must not read."""

    def in_subshell(code: str) -> Asking:
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": True, "stop_on_error": True}
        message = notebook.client.session.msg("execute_request", content)
        message["header"]["subshell_id"] = subshell
        notebook.client.shell_channel.send(message)
        cell = Asking(notebook, message["header"]["msg_id"])
        notebook.cells[cell.id] = cell
        return cell

    subshell = in_control(notebook, "create_subshell_request")["subshell_id"]
    first = send(notebook, "%%remote t[0]\nbreakpoint()\nrank")
    assert first.prompt() == "[0] (Pdb) "
    other = in_subshell("%mesh debug t[0]")
    other.wait()
    assert "another cell is asking for input" in other.evalue
    second = in_subshell("%%remote t[1]\nbreakpoint()\nrank")
    second.wait_for(lambda cell: "stopped at breakpoint" in cell.stdout)
    assert first.type("p rank") == "0\n"
    notebook.client.input("c")
    assert first.wait().plain == "[0] 0"
    assert second.prompt() == "[1] (Pdb) "
    second.type("c")
    assert second.plain == "[1] 1"
    in_control(notebook, "delete_subshell_request", subshell_id=str(subshell))


def test_a_mesh_made_by_the_program(bare: Notebook) -> None:
    bare.ok("from monarch_kernel.actor import this_host\nown = this_host().spawn_procs({'r': 2}, device='cpu')", 60)
    cell = send(bare, "%%remote own[0]\nbreakpoint()\nx = 1")
    assert cell.prompt(60) == "[0] (Pdb) "
    cell.type("c")
    assert cell.ok
    assert "was skipped" not in cell.stderr
