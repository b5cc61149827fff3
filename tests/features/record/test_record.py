"""What was recorded is read as it was, also if the disk is full, the file is torn, or the output is odd."""

from __future__ import annotations

import math
import shutil
import sqlite3
from pathlib import Path

import pytest

from monarch_kernel.errors import RecordError
from monarch_kernel.features.live.curves import Curve
from monarch_kernel.features.record.environment import allowed_variables
from monarch_kernel.features.record.reading import RecordReader, ranks_of
from monarch_kernel.features.record.recorder import Recorder, names_of, unreplayable
from monarch_kernel.features.record.summaries import summary_of
from monarch_kernel.features.record.tables import FILE, VERSION
from monarch_kernel.net.wire.messages import Change, Logged
from tests.features.record.runs import TRAIN, batch, log, loop_of, write_run


def test_a_record_holds_cells_knobs_metrics_and_digests(tmp_path: Path) -> None:
    record = write_run(tmp_path / "run")
    first, cell = record.cells
    assert (first.number, cell.number, cell.mesh, cell.ranks, cell.code, cell.outcome) == (
        1,
        2,
        "t",
        "0-1",
        TRAIN,
        "ok",
    )
    assert cell.output == "[0-1] trained\n"
    assert cell.ended is not None
    assert cell.started <= cell.ended
    assert [(loop.cell, loop.steps, loop.reached) for loop in record.loops] == [(cell.id, 6, 6)]
    assert [(knob.step, knob.value, knob.is_default) for knob in record.knobs] == [(0, 0.1, True), (2, 0.5, False)]
    assert [(each.step, each.mean, each.min, each.max, each.ranks) for each in record.metrics[:2]] == [
        (0, 1.5, 1.0, 2.0, 2),
        (1, 0.75, 0.5, 1.0, 2),
    ]
    assert record.batches[3].digests == (b"a" * 8, b"b" * 8)
    assert [(check.step, check.kind, check.digests) for check in record.checks] == [(6, "parameters", (b"p" * 8,) * 2)]
    assert record.states(cell.id) == {rank: {"torch": b"state" * 10} for rank in (0, 1)}
    assert record.sources == [(1, "TensorDataset, 12 rows")]
    assert record.run["package:torch"]
    assert "ended" in record.run
    assert record.meshes() == {"t": 2}
    assert not record.damage
    assert "cell [2] on t[0-1]: ok" in record.text()
    assert "step 2 of loop 1: lr = 0.5" in record.text()


def test_a_metric_does_not_depend_on_the_order_of_the_ranks(tmp_path: Path) -> None:
    values = [0.1, 1e17, -1e17, 0.3]
    means = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        recorder = Recorder(tmp_path / str(order[0]))
        loop = loop_of(ranks=4)
        recorder.loop_started(loop)
        for rank in order:
            recorder.loop_reported(loop, rank, {"loss": (Logged(0, values[rank], 1, values[rank]),)})
        recorder.close()
        means.append(RecordReader(recorder.folder).metrics[0].mean)
    assert means[0] == means[1]


def test_values_that_are_not_finite_are_read_as_such(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    loop = loop_of()
    recorder.loop_started(loop)
    for rank in (0, 1):
        recorder.loop_reported(loop, rank, {"loss": (Logged(0, 0.0, 0, math.nan),)})
    recorder.close()
    (metric,) = RecordReader(recorder.folder).metrics
    assert math.isnan(metric.mean)
    assert metric.ranks == 2


def test_a_loop_that_recovers_replaces_the_steps_that_it_runs_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    cell = recorder.cell_started(TRAIN, 2, "t", "0-1")
    recorder.cell_sent(cell, 77)
    before = loop_of()
    recorder.loop_started(before)
    for step in range(5):
        log(recorder, before, step, [1.0, 1.0])
        batch(recorder, before, step, [b"a" * 8] * 2)
    assert recorder.flush()
    recorder.event("death", "killed by SIGKILL", mesh="t", rank=1)
    recorder.cell_sent(cell, 78)
    after = loop_of(78, follows=before.key, first=3)
    recorder.loop_started(after)
    log(recorder, after, 3, [2.0, 2.0])
    recorder.close()
    record = RecordReader(recorder.folder)
    assert [loop.cell for loop in record.loops] == [cell]
    assert [(each.step, each.mean) for each in record.metrics] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]
    assert [each.step for each in record.batches] == [0, 1, 2]
    assert [(event.kind, event.rank, event.step) for event in record.events] == [
        ("death", 1, None),
        ("recovery", None, 3),
    ]


