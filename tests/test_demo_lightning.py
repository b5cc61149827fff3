"""The notebook on Lightning runs from top to bottom and shows the expected results."""

from __future__ import annotations

import re

import pytest

from tests.support.notebooks import NOTEBOOKS, Run, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

NOTEBOOK = NOTEBOOKS / "06_lightning.ipynb"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(read(NOTEBOOK), tmp_path_factory.mktemp("lightning"))


def test_every_cell_runs(demo: Run) -> None:
    assert demo.code == 0, demo.stdout + demo.stderr
    failed = [
        cell
        for cell in demo.notebook.cells
        if cell.cell_type == "code" and any(output.output_type == "error" for output in cell.outputs)
    ]
    assert [cell.metadata.get("tags") for cell in failed] == [["raises-exception"]]


def test_there_is_one_progress_bar(demo: Run) -> None:
    shown = demo.shown_by("history = History()")
    assert re.findall(r"\[[\d,-]+\] Epoch \d+: +\d+%", shown) == ["[0] Epoch 7: 100%"]


def test_the_module_in_the_notebook_is_trained(demo: Run) -> None:
    shown = demo.shown_by("accuracy by epoch")
    assert "2 ranks, 8 epochs, 256 steps" in shown
    match = re.search(r"of the module here: (\d\.\d+)", shown)
    assert match
    assert float(match[1]) > 0.9
    again = demo.shown_by("fit_loop.max_epochs = 12")
    assert "the ranks predict what the module here does: True" in again
    assert "12 epochs" in again


def test_the_bug_is_shown_with_its_rank_and_line(demo: Run) -> None:
    shown = demo.shown_by("# the bug")
    assert "[1] ValueError: Expected input batch_size (64) to match target batch_size (60)" in shown
    assert "which = which[:-4]  # the bug" in shown
    assert "[0] waited for other ranks and was released" in shown


def test_an_interrupt_leaves_ranks_that_can_be_used(demo: Run) -> None:
    assert "RemoteInterrupt: interrupted on [0-1]; their state is kept" in demo.shown_by("signal.SIGINT")
    assert "[1] 1" in demo.shown_by("%remote trainers rank")
