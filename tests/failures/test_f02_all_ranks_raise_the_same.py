"""F02: all ranks raise the same error; the notebook shows it once."""

from __future__ import annotations

from tests.failures.cells import Cells

N = 4


def test_equal_errors_are_shown_once(cells: Cells) -> None:
    text = cells.fails("batch = 3\nraise ValueError('no data in /data/train')")
    assert text.count("ValueError") == 2  # the headline and the source line
    assert "[0-3] ValueError: no data in /data/train" in text
    assert "line 2" in text
