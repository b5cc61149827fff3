"""The floor benchmark, the smallest cost of a call, measures all kinds and leaves no process behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.floor import KINDS


def test_all_kinds_are_measured_and_the_program_ends(tmp_path: Path) -> None:
    file = tmp_path / "floor.json"
    command = [sys.executable, "-m", "benchmarks.floor", "--ranks", "40", "--out", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr  # processes that it forked would keep its output open
    figures = json.loads(file.read_text())["kinds"]
    assert set(figures) == set(KINDS)
    for each in figures.values():
        assert each["ranks"] == 40
        assert 0 < each["least_ms"] <= each["median_ms"]
