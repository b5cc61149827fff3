"""The notebooks in the repository have no outputs, and use this project's kernel."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import NOTEBOOKS, read


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_have_no_outputs_and_use_this_kernel(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "monarch"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not [cell for cell in code if cell.outputs or cell.execution_count]
