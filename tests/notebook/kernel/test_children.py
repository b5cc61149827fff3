"""The output of child processes goes to the cell that started them, even while other cells run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.timeout(120)

SPEAKER = """
import os, subprocess, sys
code = "import sys\\nfor line in sys.stdin: print('child', line.strip()); print('oh', file=sys.stderr)"
process = subprocess.Popen([sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, text=True)
def say(what):
    process.stdin.write(what + "\\n"); process.stdin.flush()
"""


def test_a_child_writes_to_its_cell_while_others_run(notebook: Notebook, tmp_path: Path) -> None:
    def gate(name: str) -> str:
        return f"while not os.path.exists({str(tmp_path / name)!r}): time.sleep(0.01)"

    launching = notebook.ok(f"%%remote\n{SPEAKER}print('launched')")
    for i in range(3):
        other = notebook.send(
            f"%%remote\nimport time\nsay('{i}'); print('before', {i})\n{gate(str(i))}\nprint('after', {i})"
        )
        launching.wait_for(lambda cell, i=i: cell.stdout.count(f"child {i}\n") and cell.stderr.count("oh") > i)
        (tmp_path / str(i)).touch()
        other.wait()
        assert other.ok
        assert other.lines() == {rank: [f"before {i}", f"after {i}"] for rank in range(2)}
        assert other.stderr == ""
    assert launching.lines()[0] == ["launched", "child 0", "child 1", "child 2"]
    second = notebook.ok("%%remote\nsecond = subprocess.Popen('sleep 0.3; echo of the second', shell=True)")
    third = notebook.send(f"%%remote\nsay('late'); print('third', flush=True)\n{gate('third')}")
    second.wait_for(lambda cell: "of the second" in cell.stdout)
    launching.wait_for(lambda cell: "child late" in cell.stdout)
    (tmp_path / "third").touch()
    assert third.wait().lines() == {rank: ["third"] for rank in range(2)}
    notebook.ok("%%remote\nprocess.stdin.close(); process.wait(); second.wait()")
    for i in range(3):
        assert notebook.ok(
            f"%%remote\nos.write(1, b'by fd\\n'); os.system('echo by a child'); print({i});"
        ).lines() == {rank: ["by fd", "by a child", str(i)] for rank in range(2)}


def test_redirected_output_stays_redirected(notebook: Notebook) -> None:
    cell = notebook.ok(
        "%%remote\nimport os, subprocess, tempfile\n"
        "file = tempfile.TemporaryFile()\nsaved = os.dup(1); _ = os.dup2(file.fileno(), 1)\n"
        "child = subprocess.Popen(['sleep', '30'])"
    )
    notebook.ok("%%remote\nprint('into the file', flush=True)")
    notebook.ok("%%remote\n_ = os.dup2(saved, 1); os.close(saved); child.kill(); child.wait()")
    cell = notebook.ok("%%remote\nfile.seek(0); print(file.read().decode(), end=''); file.close()")
    assert cell.lines() == {rank: ["into the file"] for rank in range(2)}


def test_many_cells_beside_a_child_leave_no_descriptors(notebook: Notebook) -> None:
    notebook.ok("%%remote\nimport os, subprocess\nchild = subprocess.Popen(['sleep', '60'])")
    count = "len(os.listdir('/proc/self/fd'))"
    notebook.ok("%%remote\nprint(1)")
    before = notebook.ok(f"%remote {count}").plain
    for _ in range(10):
        notebook.ok("%%remote\nprint(1)")
    assert notebook.ok(f"%remote {count}").plain == before
    notebook.ok("%%remote\nchild.kill(); child.wait()")
