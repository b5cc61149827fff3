"""Source files have names that the user knows."""

from __future__ import annotations

import pytest

from monarch_kernel.runtime.diagnostics.source_names import short_cell, short_file


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
