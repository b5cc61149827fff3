"""F49: too few descriptors, no working directory, or a long temporary directory: one line says so, or there is a way round."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.notebook.magics import meshes
from monarch_kernel.notebook.magics.meshes import Meshes

SHELL = """
import os, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "monarch_kernel")
for cell in sys.argv[1:]:
    shell.run_cell(cell)
"""
UP = "%mesh up t -n 1 --device cpu"


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="f49-", dir="/tmp") as directory:
        yield Path(directory)


def run(*cells: str, descriptors: int = 0, **environment: str) -> list[str]:
    """Run cells in a new shell and return all that it writes, line by line."""
    command = [sys.executable, "-c", SHELL, *cells]
    if descriptors:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    done = subprocess.run(
        command,
        env={**os.environ, "HOME": environment.get("TMPDIR", "/"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


@pytest.mark.slow
def test_sockets_have_a_short_path_where_that_of_tmpdir_is_long(short_path: Path, elsewhere: Path) -> None:
    long = short_path / ("long" * 47)
    long.mkdir()
    said = run(UP, "%remote t rank", "%mesh down t", TMPDIR=str(long), XDG_RUNTIME_DIR=str(elsewhere))
    assert "[0] 0" in said
    assert said[-1] == "t: 1 rank ended"
    assert not [*elsewhere.iterdir(), *long.glob("monarch-*")]


def test_too_few_descriptors_are_named_with_the_limit(short_path: Path) -> None:
    said = run(UP, descriptors=30, TMPDIR=str(short_path))
    (line,) = [each for each in said if each.startswith("UsageError")]
    assert line.startswith("UsageError: this process may open 30 files, and only ")
    assert "ranks need 32 more: raise the limit in the shell that starts Jupyter" in line
    assert not [each for each in said if "Traceback" in each]


def test_a_deleted_working_directory_is_named(short_path: Path) -> None:
    gone = short_path / "gone"
    gone.mkdir()
    said = run(
        f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})", UP, "os.chdir('/')", TMPDIR=str(short_path)
    )
    assert [each for each in said if "the working directory was deleted" in each] == [
        "UsageError: the working directory was deleted, and ranks start in it: change to another, such as with %cd ~ in a "
        "notebook"
    ]
    assert not [each for each in said if "Traceback" in each]


@pytest.mark.parametrize("error", [LaunchError("no directory"), OSError(24, "Too many open files"), RuntimeError("?")])
def test_a_kernel_starts_also_where_ranks_can_not(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(meshes, "this_host", fail)
    Meshes.prepare(cast(Meshes, None))
