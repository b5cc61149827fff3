"""A record is followed while it is written: each step comes once, in its order, when all ranks have reported it."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.features.record.tailing import Tail
from monarch_kernel.net.wire.messages import Logged
from tests.features.record.runs import REQUEST, TRAIN, log, loop_of, write_run


class Run:
    """A record that is written, and followed."""

    def __init__(self, folder: Path) -> None:
        self.recorder = Recorder(folder)
        cell = self.recorder.cell_started(TRAIN, 2, "t", "0-1")
        self.recorder.cell_sent(cell, REQUEST)
        self.cell = cell
        self.loop = loop_of()
        self.recorder.loop_started(self.loop)
        assert self.recorder.flush()
        self.tail = Tail(RecordReader(folder))

    def steps(self, now: float, *, is_last: bool = False) -> list[tuple[int, float]]:
        assert self.recorder.flush()
        return [(point.step, point.metrics[0].mean) for point in self.tail.points(now, is_last=is_last)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_a_step_waits_for_all_ranks(run: Run) -> None:
    for step in (0, 1):
        run.recorder.loop_reported(run.loop, 0, {"loss": (Logged(step, 1.0, 1, 1.0),)})
    assert run.steps(0.0) == []
    run.recorder.loop_reported(run.loop, 1, {"loss": (Logged(0, 3.0, 1, 3.0),)})
    assert run.steps(1.0) == [(0, 2.0)]
    assert run.steps(2.0) == []
    run.recorder.loop_reported(run.loop, 1, {"loss": (Logged(1, 5.0, 1, 5.0),)})
    assert run.steps(3.0) == [(1, 3.0)]
    run.recorder.close()


def test_a_name_that_one_rank_logs_waits_once(run: Run) -> None:
    log(run.recorder, run.loop, 0, [1.0])
    assert run.steps(0.0) == []
    assert run.steps(6.0) == [(0, 1.0)]
    log(run.recorder, run.loop, 1, [2.0])
    assert run.steps(6.1) == [(1, 2.0)]
    log(run.recorder, run.loop, 2, [2.0])
    run.recorder.close()


def test_the_end_waits_for_nothing(run: Run) -> None:
    log(run.recorder, run.loop, 0, [1.0])
    assert run.steps(0.0, is_last=True) == [(0, 1.0)]
    run.recorder.close()


def test_steps_that_run_again_come_again(run: Run) -> None:
    for step in range(4):
        log(run.recorder, run.loop, step, [1.0, 1.0])
    assert [step for step, _ in run.steps(0.0)] == [0, 1, 2, 3]
    run.recorder.cell_sent(run.cell, 78)
    again = loop_of(78, follows=run.loop.key, first=2)
    run.recorder.loop_started(again)
    log(run.recorder, again, 2, [5.0, 5.0])
    assert run.steps(1.0) == [(2, 5.0)]
    run.recorder.close()


def test_more_steps_than_are_rows_come_all(run: Run) -> None:
    for step in range(3000):
        log(run.recorder, run.loop, step, [float(step)] * 2)
    assert run.steps(0.0) == [(step, float(step)) for step in range(3000)]
    for step in range(3000, 5000):
        log(run.recorder, run.loop, step, [float(step)] * 2)
    assert run.steps(1.0) == [(step, float(step)) for step in range(3000, 5000)]
    run.recorder.close()


def test_knobs_come_with_the_step_from_which_they_hold(tmp_path: Path) -> None:
    points = Tail(write_run(tmp_path / "run")).points(0.0, is_last=True)
    assert [(point.step, knob.name, knob.value) for point in points for knob in point.knobs] == [
        (0, "lr", 0.1),
        (2, "lr", 0.5),
    ]
