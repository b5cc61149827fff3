"""``%load_ext monarch_kernel`` in the stock kernel and in terminals."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.processes import assert_gone

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook, Terminal
    from tests.support.timing import Bar

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_in_the_stock_kernel(new_notebook: Callable[..., Notebook], bar: Bar) -> None:
    notebook = new_notebook("python3")
    assert notebook.run("%mesh").ename == "UsageError"
    notebook.ok("%load_ext monarch_kernel")
    notebook.ok("%mesh up t -n 2 --device cpu", 60)
    assert notebook.ok("%%remote --out v\nprint('hello')\nrank").plain == "[0] 0\n[1] 1"
    assert notebook.value("v.values()") == (0, 1)
    assert {"up", "down"} <= set(notebook.complete("%mesh "))

    failed = notebook.run("%%remote\nif rank: 1/0")
    assert failed.ename == "RemoteError"
    assert "[1] ZeroDivisionError: division by zero" in failed.error

    cell = notebook.send("%%remote\nn = 3\nprint('go', flush=True)\nwhile True: n += 1")
    cell.wait_for(lambda cell: len(cell.lines()) == 2)
    with bar.below(2, "the interrupt"):
        notebook.interrupt()
        assert cell.wait().ename == "RemoteInterrupt"
    assert notebook.ok("%%remote\nn > 3").plain == "[0-1] True"

    ranks = [psutil.Process(pid) for pid in notebook.pids()]
    notebook.ok("%reload_ext monarch_kernel")
    notebook.ok("%mesh up t -n 1 --device cpu", 60)
    ranks += [psutil.Process(pid) for pid in notebook.pids()]
    notebook.ok("%unload_ext monarch_kernel")
    assert_gone(ranks)
    assert notebook.processes() == []
    assert notebook.run("%mesh").ename == "UsageError"
    assert notebook.run("1/0").ename == "ZeroDivisionError"


@pytest.mark.slow
def test_the_stock_kernel_ends_its_ranks_when_it_ends(new_notebook: Callable[..., Notebook]) -> None:
    notebook = new_notebook("python3")
    notebook.ok("%load_ext monarch_kernel")
    notebook.ok("%mesh up t -n 1 --device cpu", 60)
    assert notebook.processes()
    notebook.close()  # checks that its processes have ended


def test_in_a_terminal(terminal: Terminal) -> None:
    assert re.search(r"\[0\] 0\s+\[1\] 1", terminal.enter("%remote t rank"))
    assert "[1] ZeroDivisionError" in terminal.enter("%remote t 1 / (1 - rank)")
    terminal.process.sendline("%remote t (print('go', flush=True), __import__('time').sleep(600))")
    terminal.process.expect(r"\] go")
    terminal.process.sendintr()
    terminal.process.expect("RemoteInterrupt: interrupted on")
    terminal.process.expect(terminal.PROMPT)
    assert re.search(r"\[0\] 0\s+\[1\] 1", terminal.enter("%remote t rank"))
    terminal.leave()


@pytest.mark.slow
def test_a_mesh_on_hosts_is_shown_in_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    late = tmp_path / "python"  # starts so late that the terminal shows a wait
    late.write_text(f'#!/bin/sh\nsleep 3\nexec {sys.executable} "$@"\n')
    late.chmod(0o700)
    shown = terminal.enter(f"%mesh up h --on local --hosts 2 -n 1 --device cpu --python {late}")
    assert "h: 0 of 2 hosts up; waiting for" in shown
    assert "h: hosts=2 gpus=1, 2 ranks (2 idle)" in shown
    terminal.enter("%mesh down h")
    terminal.leave()


@pytest.mark.slow
def test_unloading_the_extension_ends_cells_in_the_background(new_notebook: Callable[..., Notebook]) -> None:
    notebook = new_notebook("python3")
    notebook.ok("%load_ext monarch_kernel")
    notebook.ok("%mesh up t -n 2 --device cpu", 60)
    cell = notebook.ok("%%remote --background --out run\nprint('begins', flush=True)\nimport time; time.sleep(600)")
    cell.wait_for(lambda cell: "begins" in cell.stdout)
    unload = notebook.ok("%unload_ext monarch_kernel")
    assert unload.text.strip() == ""
    cell.wait_for(lambda cell: "[0-1] Stopped: the session was shut down" in cell.error)
    shown = notebook.ok("run.exception(20)").plain
    assert re.fullmatch(
        r"<SupervisionError: cell \[\d\] failed on t: \[0-1\] Stopped: the session was shut down>", shown
    )
