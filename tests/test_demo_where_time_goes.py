"""The notebook on where time goes finds its slow rank, and its slow loader."""

from __future__ import annotations

import re

import pytest

from tests.support.notebooks import NOTEBOOKS, Run, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(read(NOTEBOOKS / "08_where_time_goes.ipynb"), tmp_path_factory.mktemp("time"))
    assert run.code == 0, run.stdout + run.stderr
    return run


def test_the_slow_rank_is_named_with_its_function(run: Run) -> None:
    text = run.shown_by("%mesh profile trainers")
    assert re.search(
        r"^\[2\] is last in \d+ of \d+ collectives with long waits, by .*; its time is in augment\(\) \(cell \[2\], line \d+\)",
        text,
        re.MULTILINE,
    )
    assert "where_time_goes.json (" in text


def test_late_ranks_are_listed_without_a_profile(run: Run) -> None:
    assert re.search(r"\[2\] \d+ ms, last in \d+ of \d+", run.shown_by("any(rank.collectives"))


def test_the_slow_loader_has_the_largest_part(run: Run) -> None:
    shares = dict(re.findall(r"^(\S[a-z ]+?)  .*?(\d+) %", run.shown_by("slow_loader = "), re.MULTILINE))
    assert int(shares["loader"]) == max(map(int, shares.values()))
