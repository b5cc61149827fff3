"""Records of a rank for the next controller."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from monarch_kernel.net.wire.codec import Packed
from monarch_kernel.net.wire.config import DETACHED
from monarch_kernel.net.wire.messages import (
    Apply,
    Call,
    FormGroup,
    Interrupt,
    Payload,
    Ping,
    Pull,
    Push,
    Run,
    Spawn,
    StopActor,
)
from monarch_kernel.runtime.worker.replay_log import RICH_NBYTES, ReplayLog


@pytest.fixture
def log(tmp_path: Path) -> ReplayLog:
    return ReplayLog(str(tmp_path / "rank-1"))


def open_requests(log: ReplayLog) -> dict[int, tuple[str, int | None]]:
    return {one.id: (one.description, one.cell) for one in log.attach()[0]}


def runs(tmp_path: Path) -> str:
    return str(json.loads((tmp_path / "rank-1").read_text())["runs"])


def test_open_requests_have_descriptions(log: ReplayLog) -> None:
    for message in (
        Run(1, "x", 5),
        Run(2, "x", 0),
        Push(3, "x", Payload()),
        Pull(4, "y"),
        FormGroup(5, 1, "group", "", 0),
        Spawn(6, 1, "counter", (), Payload()),
        Call(7, 1, "add", None, Payload()),
        StopActor(8, 1, ""),
        Apply(10, Payload()),
        Ping(9),
        Call(0, 1, "add", None, Payload()),
        Interrupt(1),
    ):
        log.take(message)
    assert open_requests(log) == {
        1: ("cell [5]", 5),
        2: ("code", None),
        3: ("push 'x'", None),
        4: ("pull 'y'", None),
        5: ("forming the process group", None),
        6: ("counter.__init__", None),
        7: ("counter.add", None),
        8: ("counter.stop", None),
        10: ("a function", None),
    }


def test_the_answer_to_a_cell_is_kept_until_it_is_forgotten(log: ReplayLog) -> None:
    log.take(Run(1, "x", 5))
    log.take(Pull(2, "x"))
    log.answered(1, Packed(b"one"))
    log.answered(2, Packed(b"two"))
    for _ in range(2):  # the next controller may die, too
        open_ones, packed = log.attach()
        assert [(one.id, one.description) for one in open_ones] == [(1, "cell [5]")]
        assert packed == [Packed(b"one")]
    log.forget(1)
    assert log.attach() == ((), [])


def test_a_request_that_is_forgotten_before_its_answer_still_counts_as_open(log: ReplayLog) -> None:
    log.take(Run(1, "x", 5))
    log.forget(1)  # it was cancelled
    assert open_requests(log) == {1: ("cell [5]", None)}
    log.answered(1, Packed(b"one"))
    assert log.attach() == ((), [])


def test_a_file_says_which_cell_runs(log: ReplayLog, tmp_path: Path) -> None:
    assert runs(tmp_path) == ""
    log.take(Run(1, "x", 5))
    log.take(Run(2, "x", 6))
    assert runs(tmp_path) == "cell [5]"
    log.answered(1, Packed(b""))
    assert runs(tmp_path) == "cell [6]"
    log.take(Run(3, "x", 0))
    log.answered(2, Packed(b""))
    assert runs(tmp_path) == "code"  # run by a program
    log.answered(3, Packed(b""))
    assert runs(tmp_path) == ""
    assert [file.name for file in tmp_path.iterdir()] == ["rank-1"]
    assert stat.S_IMODE((tmp_path / "rank-1").stat().st_mode) == 0o600


def test_displays_are_kept_while_there_is_no_controller(log: ReplayLog, tmp_path: Path) -> None:
    assert not log.displayed(Packed(b"sent"))
    (tmp_path / DETACHED).touch()
    assert log.displayed(Packed(b"first"))
    big = Packed(bytes(RICH_NBYTES))
    assert log.displayed(big)
    assert log.displayed(Packed(b"last"))
    assert log.attach()[1] == [Packed(b"last")]  # only as much as the limit allows
    assert log.attach()[1] == []
