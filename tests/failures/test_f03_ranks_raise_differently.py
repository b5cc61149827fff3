"""F03: ranks raise different errors; each has a block with its ranks."""

from __future__ import annotations

from tests.failures.cells import Cells

N = 4


def test_each_error_has_a_block_with_its_ranks(cells: Cells) -> None:
    text = cells.fails("if rank % 2:\n    raise KeyError('label')\nopen('/no/such/file')")
    assert "[0,2] FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'" in text
    assert "[1,3] KeyError: 'label'" in text
    assert text.index("line 3") < text.index("[1,3]") < text.index("line 2")


def test_equal_errors_of_different_lines_do_not_fold(cells: Cells) -> None:
    text = cells.fails("if rank == 0:\n    raise ValueError('bad')\nraise ValueError('bad')")
    assert "[0] ValueError: bad" in text
    assert "[1-3] ValueError: bad" in text
