"""The notebook on the cluster as one device trains a model in three ways to the same losses."""

from __future__ import annotations

import re

import pytest

from tests.support.notebooks import NOTEBOOKS, Run, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(read(NOTEBOOKS / "10_cluster_as_one_device.ipynb"), tmp_path_factory.mktemp("device"))
    assert run.code == 0, run.stdout + run.stderr
    return run


def test_three_ways_to_train_have_the_same_losses(run: Run) -> None:
    text = run.shown_by("the largest difference")
    found = [[float(each) for each in re.findall(r"\d\.\d{4}", line)] for line in text.splitlines()[:3]]
    assert [len(losses) for losses in found] == [8, 8, 8]
    for losses in found[:2]:
        assert losses == pytest.approx(found[2], abs=1e-4)
    assert found[0][-1] < found[0][0]


def test_parts_are_drawn_and_steps_are_recorded(run: Run) -> None:
    assert "rows 0-127    ranks 0,2" in run.shown_by("placements_picture()")
    assert "own_step: recorded;" in run.shown_by("own_step.describe()")
