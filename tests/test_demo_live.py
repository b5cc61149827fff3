"""The notebook on live training shows a changed knob, a pause, and a rollback."""

from __future__ import annotations

import re

import pytest

from tests.support.notebooks import NOTEBOOKS, Run, read, shrink

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    notebook = read(NOTEBOOKS / "02_live_training.ipynb")
    shrink(notebook)
    run = Run(notebook, tmp_path_factory.mktemp("live"))
    assert run.code == 0, run.stdout + run.stderr
    return run


def test_a_knob_set_too_high_spoils_the_loss(run: Run) -> None:
    assert re.search(
        r"loop in cell \[5\]: ▶ running, step \d+ of 120, .* elapsed, .* left; .* tokens/s; loss .*; lr=0.003",
        run.shown_by("wait_for_step(30)"),
    )
    good, spoilt = map(
        float, re.findall(r"loss of step \d+: ([\d.]+), of step \d+: ([\d.]+)", run.shown_by('set("lr"'))[0]
    )
    assert spoilt > good + 1


def test_the_loop_pauses_and_continues_step_by_step(run: Run) -> None:
    assert run.shown_by("%mesh loop pause").startswith("all ranks pause before step ")
    assert run.shown_by("%mesh loop step").strip() == "1 step more"


def test_a_rollback_leads_to_a_better_loss(run: Run) -> None:
    step = int(re.search(r"all ranks are back before step (\d+);", run.shown_by("rollback"))[1])  # type: ignore[index]
    assert step % 10 == 0
    assert run.shown_by("went on from").strip() == f"[0-3] went on from step {step} with lr 0.003"
    before, after = map(float, re.findall(r": ([\d.]+)", run.shown_by("spoilt = ")))
    assert after < before
