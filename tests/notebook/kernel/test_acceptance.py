"""The promises to users, checked from outside: one test for each promise, on four ranks."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pexpect
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.support.processes import assert_gone
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)

ANSI = re.compile(r"\x1b\[[0-9;]*m")
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # one pixel
TORCH = "import torch, torch.distributed as dist"


@pytest.fixture
def own(bare: Notebook) -> Notebook:
    """A kernel with a mesh whose ranks the test may kill."""
    bare.up(4)
    return bare


def labelled(cell: Cell) -> list[str]:
    """The displayed plain lines with a label, such as ``[0-3] 6.0``."""
    return [line for line in cell.plain.splitlines() if line.startswith("[")]


# -- cells


def test_the_first_cell_works_as_soon_as_the_mesh_is_up(bare: Notebook) -> None:
    bare.send("%mesh up t -n 4 --device cpu")
    first = bare.send(f"%%remote\n{TORCH}\nx = torch.ones(1); dist.all_reduce(x); rank, world_size, x.item()").wait(60)
    assert first.ok, first.text
    assert labelled(first) == [f"[{rank}] ({rank}, 4, 4.0)" for rank in range(4)]


def test_the_text_of_each_rank_is_exact(four: Notebook) -> None:
    cell = four.ok(
        "%%remote t\nimport sys\nprint('a', rank, end='')\nprint('b')\nprint('problem', rank, file=sys.stderr)"
    )
    assert cell.stdout.splitlines() == [f"[{rank}] a {rank}b" for rank in range(4)]
    assert cell.stderr.splitlines() == [f"[{rank}] problem {rank}" for rank in range(4)]


def test_equal_output_of_all_ranks_is_shown_once(four: Notebook) -> None:
    cell = four.ok("%%remote t\nprint('the same')\nprint('mine' if rank == 2 else 'ours')")
    assert cell.stdout.splitlines()[0] == "[0-3] the same"
    assert set(cell.stdout.splitlines()[1:]) == {"[0-1,3] ours", "[2] mine"}
    raw = four.ok("%%remote t --raw\nprint('the same')")
    assert sorted(raw.stdout.splitlines()) == [f"[{rank}] the same" for rank in range(4)]


def test_variables_of_the_notebook_are_untouched(four: Notebook) -> None:
    four.ok("x = [1, 2, 3]")
    four.ok("%%remote t\nimport torch\nx = torch.zeros(5)")
    assert four.ok("x").plain == "[1, 2, 3]"
    assert labelled(four.ok("%remote t x.shape")) == ["[0-3] torch.Size([5])"]


def test_rich_results_come_with_their_ranks_in_order(four: Notebook) -> None:
    cell = four.ok(
        "%%remote t[0:2]\nfrom IPython.display import HTML, display\n"
        f"import base64\nclass Figure:\n    def _repr_png_(self):\n        return base64.b64decode('{PNG}')\n"
        "display(HTML('<b>both</b>'))\ndisplay(Figure())\nHTML(f'<i>{rank}</i>')"
    )
    shown = [data for data in cell.shown if set(data) - {"text/plain"}]
    assert "<b>both</b>" in shown[0]["text/html"]
    assert "image/png" in shown[1] or "data:image/png" in shown[1]["text/html"]
    everything = "".join(data.get("text/html", "") for data in shown[2:])
    assert "<i>0</i>" in everything
    assert "<i>1</i>" in everything
    assert "[0-1]" in cell.plain


# -- interrupts


def test_an_interrupt_stops_a_loop_on_all_ranks(four: Notebook, bar: Bar) -> None:
    pids = four.pids()
    four.ok("%%remote t\nn = 0")
    cell = four.send("%%remote t\nprint('loops', flush=True)\nwhile True: n += 1")
    cell.wait_for(lambda cell: "loops" in cell.stdout)
    with bar.below(2, "the interrupt"):
        four.interrupt()
        cell.wait()
    assert (cell.reply["status"], cell.ename) == ("error", "RemoteInterrupt")
    assert labelled(four.ok("%%remote t\nn > 0")) == ["[0-3] True"]
    assert four.pids() == pids


def test_an_interrupt_of_a_local_cell_leaves_an_idle_mesh_alone(four: Notebook) -> None:
    pids = four.pids()
    cell = four.send("print('sleeps', flush=True); import time; time.sleep(60)").wait_for(lambda cell: cell.stdout)
    four.wait_blocked()
    four.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert labelled(four.ok("%%remote t\nrank >= 0")) == ["[0-3] True"]
    assert four.pids() == pids


def test_an_interrupt_releases_a_rank_that_waits_for_another(four: Notebook, bar: Bar) -> None:
    cell = four.send(
        f"%%remote t\n{TORCH}\nimport time\nprint('there', flush=True)\nif rank == 1: time.sleep(60)\ndist.barrier()"
    )
    cell.wait_for(lambda cell: "[0-3] there" in cell.stdout or cell.stdout.count("there") == 4)
    with bar.below(3, "the interrupt"):
        four.interrupt()
        cell.wait()
    assert cell.ename == "RemoteInterrupt"
    assert "[0-3]" in cell.evalue
    assert labelled(four.ok("%%remote t\nx = torch.ones(1); dist.all_reduce(x); x.item()")) == ["[0-3] 4.0"]


# -- errors


def run_notebook(*cells: str) -> tuple[nbformat.NotebookNode, CellExecutionError | None]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, kernel_name="monarch", timeout=60)
    try:
        client.execute()
    except CellExecutionError as error:
        return notebook, error
    return notebook, None


def test_an_error_on_one_rank_ends_run_all() -> None:
    code = "%%remote t\nscale = 3\nif rank == 1: 1/0"
    notebook, error = run_notebook("%mesh up t -n 2 --device cpu", "x = 1", code, "x = 2")
    assert error is not None
    assert error.ename == "RemoteError"
    text = ANSI.sub("", str(error))
    assert "[1] ZeroDivisionError: division by zero" in text
    assert "----> 3 if rank == 1: 1/0" in text
    assert "monarch_kernel/" not in text
    assert notebook.cells[3].get("execution_count") is None


def test_an_error_on_many_ranks_is_one_block(bare: Notebook) -> None:
    bare.up(8)
    failing = "%%remote t{}\ndef deep(k): return deep(k - 1) if k else [][3]\ndeep(4)"
    one = bare.run(failing.format("[3]"))
    all_of_them = bare.run(failing.format(""))
    assert "[0-7] IndexError: list index out of range" in all_of_them.error
    assert all_of_them.error.count("IndexError") == one.error.count("IndexError")
    assert len(all_of_them.error) < 2 * len(one.error)


def test_an_error_on_one_rank_releases_the_ranks_that_wait_for_it(four: Notebook, bar: Bar) -> None:
    pids = four.pids()
    cell = four.run(f"%%remote t\n{TORCH}\nkept = rank\nif rank == 1: raise ValueError('no data')\ndist.barrier()")
    bar.check(cell.elapsed_s, 4, "the cell")
    assert "[1] ValueError: no data" in cell.error
    assert re.search(r"\[0,2-3\] waited for other ranks at remote cell \[\d+\], line 5, and were released", cell.error)
    assert labelled(four.ok("%%remote t\nx = torch.ones(1); dist.all_reduce(x); x.item(), kept == rank")) == [
        "[0-3] (4.0, True)"
    ]
    assert four.pids() == pids


def test_a_killed_rank_is_named_and_the_others_continue(own: Notebook, bar: Bar) -> None:
    doomed = own.run("%%remote t\nimport os, time\nif rank == 2: os.kill(os.getpid(), 9)\ntime.sleep(0.2)")
    bar.check(doomed.elapsed_s, 3, "the cell")
    assert doomed.ename == "SupervisionError"
    assert "[2]" in doomed.error
    assert "SIGKILL" in doomed.error
    assert "† dead" in own.ok("%mesh show t").plain
    assert labelled(own.ok("%%remote t[[0, 1, 3]]\n'lives'")) == ["[0-1,3] 'lives'"]


# -- kernels that end, and a cell that takes long meanwhile


LONG = "%%remote t\nimport time\nprint('begins', flush=True)\ntime.sleep(31)\nprint('ends')\nrank"


@pytest.fixture
def console() -> Iterator[pexpect.spawn]:
    arguments = ["-m", "jupyter_console", "--kernel", "monarch", "--simple-prompt"]
    terminal = pexpect.spawn(sys.executable, arguments, timeout=60, encoding="utf-8", dimensions=(50, 200))
    yield terminal
    terminal.close(force=True)


@pytest.fixture(scope="class")
def long_cell(four: Notebook) -> Iterator[tuple[Cell, float]]:
    """A cell that takes half a minute, and how soon its first output came; it runs beside the tests of a class."""
    cell = four.send(LONG).wait_for(lambda cell: "begins" in cell.stdout)
    yield cell, time.monotonic() - cell.sent_at
    if not cell.reply:  # the test that waits for its end did not run
        four.interrupt()
        cell.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("long_cell")
class TestBesideALongCell:
    def test_ranks_end_with_their_kernel(self, new_notebook: Callable[..., Notebook]) -> None:
        notebook = new_notebook(n=4)
        for now in (False, True):
            below = notebook.processes()
            assert len(below) >= 6  # agent, zygote, ranks
            notebook.manager.restart_kernel(now=now)
            notebook.client.wait_for_ready(timeout=60)
            assert_gone(below)
            notebook.ok("%mesh up t -n 4 --device cpu", 60)
        below = notebook.processes()
        os.kill(notebook.pid, signal.SIGKILL)
        assert_gone(below)

    def test_two_notebooks_at_once(self, tmp_path: Path) -> None:
        """One kernel ends while the other runs."""
        cells = [
            "%mesh up t -n 2 --device cpu",
            f"%%remote t\n{TORCH}\nx = torch.ones(1); dist.all_reduce(x); x.item()",
        ]
        clients = []
        try:
            for _ in range(2):
                notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
                client = NotebookClient(notebook, kernel_name="monarch", timeout=60)
                client.create_kernel_manager()
                client.start_new_kernel()
                client.start_new_kernel_client()
                clients.append(client)
            for client in clients:
                for index, cell in enumerate(client.nb.cells):
                    client.execute_cell(cell, index)
                assert "2.0" in str(client.nb.cells[1].outputs)
            clients.pop()._cleanup_kernel()
            again = clients[0].execute_cell(nbformat.v4.new_code_cell("%remote t x.item() + 1"), 1)
            assert "3.0" in str(again.outputs)
        finally:
            for client in clients:
                client._cleanup_kernel()

    def test_torch_may_be_in_use_before_the_mesh_comes_up(self, new_notebook: Callable[..., Notebook]) -> None:
        notebook = new_notebook()
        notebook.ok(
            "import torch\ntorch.set_num_threads(2)\n(torch.randn(200, 200) @ torch.randn(200, 200)).sum().backward", 60
        )
        notebook.ok("%mesh up t -n 2 --device cpu", 60)
        assert labelled(
            notebook.ok("%%remote t\nimport torch\n(torch.ones(2, 2) @ torch.ones(2, 2)).sum().item()")
        ) == ["[0-1] 8.0"]

    def test_in_a_console(self, console: pexpect.spawn) -> None:
        console.expect(r"In \[1\]:")
        kernel = psutil.Process(console.pid).children(recursive=True)
        console.sendline("%mesh up t -n 2 --device cpu")
        console.expect(r"In \[2\]:")
        below = psutil.Process(console.pid).children(recursive=True)
        assert len(below) > len(kernel)
        console.sendline("%mesh")
        console.expect("2 idle")
        console.expect(r"In \[3\]:")
        console.sendline("%remote t rank * 100 + 11")
        console.expect(r"\[1\] 111")
        console.expect(r"In \[4\]:")
        console.sendline("%remote t [print('loops', flush=True), [0 for _ in iter(int, 1)]]")
        console.expect(r"\] loops")  # only ranks print "] ": the terminal has echoed the line itself
        # The signal that the console sends at Ctrl-C. A Ctrl-C while the console takes a lock would block it forever
        # (jupyter_console 6.6).
        os.killpg(os.getpgid(kernel[0].pid), signal.SIGINT)
        console.expect("interrupted on")
        console.expect(r"In \[5\]:")
        console.sendline("exit")
        console.expect(pexpect.EOF)
        assert_gone(below)

    def test_a_cell_may_take_longer_than_half_a_minute(self, long_cell: tuple[Cell, float], bar: Bar) -> None:
        cell, first_output_s = long_cell
        bar.check(first_output_s, 2, "the first output")
        cell.wait()
        assert "[0-3] ends" in cell.stdout
        assert labelled(cell) == [f"[{rank}] {rank}" for rank in range(4)]


# -- misuse


@pytest.mark.parametrize("code", ["%%remote\n1", "%mesh up t -n -1", "%mesh up t -n two", "%mesh two"])
def test_a_usage_error_without_a_mesh_is_one_line_and_starts_nothing(bare: Notebook, code: str) -> None:
    wait_until(lambda: len(bare.processes()) == 2, "only the agent and its zygote to be there")
    before = bare.processes()
    cell = bare.run(code)
    assert (cell.reply["status"], cell.ename) == ("error", "UsageError")
    assert "\n" not in cell.evalue
    assert "Traceback" not in cell.text
    assert bare.processes() == before