def test_a_stop_is_an_event_and_alarms_are_no_knobs(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    loop = loop_of()
    recorder.loop_started(loop)
    loop.pace.changes = [Change(4, "\0alarm nan loss", "[]"), Change(5, "")]
    recorder.loop_left(loop)
    recorder.loop_left(loop)
    recorder.close()
    record = RecordReader(recorder.folder)
    assert [(event.kind, event.loop, event.step) for event in record.events] == [("stop", 1, 5)]
    assert [knob.name for knob in record.knobs if not knob.is_default] == []


def test_a_loop_without_an_end_has_the_steps_that_were_recorded(tmp_path: Path) -> None:
    with write_run(tmp_path / "run", outcome="", reached=4) as record:
        assert [loop.reached for loop in record.loops] == [5]  # rank 0 has started a fifth one
        assert "  loop 1 of cell [2]: 5 of 6 steps" in record.text()
        assert summary_of(record)["steps"] == 5


def test_what_was_committed_can_be_read_while_the_record_runs(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.cell_started("1", 1, "t", "0")
    assert recorder.flush()
    record = RecordReader(tmp_path / "run")
    assert [cell.outcome for cell in record.cells] == [""]
    assert "no end" in record.text()
    recorder.close()


# -- bad input


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    before = (tmp_path / "run" / FILE).read_bytes()
    with pytest.raises(RecordError, match="holds the record of another run; choose another folder"):
        Recorder(tmp_path / "run")
    assert (tmp_path / "run" / FILE).read_bytes() == before


def test_a_folder_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="can't make the folder"):
        Recorder(tmp_path / "file" / "run")


def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    recorder = Recorder(tmp_path / "run", say=said.append)
    recorder.cell_started("first = 1", 1, "t", "0")
    assert recorder.flush()
    # SQLite then answers as if the disk was full.
    recorder._writer.put(lambda: [("PRAGMA max_page_count = 1", ())])
    for number in range(2, 2000):
        recorder.cell_ended(recorder.cell_started(f"x = {'1' * 500}", number, "t", "0"), "ok")
    assert not recorder.flush()
    loop = loop_of()
    recorder.loop_started(loop)
    log(recorder, loop, 0, [1.0, 1.0])
    recorder.close()
    (text,) = said
    assert "full" in text
    assert "The run goes on" in text
    assert "stopped" in recorder.line()
    record = RecordReader(tmp_path / "run")
    assert record.cells[0].code == "first = 1"
    assert not record.damage


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_folder_that_disappears_ends_the_record_and_says_so(how: str, tmp_path: Path) -> None:
    said: list[str] = []
    recorder = Recorder(tmp_path / "run", say=said.append)
    recorder.cell_ended(recorder.cell_started("x = 1", 1, "t", "0-1"), "ok")
    assert recorder.flush()
    if how == "removed":
        shutil.rmtree(tmp_path / "run")
    else:
        (tmp_path / "run").rename(tmp_path / "other")
    if how == "replaced":
        write_run(tmp_path / "run").close()
    recorder.cell_ended(recorder.cell_started("x = 2", 2, "t", "0-1"), "ok")
    assert not recorder.flush()
    assert said == [
        f"the record {tmp_path / 'run'} ends here: record.sqlite was removed or moved. The run goes on. Start another record "
        "with %mesh record FOLDER"
    ]
    assert "stopped (record.sqlite was removed or moved)" in recorder.line()
    recorder.close()
    if how != "removed":
        with RecordReader(tmp_path / "other") as record:
            assert "x = 1" in [cell.code for cell in record.cells]
    if how == "replaced":
        with RecordReader(tmp_path / "run") as record:
            assert [cell.number for cell in record.cells] == [1, 2]


def test_a_record_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run").close()
    with sqlite3.connect(tmp_path / "run" / FILE) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    with pytest.raises(RecordError, match=r"newer version .* update monarch_kernel"):
        RecordReader(tmp_path / "run")


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no record"):
        RecordReader(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(RecordError, match="can't be read"):
        RecordReader(tmp_path)
    (tmp_path / FILE).unlink()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(RecordError, match="but no record"):
        RecordReader(tmp_path)


def test_a_torn_page_leaves_what_is_before_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    for number in range(1, 400):
        recorder.cell_ended(recorder.cell_started(f"x = {number}  # {'-' * 300}", number, "t", "0"), "ok")
    recorder.close()
    path = tmp_path / "run" / FILE
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 2 * 4096] + b"\xff" * 8192)
    record = RecordReader(tmp_path / "run")
    assert len(record.cells) > 100
    assert record.cells[0].code.startswith("x = 1 ")
    assert any("can't be read" in each for each in record.damage) or len(record.cells) == 399


