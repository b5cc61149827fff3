"""The benchmark of distributed tensors beside other libraries."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measures import row_key, select_measures
from benchmarks.report import Sample, render
from benchmarks.tensors.catalogue import BARS, LIBRARIES, MEASURES, NOTES
from tests.benchmarks.test_report import MACHINE, table_line

ROOT = Path(__file__).parents[2]


def test_every_bar_belongs_to_a_measured_row_and_each_library_has_a_script() -> None:
    rows = {row_key(measure.key, ranks) for measure in MEASURES for ranks in measure.ranks}
    assert {bar.row for bar in BARS} | {bar.than for bar in BARS if bar.than} <= rows
    assert set(NOTES) == set(LIBRARIES)
    for library in LIBRARIES:
        assert importlib.util.find_spec(f"benchmarks.tensors.{library}")


def test_a_bar_against_another_library_shows_the_ratio_that_it_limits() -> None:
    samples = [Sample("ours", "step_256_32/2", 3.0), Sample("plain", "step_256_32/2", 2.0)]
    report = render(MACHINE, ["ours", "plain"], select_measures(["step_256_32"], MEASURES), samples, BARS, NOTES)
    assert table_line(report, "step of an MLP 64-256-256-10, batch 32")[1:] == [
        "ms",
        "3",
        "2",
        "–",
        "<= 2 x plain, 1.50 met",
    ]


def measured(folder: Path, *libraries: str, only: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Run the command in a separate process, which adopts what libraries leave behind; gives its figures and its progress."""
    file = folder / "figures.json"
    command = [sys.executable, "-m", "benchmarks.tensors", "--repeat", "1", "--json", str(file)]
    command += ["--libraries", ",".join(libraries), "--only", ",".join(only)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())["results"]
    return found, done.stderr


@pytest.mark.slow
def test_a_library_gives_its_figures_and_says_what_it_has_not(tmp_path: Path) -> None:
    found, _ = measured(tmp_path, "plain", only=["step_64_32", "fetch"])
    assert found["step_64_32/1"]["peers"]["plain"]["median"] > 0
    assert found["fetch/2"]["peers"]["plain"]["missing"] == ["it has nothing like this"]


@pytest.mark.slow
def test_ours_drops_its_tensors_and_ends(tmp_path: Path) -> None:
    """All of its rows on two ranks that take no long time."""
    found, progress = measured(tmp_path, "ours", only=["issue_view", "until_add", "fetch", "recorded", "left"])
    assert "left" not in progress  # no process
    figures = {row: each["peers"]["ours"]["median"] for row, each in found.items()}
    assert figures.pop("left/2") == 0
    assert all(figures.values())
