"""F08: native code of a rank ends by SIGSEGV; the error has the Python stack at that moment."""

from __future__ import annotations

from tests.failures.cells import Cells


def test_the_python_stack_is_shown(cells: Cells) -> None:
    code = "import ctypes\ndef kernel(p):\n    ctypes.string_at(p)\nif rank == 1:\n    kernel(0)"
    text = cells.fails(code)
    assert "[1] RankDied: killed by SIGSEGV" in text
    assert f'File "<remote cell [{cells.number}]>", line 3 in kernel' in text
    assert f'File "<remote cell [{cells.number}]>", line 5 in <module>' in text
    assert "[0] finished" in text
