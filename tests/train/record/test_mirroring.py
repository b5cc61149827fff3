"""Metrics of a record go to an experiment tracker, while it is written and afterwards; a tracker that fails harms nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.cli import main
from monarch_kernel.errors import RecordError
from monarch_kernel.features.record import trackers
from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.net.wire.messages import Change
from monarch_kernel.train.record.mirroring import Mirror
from monarch_kernel.train.record.opened import open as open_record
from tests.features.record.runs import REQUEST, TRAIN, log, loop_of, write_run
from tests.support.waiting import wait_until


class Lines:
    """A tracker that keeps a list, as a library of the user might.

    Attributes:
        fails_at: the step at which it fails.
    """

    runs: list[Lines] = []  # noqa: RUF012 - the runs of one test
    fails_at = -1

    def __init__(self, name: str, config: Mapping[str, Any], **options: Any) -> None:
        if "bad" in options:
            raise TypeError("no such option: bad")
        self.name, self.config, self.options = name, config, options
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: bool | None = None
        self.url = f"lines:{name}"
        self.runs.append(self)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the server is gone")
        self.logged.append((step, dict(values)))

    def close(self, *, is_whole: bool) -> None:
        self.ended = is_whole


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Lines]]:
    monkeypatch.setattr(trackers, "TRACKERS", {"lines": Lines})
    Lines.runs.clear()
    monkeypatch.setattr(Lines, "fails_at", -1)
    yield Lines
    Lines.runs.clear()


def start(folder: Path) -> tuple[Recorder, Any]:
    recorder = Recorder(folder)
    cell = recorder.cell_started(TRAIN, 2, "t", "0-1")
    recorder.cell_sent(cell, REQUEST)
    loop = loop_of()
    recorder.loop_started(loop)
    assert recorder.flush()
    return recorder, loop


def test_a_mirror_follows_the_record_until_it_ends(tmp_path: Path, lines: type[Lines]) -> None:
    recorder, loop = start(tmp_path / "run")
    mirror = Mirror(recorder.folder, "lines", {"project": "p"})
    for step in range(5):
        log(recorder, loop, step, [1.0, 3.0])
    (run,) = lines.runs
    wait_until(lambda: len(run.logged) == 5, "the mirror to follow")
    loop.pace.changes = [Change(5, "lr", 0.5)]
    log(recorder, loop, 5, [2.0, 2.0])
    recorder.close()
    mirror.close()
    assert run.logged[0] == (0, {"loss": 2.0, "loss/min": 1.0, "loss/max": 3.0, "knobs/lr": 0.1})
    assert run.logged[5] == (5, {"loss": 2.0, "knobs/lr": 0.5})
    assert [step for step, _ in run.logged] == list(range(6))
    assert run.ended is True
    assert mirror.problem == ""
    assert (run.name, run.options, run.config["ranks of t"]) == ("run", {"project": "p"}, 2)


def test_the_failure_of_a_tracker_is_printed_once_and_the_record_goes_on(tmp_path: Path, lines: type[Lines]) -> None:
    lines.fails_at = 2
    said: list[str] = []
    recorder, loop = start(tmp_path / "run")
    mirror = Mirror(recorder.folder, "lines", {}, said.append)
    for step in range(4):
        log(recorder, loop, step, [1.0, 1.0])
    wait_until(lambda: bool(said), "the failure")
    log(recorder, loop, 4, [1.0, 1.0])
    recorder.close()
    mirror.close()
    (text,) = said
    assert "ConnectionError: the server is gone" in text
    assert "The record goes on" in text
    with open_record(tmp_path / "run") as record:
        assert [each.step for each in record.metrics] == list(range(5))


def test_a_mirror_can_end_before_the_record(tmp_path: Path, lines: type[Lines]) -> None:
    recorder, loop = start(tmp_path / "run")
    log(recorder, loop, 0, [1.0])  # rank 1 has not reported yet
    assert recorder.flush()
    mirror = Mirror(recorder.folder, "lines", {})
    mirror.close()
    mirror.close()
    assert [step for step, _ in lines.runs[0].logged] == [0]
    assert lines.runs[0].ended is False
    recorder.close()


def test_a_record_that_has_ended_is_sent_at_once(
    tmp_path: Path, lines: type[Lines], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run").close()
    assert main(["record", "send", str(tmp_path / "run"), "lines", "project=gpt"]) == 0
    assert capsys.readouterr().out == "sent to lines: lines:run\n"
    (run,) = lines.runs
    assert [step for step, _ in run.logged] == list(range(6))
    assert run.options == {"project": "gpt"}
    assert run.ended is True


def test_misuse_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run").close()
    for words, error in (
        (["nothing"], "unknown tracker 'nothing'; known: lines"),
        (["lines", "project"], "write an option as NAME=VALUE, such as project=gpt, not 'project'"),
        (["lines", "bad=1"], "lines starts no run: TypeError: no such option: bad"),
    ):
        assert main(["record", "send", str(tmp_path / "run"), *words]) == 1
        assert error in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    with pytest.raises(RecordError, match=r"pip install 'monarch_kernel\[trackio\]'"):
        trackers.open_tracker("trackio", "run", {}, {})
