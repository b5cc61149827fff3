"""Source files have names that the user knows."""

from __future__ import annotations

import pytest

from monarch_kernel.errors import Frame
from monarch_kernel.runtime.diagnostics.source_names import describe_line, short_cell, short_file


@pytest.mark.parametrize(
    ("file", "shown", "on_ranks"),
    [
        ("<remote cell [5]>", "remote cell [5]", "cell [5]"),
        ("<remote cell [0]>", "code", "code"),
        ("/tmp/ipykernel_12/345.py", "a cell of the notebook", "a cell of the notebook"),
        ("<ipython-input-3-abc>", "a cell of the notebook", "a cell of the notebook"),
        ("<string>", "string", "string"),
        (
            "/env/lib/python3.11/site-packages/torch/nn/functional.py",
            "torch/nn/functional.py",
            "torch/nn/functional.py",
        ),
        ("/home/me/model.py", "/home/me/model.py", "/home/me/model.py"),
    ],
)
def test_names(file: str, shown: str, on_ranks: str) -> None:
    assert short_file(file) == shown
    assert short_cell(file) == on_ranks


@pytest.mark.parametrize(
    ("file", "code", "shown"),
    [
        ("<remote cell [5]>", "x = 1", "cell [5], line 7, in step: x = 1"),
        ("/home/ann/train.py", "x = 1", "/home/ann/train.py, line 7, in step: x = 1"),
        (f"/{'long/' * 30}models/gpt.py", "x = 1", f"…/{'long/' * 16}models/gpt.py, line 7, in step: x = 1"),
        (f"/home/{'n' * 150}.py", "x = 1", "…/" + "n" * 117 + "…"),
        ("/home/ann/train.py", "x" * 200, "…/train.py, line 7, in step: " + "x" * 90 + "…"),
    ],
)
def test_a_wide_line_loses_the_first_folders_of_its_file(file: str, code: str, shown: str) -> None:
    text = describe_line(Frame(file, 7, "step", (code,), 7))
    assert text == shown
    assert len(text) <= 120
