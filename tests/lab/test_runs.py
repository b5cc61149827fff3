"""The panel lists recorded runs, and compares two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.features.record.runs import write_run
from tests.lab.conftest import SLOW_MS, UP, Lab, Server

pytest.importorskip("playwright")
from playwright.sync_api import expect

pytestmark = pytest.mark.slow
expect.set_options(timeout=SLOW_MS)


def test_the_panel_lists_runs_and_compares_two(lab: Lab, server: Server) -> None:
    path = server.write("a.ipynb", UP, "import os\nprint(os.getcwd())")
    lab.load(path)
    lab.show_panel()
    lab.run(1)
    folder = Path(lab.cell(1).locator(".jp-OutputArea-output").inner_text().strip())
    for name, options in {"a": {}, "b": {"batch_of": 3, "loss_from": 3}, "c": {}}.items():
        write_run(folder / "runs" / name, **options).close()  # type: ignore[arg-type]
    runs = lab.panel.locator(".monarch-runs")
    runs.locator("summary").click()
    expect(runs.locator(".monarch-run")).to_have_count(3)
    expect(runs.locator(".monarch-run-name")).to_have_text(["runs/c", "runs/b", "runs/a"])
    expect(runs.locator(".monarch-run").nth(2)).to_contain_text("ok · 6 steps · loss 0.25")
    expect(runs.locator(".monarch-run").nth(2)).to_contain_text("lr 0.5 from step 2")
    expect(runs.get_by_role("img", name="The curve of loss of runs/a")).to_be_visible()
    compare = runs.get_by_role("button", name="Compare")
    expect(compare).to_be_disabled()
    runs.get_by_role("checkbox", name="runs/b").check()
    runs.get_by_role("checkbox", name="runs/a").check()
    compare.click()
    expect(runs.locator(".monarch-runs-result")).to_contain_text(
        "First difference: cell [2], step 3: batch differs on rank 1 (loader)"
    )
    expect(runs.get_by_role("img", name="loss of runs/a and of runs/b")).to_be_visible()
    runs.get_by_role("checkbox", name="runs/c").check()  # takes the place of the one that was chosen first
    expect(runs.get_by_role("checkbox", name="runs/b")).not_to_be_checked()
    compare.click()
    expect(runs.locator(".monarch-runs-result")).to_contain_text("No difference.")
    assert lab.violations("#monarch-mesh-panel") == []
