"""Cells of a rank that has neither torch nor IPython; `test_cell_shell.py` tests that their outcomes are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Script = Callable[[str], Any]  # the value of the fixture `rank`

pytestmark = pytest.mark.parametrize("rank", ["LightShell"], indirect=True)


def test_ipython_takes_over_with_the_same_namespace(rank: Script) -> None:
    ran = rank(
        """
        from IPython.core.interactiveshell import InteractiveShell
        def plain(code):
            outcome = run(code)
            return [outcome.value, outcome.bundle, InteractiveShell.initialized()]
        before = shell.namespace
        report["cells"] = [plain(code) for code in ("seen = []", "seen.append(1)", "def f(): return len(seen)", "f()", "f();")]
        shell.namespace["ns"] = "pushed"
        report["shown"] = plain("seen.append(2); seen")
        report["after"] = plain("%%capture text\\nprint(f(), ns, rank)")
        report["text"] = run("text.stdout").value
        report["same"] = shell.namespace is before is sys.modules["__main__"].__dict__
        report["names"] = sorted(name for name in shell.namespace if name not in shell.hidden and name[0] != "_")
        """
    )
    assert ran.report == {
        "cells": [
            [None, {}, False],
            [None, {}, False],
            [None, {}, False],
            [1, {"text/plain": "1"}, False],
            [1, {}, False],
        ],
        "shown": [[1, 2], {"text/plain": "[1, 2]"}, True],
        "after": [None, {}, True],
        "text": "2 pushed 3\n",
        "same": True,
        "names": ["f", "ns", "rank", "seen", "started", "text"],
    }


@pytest.mark.parametrize(
    "code",
    [
        "!true",
        "import asyncio\nawait asyncio.sleep(0)",
        "whoami",
        "print?",
        "get_ipython()",
        "display(1)",
        "[1]",
        "Out",
    ],
)
def test_code_that_is_not_plain_python_runs_in_ipython(rank: Script, code: str) -> None:
    ran = rank(
        f"""
        from IPython.core.interactiveshell import InteractiveShell
        outcome = run({code!r})
        report["ipython"] = InteractiveShell.initialized()
        """
    )
    assert ran.report == {"ipython": True}


def test_a_syntax_error_runs_nothing(rank: Script) -> None:
    ran = rank(
        """
        report["told"] = told(run("x = 1\\nreturn x"))["headline"]
        report["ran"] = "x" in shell.namespace
        """
    )
    assert ran.report == {"told": "SyntaxError: 'return' outside function", "ran": False}
