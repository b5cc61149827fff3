"""``python -m monarch_kernel`` imports libraries, and not files with the same names in the notebook's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_working_directory_does_not_shadow_libraries(tmp_path: Path) -> None:
    for name in ("selectors", "pathlib", "ipykernel"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of the working directory was imported')")
    command = [sys.executable, "-m", "monarch_kernel", "--version"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