def test_a_write_ahead_log_that_ends_in_the_middle_is_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    for number in range(1, 4):
        recorder.cell_ended(recorder.cell_started(f"x = {number}", number, "t", "0"), "ok")
        assert recorder.flush()
    copy = tmp_path / "copy"  # as `kill -9` of the kernel leaves it
    copy.mkdir()
    log = Path(f"{tmp_path / 'run' / FILE}-wal").read_bytes()
    (copy / FILE).write_bytes((tmp_path / "run" / FILE).read_bytes())
    Path(f"{copy / FILE}-wal").write_bytes(log[: len(log) - 100])
    recorder.close()
    record = RecordReader(copy)
    assert [cell.code for cell in record.cells][:2] == ["x = 1", "x = 2"]
    assert not record.damage


def test_odd_and_huge_outputs_are_kept_as_text(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    odd = recorder.cell_started("print('\udcff')", 1, "t", "0")
    recorder.cell_output(odd, "\udcff\x00\ud800 é\n")
    recorder.cell_ended(odd, "failed", "ValueError: \udcff")
    huge = recorder.cell_started("print('x' * 10**7)", 2, "t", "0")
    for _ in range(100):
        recorder.cell_output(huge, "x" * 100_000)
    recorder.cell_ended(huge, "ok")
    recorder.cell_output(huge, "the end\n")  # such as the value of its last line
    recorder.close()
    one, other = RecordReader(tmp_path / "run").cells
    assert one.output == "\\udcff\x00\\ud800 é\n"
    assert one.error == "ValueError: \\udcff"
    assert other.output_nbytes == 10_000_008
    assert len(other.output) < 100_000
    assert other.output.endswith("xthe end\n")
    assert "characters are not in the record" in other.output


# -- secrets


def test_only_allowed_variables_are_kept() -> None:
    environment = {
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": "hf_secret",
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "x",
        "HOME": "/",
    }
    assert allowed_variables(environment) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}


def test_redact_leaves_no_trace_in_the_file(tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnop"
    recorder = Recorder(tmp_path / "run")
    recorder.cell_ended(recorder.cell_started(f"token = '{secret}'", 1, "t", "0"), "ok")
    recorder.redact("hf_[a-z]+")
    late = recorder.cell_started(f"login('{secret}')", 2, "t", "0")
    recorder.cell_output(late, f"{secret}\n")
    recorder.cell_ended(late, "ok")
    recorder.close()
    one, other = RecordReader(tmp_path / "run").cells
    assert (one.code, other.code, other.output) == ("token = '[redacted]'", "login('[redacted]')", "[redacted]\n")
    assert not any(secret.encode() in path.read_bytes() for path in (tmp_path / "run").iterdir())


def test_redact_of_a_record_that_has_ended(tmp_path: Path) -> None:
    record = write_run(tmp_path / "run")
    assert record.redact("train") >= 2  # the code of the cell, and its output; here the diff of git may have it, too
    assert "live.log(loss=[redacted](step" in record.cells[1].code
    assert record.cells[1].output == "[0-1] [redacted]ed\n"
    with pytest.raises(RecordError, match="not a regular expression"):
        record.redact("(")
    with pytest.raises(RecordError, match="matches the empty text"):
        record.redact("x*")


# -- what can't be replayed


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("x = 1", ""),
        ("name = input('name')", "asks for input()"),
        ("import time; t = time.time()", "reads the clock"),
        ("import requests\nrequests.get('x')", "uses the network"),
        ("from urllib.request import urlopen", "uses the network"),
        ("import os\nos.urandom(3); input()", "uses random numbers of the system; asks for input()"),
        ("x = (", ""),
    ],
)
def test_the_code_shows_why_a_replay_may_differ(code: str, why: str) -> None:
    assert unreplayable(code) == why


def test_the_status_lists_what_can_not_be_replayed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.cell_started("input()", 3, "t", "0")
    recorder.cell_started("input()", 5, "t", "0")
    text = recorder.text()
    recorder.close()
    assert "2 cells" in text
    assert "cells [3], [5]: asks for input()" in text


def test_the_names_that_a_cell_assigns() -> None:
    assert names_of("import x\na, b = 1, 2\nfor i in y:\n    c = 1\ndef f(): z = 1\nclass C: pass") == "a b i c f C"
    assert names_of("x = (") == ""


def test_ranks_of_a_text() -> None:
    assert ranks_of("0-2,5") == [0, 1, 2, 5]
    assert ranks_of("[3]") == [3]
    assert ranks_of("") == []


def test_curves_are_not_disturbed_by_reports_of_each_step() -> None:
    """While a record runs, reports have the values of each step, far more than otherwise."""
    curve = Curve()
    curve.add(0, [Logged(step, 1.0, 1, 1.0) for step in range(5000)])
    assert len(curve.points) <= 256
    assert curve.mean == 1.0
