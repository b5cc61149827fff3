"""Names and texts from ranks have limits, on the rank, which says why it refuses one, and at the controller."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from monarch_kernel.actor import Actor, ProcMesh, endpoint, this_host
from monarch_kernel.errors import RemoteError
from monarch_kernel.features.live.knobs import fitting
from monarch_kernel.features.live.limits import MAX_KNOBS, MAX_LOGGED, MAX_NAME, MAX_TEXT
from monarch_kernel.features.live.loops import LoopBook, LoopRecord
from monarch_kernel.features.live.pace import ALARM, PREEMPTION
from monarch_kernel.features.watch.values import NOT_FINITE
from monarch_kernel.net.wire.messages import Knob, Logged, LoopAlarm, LoopReport, LoopStarted
from monarch_kernel.notebook.view.loops import loop_text
from monarch_kernel.testing import rank_spec
from tests.support.waiting import LONG_S


class Loop:
    """One loop of two ranks, as the controller sees it."""

    def __init__(self) -> None:
        self.book = LoopBook()
        self.noted: list[str] = []
        self.book.journals["t"] = self
        for rank in (0, 1):
            self.book.started(rank_spec(rank, rank=rank, world_size=2, mesh="t"), "cell [5]", LoopStarted(4, 1, 9), 0.0)

    def report(self, rank: int, names: Iterable[str] = (), knobs: Iterable[Knob] = ()) -> LoopRecord:
        logged = {name: (Logged(0, 1.0, 1, 1.0),) for name in names}
        self.book.reported(rank, LoopReport(4, 1, 1, 0.5, logged, tuple(knobs)), 1.0)
        record = self.book.get((4, 1))
        assert record is not None
        return record

    def record(self, loop: LoopRecord, logged: Iterable[str]) -> None:
        self.noted += logged

    def close(self) -> None: ...


def test_the_controller_keeps_a_bounded_number_of_names() -> None:
    loop = Loop()
    for start in range(0, 10 * MAX_LOGGED, 100):
        record = loop.report(0, [f"name {i}" for i in range(start, start + 100)])
    record = loop.report(1, ["name 0", "of rank 1"], [Knob(f"k{i}", 1.0) for i in range(10 * MAX_KNOBS)])
    assert list(record.curves) == [f"name {i}" for i in range(MAX_LOGGED)]
    assert record.curves["name 0"].last == {0: 1.0, 1: 1.0}
    assert len(record.knobs) == MAX_KNOBS
    assert set(loop.noted) == set(record.curves)
    assert f"some names are left out: a loop can have at most 200 names, and 'k{10 * MAX_KNOBS - 1}' is one more" in (
        loop_text(record.view(1.0))
    )


def test_the_controller_keeps_no_long_name_or_text() -> None:
    loop = Loop()
    long = "x" * 50_000_000
    record = loop.report(0, [long, "loss"], [Knob(long, 1.0), Knob("text", long), Knob("lr", 0.5)])
    assert list(record.curves) == ["loss"]
    assert list(record.knobs) == ["lr"]
    assert len(loop_text(record.view(1.0))) < 500


def test_the_controller_keeps_no_name_that_is_its_own_and_no_long_report() -> None:
    loop = Loop()
    record = loop.report(
        0, [f"{PREEMPTION} loss"], [Knob(PREEMPTION, 1.0), Knob(f"{ALARM}nan loss", "x"), Knob("lr", 0.5)]
    )
    assert list(record.curves) == []
    assert list(record.knobs) == ["lr"]
    long = "x" * 5_000_000
    for name in (long, "loss"):
        record.alarmed(0, LoopAlarm(NOT_FINITE, name, 3, float("nan"), about=long, module=long))
    assert 0 < len(str(record.trouble.texts())) < 5_000
    assert "the name has 5,000,000 characters" in record.refused


def test_an_alarm_within_the_limits_is_kept_whole() -> None:
    record = Loop().report(0, ["loss", "accuracy"], [])
    record.alarmed(0, LoopAlarm(NOT_FINITE, "loss", 3, float("nan"), about="its rows"))
    record.alarmed(0, LoopAlarm(NOT_FINITE, "loss", 3, float("nan"), about="its rows", module="in net.0"))
    record.alarmed(0, LoopAlarm(NOT_FINITE, "accuracy", 500, float("nan"), is_more=True))
    about, module = record.trouble.texts().values()  # of one fault
    assert "loss is nan in step 3, first on [0]; later accuracy too. On [0]: its rows. " in about
    assert module == "on [0] in net.0"


def test_names_within_the_limits_are_kept() -> None:
    loop = Loop()
    names = [f"{i}".ljust(MAX_NAME, "é") for i in range(MAX_LOGGED)]
    knobs = [Knob(f"{i}", "x" * MAX_TEXT) for i in range(MAX_KNOBS)]
    record = loop.report(0, names, knobs)
    assert (list(record.curves), list(record.knobs.values())) == (names, knobs)
    assert record.refused == ""


def test_a_loop_with_odd_names_is_one_line() -> None:
    record = Loop().report(0, ["a\nb", "\x1b]0;t\x07c"], [Knob("d\ne", "f\ng"), Knob("\x1b[2J", 1)])
    text = loop_text(record.view(1.0))
    assert "\n" not in text
    assert "\x1b" not in text
    assert "a b 1" in text


def test_a_knob_takes_no_long_text_from_the_notebook() -> None:
    assert fitting(Knob("mode", "a"), "x" * MAX_TEXT) == "x" * MAX_TEXT
    with pytest.raises(ValueError, match=r"knob 'mode': the text has 1,001 characters, but may have at most 1,000"):
        fitting(Knob("mode", "a"), "x" * (MAX_TEXT + 1))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            "live.log(**{'x' * 5_000_000: 1})",
            r"live.log: the name has 5,000,000 characters \('x{40}'…\), but may have at most 200",
        ),
        (
            "live.log(**{f'{i}': 1 for i in range(1001)})",
            "live.log: a loop can have at most 1,000 names, and '1000' is one more",
        ),
        (
            "live.knob('\\0preemption', 1)",
            r"live.knob: the name has a NUL \('.x00preemption'\), which no name may have",
        ),
        ("live.log(**{'\\0': 1})", r"live.log: the name has a NUL"),
        ("live.knob('x' * 201, 1)", r"live.knob: the name has 201 characters .* at most 200"),
        ("live.knob('x', 'y' * 1_001)", r"live.knob\('x', ...\): the text has 1,001 characters, .* at most 1,000"),
        (
            "[live.knob(f'{i}', 1) for i in range(201)]",
            "live.knob: a loop can have at most 200 names, and '200' is one more",
        ),
    ],
)
def test_a_rank_says_which_name_it_refuses(procs: ProcMesh, call: str, text: str) -> None:
    with pytest.raises(RemoteError) as caught:
        procs.run(f"from monarch_kernel import live\nfor step in live.loop(1):\n    {call}").get(LONG_S)
    assert re.search(rf"ValueError: {text}", str(caught.value))
    assert len(str(caught.value)) < 5_000


class Idle(Actor):
    @endpoint
    def nothing(self) -> None: ...


@pytest.mark.parametrize("length", [201, 5_000_000])
def test_names_of_meshes_and_actors_have_a_limit(procs: ProcMesh, length: int) -> None:
    name = "x" * length
    with pytest.raises(ValueError, match=rf"name has {len(name):,} characters, but may have at most 200"):
        procs.spawn(name, Idle)
    with pytest.raises(ValueError, match="at most 200"):
        this_host().spawn_procs({"r": 1}, name=name)
