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
def ledger(tmp_path: Path) -> ReplayLog:
    return ReplayLog(str(tmp_path / "rank-1"))


def open_requests(ledger: ReplayLog) -> dict[int, tuple[str, int | None]]:
    return {one.id: (one.note, one.cell) for one in ledger.attach()[0]}


def runs(tmp_path: Path) -> str:
    return str(json.loads((tmp_path / "rank-1").read_text())["runs"])


def test_notes_of_open_requests(ledger: ReplayLog) -> None:
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
        ledger.take(message)
    assert open_requests(ledger) == {
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


def test_the_answer_to_a_cell_is_kept_until_it_is_forgotten(ledger: ReplayLog) -> None:
    ledger.take(Run(1, "x", 5))
    ledger.take(Pull(2, "x"))
    ledger.answered(1, Packed(b"one"))
    ledger.answered(2, Packed(b"two"))
    for _ in range(2):  # the next controller may die, too
        told, packed = ledger.attach()
        assert [(one.id, one.note) for one in told] == [(1, "cell [5]")]
        assert packed == [Packed(b"one")]
    ledger.forget(1)
    assert ledger.attach() == ((), [])


def test_a_request_that_is_forgotten_before_its_answer_still_counts_as_open(ledger: ReplayLog) -> None:
    ledger.take(Run(1, "x", 5))
    ledger.forget(1)  # it was cancelled
    assert open_requests(ledger) == {1: ("cell [5]", None)}
    ledger.answered(1, Packed(b"one"))
    assert ledger.attach() == ((), [])


def test_a_file_says_which_cell_runs(ledger: ReplayLog, tmp_path: Path) -> None:
    assert runs(tmp_path) == ""
    ledger.take(Run(1, "x", 5))
    ledger.take(Run(2, "x", 6))
    assert runs(tmp_path) == "cell [5]"
    ledger.answered(1, Packed(b""))
    assert runs(tmp_path) == "cell [6]"
    ledger.take(Run(3, "x", 0))
    ledger.answered(2, Packed(b""))
    assert runs(tmp_path) == "code"  # run by a program
    ledger.answered(3, Packed(b""))
    assert runs(tmp_path) == ""
    assert [file.name for file in tmp_path.iterdir()] == ["rank-1"]
    assert stat.S_IMODE((tmp_path / "rank-1").stat().st_mode) == 0o600


def test_displays_are_kept_while_there_is_no_controller(ledger: ReplayLog, tmp_path: Path) -> None:
    assert not ledger.displayed(Packed(b"sent"))
    (tmp_path / DETACHED).touch()
    assert ledger.displayed(Packed(b"first"))
    big = Packed(bytes(RICH_NBYTES))
    assert ledger.displayed(big)
    assert ledger.displayed(Packed(b"last"))
    assert ledger.attach()[1] == [Packed(b"last")]  # only as much as the limit allows
    assert ledger.attach()[1] == []
