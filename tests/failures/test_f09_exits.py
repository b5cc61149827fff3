"""F09: `sys.exit` in a cell does not end the rank; `os._exit` does, and the error has the code."""

from __future__ import annotations

from tests.failures.cells import Cells


def test_sys_exit_ends_only_the_cell(cells: Cells) -> None:
    pids = cells.ok("os.getpid()")
    assert "[0-1] SystemExit: bye (a cell cannot end its rank; use %mesh down)" in cells.fails("sys.exit('bye')")
    assert cells.ok("os.getpid()") == pids


def test_os_exit_is_reported_with_its_code(cells: Cells) -> None:
    text = cells.fails("if rank == 1:\n    os._exit(17)")
    assert "[1] RankDied: the process ended with exit code 17" in text
    assert "[0] finished" in text
