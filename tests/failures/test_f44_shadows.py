"""F44: a file beside the notebook has the name of a library; the standard library wins, and a hidden package is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from monarch_kernel.actor.start_notes import shadow_notes
from monarch_kernel.launch.base import agent_command
from tests.test_main import SHADOWS


def test_agents_start_beside_files_with_the_names_of_libraries(tmp_path: Path) -> None:
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of the working directory was imported')")
    done = subprocess.run(
        agent_command(), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert "this is not a configuration of a host agent" in done.stderr
    assert "of the working directory was imported" not in done.stderr


@pytest.mark.parametrize("file", ["torch.py", "numpy/__init__.py", "ipywidgets.py", "sympy.py"])
def test_a_file_that_hides_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert shadow_notes() == [f"{file} in the working directory is imported in place of the library: rename it"]
