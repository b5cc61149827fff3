"""Whatever goes past IPython's transformers is what they would have left as it is."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from monarch_kernel.runtime.worker.plain_cells import may_be_plain

PLAIN = [
    "pass",
    "import os",
    "for x in y: print(x)",
    "x = 1\ny = x",
    "def f(x):\n    return x % 2\n\nf(1)",
    "# %time\nx",
    "'''\n  text?no\n'''\nx",
    "\n\nimport os",
    "if a:\n\tb\n",
    "x = a != b\ny",
    "s = 'a\\n'\ns",
]
NOT_PLAIN = [
    "",
    "  ",
    "ls",
    "cd -1",
    "x",
    "%time x",
    "x\n%time y",
    "!ls\nx",
    "x?\ny",
    "?x\ny",
    "a = !ls\nb",
    "a = %pwd\nb",
    ">>> x\n>>> y",
    "In [1]: x\ny",
    "x = '''\n  \n'''\ny",
    "  x = 1\n  y = 2",
    "\n  x = 1\n  y = 2",
    "%%time\nx",
    ", f a b\nx",
    "/f\nx",
]
PIECES = st.lists(
    st.sampled_from(
        [*"\n\n\n %!?/;,.=()'\"#\t\\x1", "  ", "'''", "...", ">>> ", "In [1]: ", "if x:", "pass", "= !", "x?"]
    ),
    max_size=14,
).map("".join)


def transformed(code: str) -> str:
    return TransformerManager().transform_cell(code)  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.parametrize("code", PLAIN)
def test_plain_python_needs_no_transformer(code: str) -> None:
    assert may_be_plain(code)
    ast.parse(code)


@pytest.mark.parametrize("code", NOT_PLAIN)
def test_all_that_ipython_may_change_goes_through_its_transformers(code: str) -> None:
    assert not may_be_plain(code)


@given(st.one_of(PIECES, st.lists(st.sampled_from([*PLAIN, *NOT_PLAIN]), max_size=3).map("\n".join)))
def test_ipython_changes_nothing_in_what_is_taken_for_plain(code: str) -> None:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return
    if may_be_plain(code):
        assert transformed(code).strip("\n") == code.strip("\n")
        assert len(transformed(code).splitlines()) > 1 or not code.strip("\n").count("\n")
