"""The panel lists recorded runs and compares two; ``python -m tests.notebook.magics.test_run_list`` writes its golden file."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.features.record.summaries import POINTS, curve_of
from monarch_kernel.features.record.tables import FILE, Metric
from monarch_kernel.notebook.magics.run_list import RunList
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.train.record import running
from tests.features.record.runs import log, loop_of, write_run

GOLDEN = Path(__file__).parents[1] / "view" / "golden" / "runs.json"


def write_two(folder: Path) -> None:
    write_run(folder / "runs" / "a").close()
    write_run(folder / "runs" / "b", batch_of=3, loss_from=3).close()


def message_here() -> dict[str, Any]:
    """Return the list, with times and sizes that do not change from run to run."""
    message = RunList().message()
    for number, run in enumerate(sorted(message["runs"], key=lambda run: str(run["name"]))):
        run |= {"started": 1_800_000_000.0 + number, "took": 1.5, "nbytes": 90_112}
    return {**message, "runs": sorted(message["runs"], key=lambda run: str(run["name"]))}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "_recorders", [])
    return tmp_path


def test_runs_are_listed_as_the_panel_expects(here: Path) -> None:
    write_two(here)
    assert message_here() == json.loads(GOLDEN.read_text())


def test_two_runs_are_compared(here: Path) -> None:
    write_two(here)
    found = RunList().comparison(["runs/a", "runs/b"])
    assert found["runs"] == ["runs/a", "runs/b"]
    assert found["first"] == "cell [2], step 3: batch differs on rank 1 (loader)"
    assert found["compared"].startswith("2 cells, 6 batches")
    assert found["last"] == [["loss", 0.25, 0.75]]
    assert RunList().comparison(["runs/a", "runs/a"])["first"] == ""


@pytest.mark.parametrize("names", [None, [], ["runs/a"], ["runs/a", "/etc"], ["runs/a", 7], "runs/a"])
def test_only_runs_of_the_list_are_compared(here: Path, names: object) -> None:
    write_two(here)
    with pytest.raises(UsageProblem, match="choose two runs of the list"):
        RunList().comparison(names)


def test_no_run_is_an_empty_list(here: Path) -> None:
    assert RunList().message() == {"kind": "runs", "runs": []}


def test_a_run_that_is_being_written_is_read_again_and_replays_are_listed(here: Path) -> None:
    recorder = Recorder(here / "elsewhere" / "now")
    running._recorders.append(recorder)
    loop = loop_of()
    recorder.loop_started(loop)
    runs = RunList()
    log(recorder, loop, 0, [1.0, 1.0])
    assert recorder.flush()
    (run,) = runs.message()["runs"]
    assert (run["name"], run["outcome"], run["curve"]) == ("elsewhere/now", "running", [[0, 1.0]])
    log(recorder, loop, 1, [2.0, 2.0])
    assert recorder.flush()
    (run,) = runs.message()["runs"]
    assert run["curve"] == [[0, 1.0], [1, 2.0]]
    recorder.close()
    write_run(here / "elsewhere" / "now" / "replays" / "1").close()
    assert {(run["name"], run["outcome"]) for run in runs.message()["runs"]} == {
        ("elsewhere/now", "ok"),
        ("elsewhere/now/replays/1", "ok"),
    }


def test_a_run_that_can_not_be_read_is_listed_with_the_reason(here: Path) -> None:
    folder = here / "runs" / "torn"
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(b"no database" * 1000)
    (run,) = RunList().message()["runs"]
    assert (run["name"], run["outcome"]) == ("runs/torn", "unreadable")
    assert "can't be read" in run["problem"]


def test_a_kernel_that_was_killed_leaves_a_run_without_an_end(here: Path) -> None:
    write_run(here / "runs" / "a").close()
    with sqlite3.connect(here / "runs" / "a" / FILE) as connection:
        connection.execute("DELETE FROM run WHERE key = 'ended'")
    connection.close()
    (run,) = RunList().message()["runs"]
    assert (run["outcome"], run["took"]) == ("no end", None)


def test_a_long_curve_has_few_points_and_gaps_where_no_value_is_finite() -> None:
    metrics = [Metric(1, "loss", step, 1.0 if step < 500 else float("nan"), 1.0, 1.0, 2, 1) for step in range(1000)]
    curve = curve_of(metrics)
    assert len(curve) <= POINTS
    assert curve[0][1] == 1.0
    assert curve[-1] == [999, None]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        write_two(Path(made))
        GOLDEN.write_text(f"{json.dumps(message_here(), indent=2)}\n")
        sys.exit()
