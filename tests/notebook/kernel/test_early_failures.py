"""A rank fails or dies while the others go on: the running cell says so, and ``--fail-fast`` ends it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Cell, Notebook

pytestmark = pytest.mark.timeout(120)

WAIT = "import os, time\nwhile not os.path.exists({path!r}): time.sleep(0.01)\n"


def without_place(cell: Cell) -> str:
    """The line without the line of the rank that goes on, which is there if the rank has answered in time."""
    return re.sub(r" on \(line [45]\);", " on;", cell.stderr)


def test_a_failure_is_shown_while_the_others_go_on(notebook: Notebook, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    cell = notebook.send(f"%%remote\nif rank == 1: raise ValueError('early')\n{WAIT.format(path=str(gate))}")
    cell.wait_for(lambda cell: cell.stderr)
    assert (
        without_place(cell) == "[1] failed with ValueError: early (line 2); [0] goes on; Kernel > Interrupt ends it\n"
    )
    assert not cell.reply
    gate.touch()
    assert cell.wait().ename == "RemoteError"
    assert cell.stderr.count("early") == 1
    assert "[1] ValueError: early" in cell.error
    assert "[0] finished" in cell.error


def test_a_failure_of_a_background_cell_is_shown_below_it(notebook: Notebook, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    launch = notebook.ok(
        f"%%remote --background --out run\nif rank == 0: raise ValueError('early')\n{WAIT.format(path=str(gate))}"
    )
    launch.wait_for(lambda cell: cell.stderr)
    assert (
        without_place(launch) == "[0] failed with ValueError: early (line 2); [1] goes on; %mesh interrupt t ends it\n"
    )
    gate.touch()
    assert notebook.run("run.result()").ename == "RemoteError"


def test_fail_fast_ends_the_cell_with_the_error(notebook: Notebook) -> None:
    code = "if rank == 1: raise ValueError('early')\nimport time\nwhile True: time.sleep(0.1)"
    cell = notebook.run(f"%%remote --fail-fast\n{code}")
    assert cell.ename == "RemoteError"
    assert "[1] ValueError: early" in cell.error
    assert "[0] KeyboardInterrupt: interrupted on request, its state is kept" in cell.error
    assert cell.stderr == ""
    assert notebook.ok("%remote rank").plain == "[0] 0\n[1] 1"


def test_a_death_is_shown_while_the_others_go_on(notebook: Notebook, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    cell = notebook.send(f"%%remote\nimport os\nif rank == 1: os._exit(5)\n{WAIT.format(path=str(gate))}")
    cell.wait_for(lambda cell: cell.stderr)
    assert without_place(cell) == "[1] died (exit code 5); [0] goes on; Kernel > Interrupt ends it\n"
    gate.touch()
    assert cell.wait().ename == "SupervisionError"
