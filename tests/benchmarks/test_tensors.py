"""The benchmark of distributed tensors beside other libraries."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.measures import row_key, select_measures
from benchmarks.report import Sample, render
from benchmarks.runner import Settings, run_once
from benchmarks.tensors.catalogue import BARS, LIBRARIES, MEASURES, NOTES
from tests.benchmarks.test_report import MACHINE, table_line

SETTINGS = Settings(repeat=1, module="benchmarks.tensors.{peer}")


def test_every_bar_belongs_to_a_measured_row_and_each_library_has_a_script() -> None:
    rows = {row_key(measure.key, ranks) for measure in MEASURES for ranks in measure.ranks}
    assert {bar.row for bar in BARS} | {bar.than for bar in BARS if bar.than} <= rows
    assert set(NOTES) == set(LIBRARIES)
    for library in LIBRARIES:
        assert importlib.util.find_spec(f"benchmarks.tensors.{library}")


def test_a_bar_against_another_library_shows_the_ratio_that_it_limits() -> None:
    samples = [Sample("ours", "step_64/2", 3.0), Sample("plain", "step_64/2", 2.0)]
    report = render(MACHINE, ["ours", "plain"], select_measures(["step_64"], MEASURES), samples, BARS, NOTES)
    assert table_line(report, "step of an MLP 64-64-64-10")[1:] == ["ms", "3", "2", "–", "<= 2 x plain, 1.50 met"]


def test_a_library_gives_its_figures_and_says_what_it_has_not() -> None:
    found, missing = run_once("plain", 2, ["step_64", "fetch"], SETTINGS).samples
    assert found.value is not None
    assert found.value > 0
    assert missing.reason == "it has nothing like this"


@pytest.mark.slow
def test_ours_drops_its_tensors_and_ends() -> None:
    """All of its rows on two ranks that take no long time."""
    run = run_once("ours", 2, ["issue_view", "until_add", "fetch", "recorded", "left"], SETTINGS)
    assert (run.trouble, run.left_behind) == ("", 0)
    figures = {sample.row: sample.value for sample in run.samples}
    assert figures.pop("left/2") == 0
    assert all(figures.values())
