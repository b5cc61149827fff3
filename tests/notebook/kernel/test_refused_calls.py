"""Calls that the package refuses: the traceback ends at the user's line with the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.notebook.kernel.conftest import Notebook

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("t.map(abs, [1])", "ValueError: t.map(): values 1: {'gpus': 2} has 2 ranks and needs as many values, but 1 was given"),
        ("t[9]", "IndexError: axis 'gpus' has size 2: index 9 is out of range -2 to 1"),
        ("t.map(5, [1, 2])", "TypeError: map() calls a function, not a int: map(function, values, ...)"),
        ("t.run('import time; time.sleep(0.5)').get(0.01)", "TimeoutError: no answer within 0.01 s; the request goes on"),
    ],
)  # fmt: skip
def test_the_traceback_ends_where_the_user_called(notebook: Notebook, code: str, says: str) -> None:
    cell = notebook.run(f"def mine():\n    {code}\n\nmine()")
    assert f"----> 2     {code}" in cell.error
    assert "----> 4 mine()" in cell.error
    assert cell.error.rstrip().endswith(says)
    assert "monarch_kernel" not in cell.error
    assert "monarch_kernel" in notebook.run("%tb").error  # shows the whole traceback


def test_user_errors_have_their_usual_traceback(notebook: Notebook) -> None:
    assert "----> 1 {}['a']" in notebook.run("{}['a']").error
    cell = notebook.run("import json\njson.loads('{')")
    assert "----> 2 json.loads('{')" in cell.error
    assert "json/decoder.py" in cell.error
