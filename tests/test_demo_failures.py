"""The notebook on failures shows an error and a death, and its training survives a death."""

from __future__ import annotations

import re

import pytest

from monarch_kernel.notebook.syntax.selector import pick_ranks
from tests.support.notebooks import NOTEBOOKS, Run, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(read(NOTEBOOKS / "05_failures.ipynb"), tmp_path_factory.mktemp("failures"))
    assert run.code == 0, run.stdout + run.stderr
    return run


def test_an_error_names_the_rank_and_the_module(run: Run) -> None:
    shown = run.shown_by("# the bug")
    assert "[2] RuntimeError" in shown
    assert "x[16, 255]" in shown.replace("tensor", "x") or "[16, 255]" in shown
    assert "[0-1,3] waited for other ranks at remote cell [" in shown


def test_a_death_is_shown_and_healed(run: Run) -> None:
    assert "[1] RankDied: killed by SIGKILL" in run.shown_by("barrier()")
    assert "trainers: [1] replaced in " in run.shown_by("%mesh heal")
    assert run.shown_by('"model" in globals()').splitlines() == ["[0,2-3] True", "[1] False"]


def test_a_run_survives_a_death_to_the_last_digit(run: Run) -> None:
    assert "equal on all ranks: True" in run.shown_by("trainers.incarnations()")
    assert "processes that each place has had before: (0, 1, 1, 0)" in run.shown_by("trainers.incarnations()")
    shown = run.shown_by("on_failure")
    assert "trainers: [2] died (killed by SIGKILL); going back to the last snapshot\n" in shown
    # A snapshot is kept every ten steps, and the thread that kills the rank may be late.
    assert re.search(r"^trainers: \[2\] replaced, the loop is back before step [123]0, after ", shown, re.MULTILINE)
    ended = re.findall(r"^\[(.+)\] the end$", shown, re.MULTILINE)  # ranks print it at about the same time
    assert sorted(rank for ranks in ended for rank in pick_ranks(ranks, range(4))) == [0, 1, 2, 3]
