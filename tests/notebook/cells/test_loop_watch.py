"""Tests when a running cell tells what is wrong with its live loops, without processes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from monarch_kernel.base.events import WaitView
from monarch_kernel.errors import Failure, Frame
from monarch_kernel.features.profiling.lateness import Lateness, lateness
from monarch_kernel.features.watch.findings import Trouble
from monarch_kernel.net.wire.messages import LoopAlarm
from monarch_kernel.notebook.cells.loop_watch import LoopWatch
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing
from monarch_kernel.runtime.rpc.future import Future


class Cell:
    """A cell on three ranks that was sent at 0 s, with its loops, and the lines below it with the time of each.

    Attributes:
        late: the rank that the others wait for at each look; None if there is none.
    """

    def __init__(self, *, asks: bool = True, ranks: int = 3) -> None:
        self.now = 0.0
        self.loops: dict[int, Trouble] = {}
        self.lines: list[tuple[float, str]] = []
        self.asked_at: list[float] = []
        self.looked_at: list[float] = []
        self.compared_at: list[float] = []
        self.latest: dict[int, Lateness] = {}
        self.latest_at = math.inf  # when the ranks have started those
        self.shown: Sequence[str] = ()
        self.late: int | None = None
        self.places = [
            "augment"
        ] * 5  # the functions in which looks find the late rank; empty while nobody waits for it
        self.watch = LoopWatch(self, range(ranks), lambda: self.loops, self._say, 0.0, asks=asks)

    def _say(self, text: str) -> None:
        self.lines.append((round(self.now, 1), text))

    def progress(self) -> Future[dict[int, int | Failure]]:
        self.asked_at.append(self.now)
        number = round(self.now * 100)
        late = self.late if len(self.asked_at) % 3 else None
        return Future.resolved({rank: number - (rank == late) for rank in range(3)})

    def doing(self) -> Future[dict[int, Doing | Failure]]:
        self.looked_at.append(self.now)
        call = Collective("all_reduce", 5, "", (0, 1, 2), age_s=0.01)
        function = self.places.pop(0) if self.places else ""
        busy = Doing((Activity(1, "main", (Frame("<remote cell [3]>", 7, function, user=True),) * bool(function)),))
        return Future.resolved({rank: busy if rank == self.late else Doing((), (call,)) for rank in range(3)})

    def lateness(self, last_s: float) -> dict[int, Lateness]:
        self.compared_at.append(self.now)
        return self.latest if self.now - last_s < self.latest_at else {}

    def show_waits(self, source: object, waits: Sequence[WaitView]) -> None:
        self.shown = [wait.text for wait in waits]

    def run(self, until: float) -> Cell:
        while self.now < until:
            self.now = round(self.now + 0.05, 2)
            self.watch.poll(self.now)
        return self

    def begin(self) -> Trouble:
        trouble = self.loops[1] = Trouble()
        return trouble


def test_a_cell_without_a_loop_asks_no_rank() -> None:
    cell = Cell().run(100.0)
    assert not cell.asked_at
    assert not cell.lines


def test_a_healthy_loop_is_looked_at_often_in_its_first_seconds_only() -> None:
    cell = Cell()
    cell.begin()
    cell.run(11.0)
    assert 20 <= len(cell.asked_at) <= 55
    before = len(cell.asked_at)
    cell.run(111.0)
    assert 90 <= len(cell.asked_at) - before <= 100
    assert not cell.lines
    assert not cell.looked_at


def test_a_value_has_one_line_when_other_ranks_have_reported() -> None:
    cell = Cell()
    trouble = cell.begin()
    cell.run(5.0)
    trouble.alarmed(1, LoopAlarm("nan", "loss", 12, math.nan))
    cell.run(5.4)
    assert not cell.lines
    trouble.alarmed(0, LoopAlarm("nan", "loss", 11, math.nan))
    cell.run(100.0)
    ((at, line),) = cell.lines
    assert 5.5 < at < 7
    assert line.startswith("live loop: loss is nan in step 11, first on [0], then on [1] from step 12")
    assert list(cell.shown) == [line]
    cell.watch.end(cell.now)
    assert not cell.shown
    assert len(cell.lines) == 1


def test_the_end_of_the_cell_tells_what_is_new() -> None:
    cell = Cell()
    cell.begin().alarmed(0, LoopAlarm("spike", "loss", 11, 50.0, 2.0))
    cell.watch.end(0.1)
    assert len(cell.lines) == 1


def test_a_straggler_has_a_line_within_ten_seconds() -> None:
    cell = Cell()
    cell.begin()
    cell.late = 2
    cell.run(30.0)
    ((at, line),) = cell.lines
    assert at < 10
    assert line.startswith("live loop: the other ranks wait for [2] in ")
    assert ", while it is at cell [3], line 7, in augment. " in line
    assert len(cell.looked_at) == 4


def test_the_line_of_a_straggler_is_the_one_that_most_looks_find() -> None:
    for places, told in ((["f", *["g"] * 4], "in g"), (["f", "g", *[""] * 40, "h"], ""), (["f", *["g"] * 2], "in g")):
        cell = Cell()
        cell.begin()
        cell.late, cell.places = 2, places
        cell.run(30.0)
        ((_, line),) = cell.lines
        assert told in line
        assert bool(told) == ("while it is at" in line)


def test_a_rank_that_starts_collectives_after_the_others_has_one_line() -> None:
    cell = Cell()
    trouble = cell.begin()
    for _ in range(5):
        trouble.reported(0, 10, 0.05, 0.0)
    cell.latest = lateness([{0: step, 1: step + 0.02, 2: step + 0.001} for step in range(40)])
    cell.late = 1  # the rank that looks find, too
    cell.run(30.0)
    ((at, line),) = cell.lines
    assert 2 < at < 4
    assert line.startswith(
        "live loop: the other ranks wait for [1] for 19 ms, in 100 % of the collectives compared (a step takes 50 ms), "
        "while it is at cell [3], line 7, in augment. "
    )
    assert len(cell.compared_at) < 31


def test_collectives_of_an_earlier_cell_blame_no_rank() -> None:
    cell = Cell()
    cell.begin()
    cell.latest = lateness([{0: step, 1: step + 0.02, 2: step + 0.001} for step in range(40)])
    cell.latest_at = -1.0
    assert not cell.run(10.0).lines
    assert cell.compared_at


def test_one_comparison_is_not_enough() -> None:
    cell = Cell()
    trouble = cell.begin()
    for _ in range(5):
        trouble.reported(0, 10, 0.05, 0.0)
    for second in range(20):
        slow = second % 3
        cell.latest = lateness([{rank: step + 0.02 * (rank == slow) for rank in range(3)} for step in range(40)])
        cell.run(second + 1.0)
    assert not cell.lines


def test_a_straggler_that_comes_later_is_looked_at_more_often() -> None:
    cell = Cell()
    cell.begin()
    cell.run(60.0)
    before = len(cell.asked_at)
    cell.late = 1
    cell.run(75.0)
    assert len(cell.asked_at) > before + 30
    assert [line.startswith("live loop: the other ranks wait for [1] in ") for _, line in cell.lines] == [True]


def test_ranks_are_not_asked_where_waits_are_not_watched_or_there_is_one_rank() -> None:
    for cell in (Cell(asks=False), Cell(ranks=1), Cell(ranks=1_000)):
        cell.begin()
        cell.run(20.0)
        assert not cell.asked_at


def test_many_messages_are_cut() -> None:
    cell = Cell()
    trouble = cell.begin()
    for step in range(0, 2_000, 100):
        trouble.alarmed(0, LoopAlarm("spike", "loss", step, 50.0, 2.0))
    cell.run(10.0)
    assert len(cell.lines) == 9
    assert cell.lines[-1][1] == "live loop: further messages of this cell are left out"


def test_each_loop_of_a_cell_has_its_messages() -> None:
    cell = Cell()
    for number in (1, 2):
        trouble = cell.loops[number] = Trouble()
        trouble.alarmed(0, LoopAlarm("nan", "loss", number, math.nan))
    cell.run(5.0)
    assert [line[:33] for _, line in cell.lines] == [
        "live loop: loss is nan in step 1,",
        "live loop: loss is nan in step 2,",
    ]
