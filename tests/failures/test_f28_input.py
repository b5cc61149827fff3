"""F28: a cell on ranks asks for input; it fails at once with the reason."""

from __future__ import annotations

import pytest

from tests.failures.cells import Cells


@pytest.mark.parametrize("code", ["input('name? ')", "import getpass; getpass.getpass()"])
def test_the_error_says_why_and_what_to_do(cells: Cells, code: str) -> None:
    text = cells.fails(code)
    assert "does not work on a rank: ranks run in parallel and have no keyboard" in text
    assert "Ask in a local cell and push the answer" in text
