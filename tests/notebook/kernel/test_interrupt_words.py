"""The text of interrupts in a notebook: it shows the user's own lines, and names the cell that a cell waits for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.timeout(120)

GO = "print('go', flush=True)\n"


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(60)", "while True: pass", "import asyncio; await asyncio.sleep(60)"]
)
def test_a_local_interrupt_shows_no_frame_of_the_package(notebook: Notebook, code: str) -> None:
    # Without a flush, which the interrupt might hit.
    cell = notebook.send(f"print('go')\n{code}").wait_for(lambda cell: "go" in cell.stdout)
    notebook.interrupt()
    cell.wait()
    assert cell.ename == "KeyboardInterrupt"
    assert "----> 2 " + code.splitlines()[0] in cell.error
    assert "monarch_kernel" not in cell.error
    assert "hidden" not in cell.error
    assert "monarch_kernel" not in notebook.ok("%tb").error


def test_an_interrupt_of_a_magic_shows_no_frame_of_the_package(notebook: Notebook) -> None:
    notebook.ok("import monarch_kernel.notebook.output.logs as logs\nkept = logs._bounded")
    notebook.ok("def slow(lines):\n    print('go')\n    while True: pass")
    notebook.ok("slow.__code__ = slow.__code__.replace(co_filename=logs.__file__)")
    cell = notebook.send("logs._bounded = slow\n%mesh logs t").wait_for(lambda cell: "go" in cell.stdout)
    notebook.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert "get_ipython().run_line_magic('mesh', 'logs t')" in cell.error
    assert "monarch_kernel" not in cell.error
    notebook.ok("logs._bounded = kept")


def test_a_cell_that_catches_the_interrupt_and_ends_is_not_reported_as_late(notebook: Notebook) -> None:
    cell = notebook.send(f"%%remote\n{GO}import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: time.sleep(0.1)")
    cell.wait_for(lambda cell: len(cell.lines()) == 2)
    notebook.interrupt()
    assert cell.wait().evalue == "interrupted, but all ranks ran to their end"


def test_a_waiting_cell_names_the_cell_that_it_waits_for(notebook: Notebook) -> None:
    first = notebook.run("%%remote --background\nimport time; time.sleep(60)")
    number = first.reply["execution_count"]
    cell = notebook.send("%%remote\n1").wait_for(lambda cell: cell.stderr)
    assert cell.stderr == f"waits for cell [{number}] on [0-1] of t; Kernel > Interrupt ends the wait\n"
    notebook.interrupt()
    assert cell.wait().evalue == f"interrupted while it waited for cell [{number}]; it was not sent"
    notebook.ok("%mesh interrupt t")
    assert not notebook.ok("%%remote\n1").stderr


def test_an_interrupt_of_down_lists_the_ended_meshes(bare: Notebook, tmp_path: Path) -> None:
    bare.up(1)
    bare.ok("%mesh up u -n 1 --device cpu", 60)
    bare.ok("%mesh up v -n 1 --device cpu", 60)
    bare.ok(  # the end of a mesh waits for the interrupt
        "import os, time\nfrom monarch_kernel.notebook.magics.meshes import Meshes\nkept = Meshes.down\n"
        "def slow(self, name):\n    print('go')\n"
        f"    while not os.path.exists(os.path.join({str(tmp_path)!r}, name)): time.sleep(0.01)\n"
        "    return kept(self, name)\nMeshes.down = slow"
    )
    for command, first, said in (
        ("--all", "t", "interrupted; t has ended all the same; u, v are still up"),
        ("u", "u", "interrupted; u has ended all the same"),
    ):
        cell = bare.send(f"%mesh down {command}").wait_for(lambda cell: "go" in cell.stdout)
        bare.interrupt()
        (tmp_path / first).touch()
        assert cell.wait().evalue == said
        assert "1 rank ended" in cell.stdout
    bare.ok("Meshes.down = kept")
    table = bare.ok("%mesh").stdout
    assert [line.split()[0] for line in table.splitlines() if " idle " in line] == ["v"], table
    assert bare.ok("%mesh down --all").stdout == "v: 1 rank ended\n"
