"""The notebook on FSDP: two ranks continue the training of four ranks from a checkpoint, to the same loss."""

from __future__ import annotations

import re

import pytest

from tests.support.notebooks import NOTEBOOKS, Run, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOTEBOOK = NOTEBOOKS / "03_fsdp_auto.ipynb"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(read(NOTEBOOK), tmp_path_factory.mktemp("fsdp"))
    assert run.code == 0, run.stdout + run.stderr
    return run


def test_the_plan_handles_and_explains_the_sparse_layer(run: Run) -> None:
    said = run.shown_by("plan_of(model).explain()")
    assert "FSDP over gpus=4, 7 units, 6 parameters kept whole" in said
    assert "blocks.0.mix.sharpness" in said
    assert "it is a scalar" in said
    assert "gate" not in said  # its weight stays as it is
    assert "needs 2.9 GiB a rank" in run.shown_by("plan_for(big")
    assert "Warning" not in run.shown_by("plan_for(big")


def test_the_loss_falls_and_is_the_same_on_fewer_ranks(run: Run) -> None:
    saved = float(re.search(r"\[0-3\] loss of step 29: ([\d.]+)", run.shown_by("checkpoint.save"))[1])  # type: ignore[index]
    shown = run.shown_by("undisturbed = train")
    undisturbed = float(re.search(r"\[0-3\] loss of step 39: ([\d.]+)", shown)[1])  # type: ignore[index]
    assert undisturbed < saved < 5.0
    assert f"[0-1] loss of step 39: {undisturbed:.4f}" in run.shown_by("checkpoint.load")
    assert float(run.shown_by("difference = ").split()[-1]) < 1e-4


def test_the_export_can_be_read_without_a_mesh(run: Run) -> None:
    assert "95 tensors" in run.shown_by("checkpoint.describe")
    assert run.shown_by("load_state_dict").startswith("2,951,046 parameters")
