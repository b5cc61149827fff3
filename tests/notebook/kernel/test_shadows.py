"""F44: files beside the notebook that have the names of libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_kernel.cli import TEMPLATE
from tests.notebook.kernel.conftest import Notebook
from tests.test_main import SHADOWS

THIRD_PARTY = (
    "IPython",
    "ipykernel",
    "msgspec",
    "zmq",
)  # these are found before the installed ones, as in any notebook


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_notebook: Callable[..., Notebook]) -> Notebook:
    """A kernel, started as the kernelspec of this checkout says, beside files with the names of libraries."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "monarch").symlink_to(TEMPLATE)
    folder = tmp_path / "notebook"
    folder.mkdir()
    for name in set(SHADOWS) - set(THIRD_PARTY):
        (folder / f"{name}.py").write_text(f"raise ImportError('{name}.py beside the notebook')")
    (folder / "helper.py").write_text("mine = 42")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.chdir(folder)
    return new_notebook()


@pytest.mark.slow
def test_a_mesh_comes_up_and_the_file_that_hides_torch_is_named(beside: Notebook) -> None:
    assert beside.value("__import__('helper').mine") == 42
    up = beside.up(2)
    assert "t: torch.py in the working directory is imported in place of the library: rename it\n" in up.stderr
    beside.ok("%%remote --out found\nimport helper, random, torch, types\nhelper.mine, torch.ones(2).sum().item()")
    assert beside.value("found.values()") == ((42, 2.0), (42, 2.0))
