"""Tests when a running cell tells of waits in collectives, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_kernel.base.events import MeshView, RankView, WaitView
from monarch_kernel.errors import Failure
from monarch_kernel.net.wire.messages import Payload
from monarch_kernel.notebook.cells.wait_watch import WaitWatch
from monarch_kernel.runtime.diagnostics.stacks import AwaitedCall, Collective, Doing
from monarch_kernel.runtime.rpc.answers import Answer, Value
from monarch_kernel.runtime.rpc.future import Future

DONE = Value(Payload(), (), {})


class FakeMesh:
    """Two ranks, of which the first may wait.

    Attributes:
        since: when rank 0 has started its collective; None while it computes.
        asked_at: when the ranks were asked.
        in_full: how often they had to say all.
        states: what agents say of the processes of silent ranks.
        shown: the waits in the views.
        calls: the calls that rank 0 waits for.
        silent: whether rank 1 does not answer.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.number = 1
        self.now = 0.0
        self.asked_at: list[float] = []
        self.states: dict[int, str] = {}
        self.in_full = 0
        self.shown: Sequence[WaitView] = ()
        self.calls: tuple[AwaitedCall, ...] = ()
        self.silent = False

    def doing(self, *, brief: bool = False) -> Future[dict[int, Doing | Failure]]:
        self.asked_at.append(self.now)
        self.in_full += not brief
        if self.since is None:
            return Future.resolved({0: Doing(calls=self.calls), 1: Doing()})
        call = Collective("all_reduce", self.number, "", (0, 1), "4", self.now - self.since)
        other = Failure("interrupted", "CancelledError", "") if self.silent else Doing()
        return Future.resolved({0: Doing((), (call,), {"": self.number}), 1: other})

    def process_states(self, ranks: Sequence[int]) -> dict[int, Future[str]]:
        return {rank: Future.resolved(self.states.get(rank, "")) for rank in ranks}

    def places(self, procs: Sequence[int]) -> list[tuple[str, int]]:
        return [("t", proc - 11) for proc in procs]

    def view(self) -> MeshView:
        return MeshView("t", (("gpus", 2),), tuple(RankView(i, (("gpus", i),), "running") for i in range(2)))

    def show_waits(self, source: object, waits: Sequence[WaitView]) -> None:
        self.shown = waits


class Cell:
    """A cell that was sent at 0 s, and the lines below it with the time of each."""

    def __init__(self, after_s: float = 10.0) -> None:
        self.mesh = FakeMesh()
        self.lines: list[tuple[float, str]] = []
        self.answers: list[Answer | None] = [None, None]
        self.watch = WaitWatch(
            self.mesh, (0, 1), lambda text: self.lines.append((round(self.mesh.now, 1), text)), after_s, 0.0
        )

    def run(self, until: float) -> Cell:
        while self.mesh.now < until:
            self.mesh.now = round(self.mesh.now + 0.05, 2)
            self.watch.poll(self.answers, self.mesh.now)
        return self

    @property
    def times(self) -> list[float]:
        return [round(at) for at, _ in self.lines]


def test_a_short_cell_costs_nothing() -> None:
    cell = Cell().run(9.9)
    assert not cell.mesh.asked_at
    cell.watch.end(9.95, succeeded=True)
    assert not cell.lines


def test_a_long_cell_is_looked_at_every_few_seconds() -> None:
    cell = Cell().run(110.0)
    assert len(cell.mesh.asked_at) <= 42
    assert not cell.mesh.in_full
    assert not cell.lines


def test_all_is_asked_for_while_a_rank_waits() -> None:
    cell = Cell()
    cell.mesh.since = 0.0
    cell.run(12.0)
    in_full = cell.mesh.in_full
    assert in_full >= 1
    cell.mesh.since = None
    cell.run(110.0)
    assert cell.mesh.in_full <= in_full + 1


def test_all_is_asked_for_where_waits_are_reported_soon() -> None:
    cell = Cell(after_s=1.0).run(20.0)
    assert cell.mesh.in_full == len(cell.mesh.asked_at)


def test_a_wait_is_shown_when_it_reaches_the_limit() -> None:
    cell = Cell()
    cell.mesh.since = 33.0
    cell.run(32.9)
    cell.mesh.since = 33.0
    cell.run(42.9)
    assert not cell.lines
    cell.run(43.3)
    assert len(cell.lines) == 1
    assert cell.lines[0][1].startswith("[0] waits for 10 s in all_reduce #1 (shape 4); [1] has not started it")
    assert list(cell.mesh.shown) == [WaitView(cell.lines[0][1], (0,), (1,))]


def test_a_wait_from_the_start_is_shown_at_the_first_look() -> None:
    cell = Cell()
    cell.mesh.since = 0.0
    assert cell.run(12.0).times == [10]


def test_a_wait_that_lasts_is_shown_again_seldom() -> None:
    cell = Cell()
    cell.mesh.since = 0.0
    assert cell.run(7300.0).times == [10, 60, 600, 3600, 7200]


def test_a_line_is_updated_once_when_a_silent_rank_has_answered() -> None:
    cell = Cell()
    cell.mesh.since, cell.mesh.silent = 0.0, True
    cell.run(20.0)
    cell.mesh.silent = False
    cell.run(30.0)
    cell.mesh.silent = True
    cell.run(40.0)
    cell.mesh.silent = False
    cell.run(50.0)
    assert cell.times == [10, 20]
    (_, partial), (_, whole) = cell.lines
    assert "[1] has not answered" in partial
    assert "[1] has not started it" in whole


def test_a_message_whose_peer_comes_to_wait_too_has_not_ended() -> None:
    cell = Cell()
    since = {0: 0.0}
    silent: list[int] = []

    def doing(*, brief: bool = False) -> Future[dict[int, Doing | Failure]]:
        def of(rank: int) -> Doing | Failure:
            if rank in silent:
                return Failure("interrupted", "CancelledError", "")
            calls = tuple(
                Collective("recv", 0, "", (0, 1), "4", cell.mesh.now - since[at], peer=1 - at)
                for at in since
                if at == rank
            )
            return Doing((), calls)

        return Future.resolved({rank: of(rank) for rank in range(2)})

    cell.mesh.doing = doing  # type: ignore[method-assign]
    cell.run(20.0)
    since[1] = 20.0
    cell.run(30.0)
    silent.append(1)
    cell.run(40.0)
    silent.clear()
    cell.run(50.0)
    assert cell.times == [10, 20]
    assert [text.partition("; ")[2] for _, text in cell.lines] == [
        "[1] has not started it: no code of the cell runs there",
        "[1] in recv from [0] (shape 4) instead",
    ]
    since.clear()
    cell.run(60.0)
    assert cell.lines[-1][1] == "[0-1]: the wait in recv from [1] (shape 4) has ended after 50 s"


def test_the_end_of_a_wait_is_shown_once() -> None:
    cell = Cell()
    cell.mesh.since = 0.0
    cell.run(34.0)
    cell.mesh.since = None
    cell.run(100.0)
    assert [text for _, text in cell.lines[1:]] == ["[0]: the wait in all_reduce #1 (shape 4) has ended after 34 s"]
    assert not cell.mesh.shown


def test_a_wait_for_an_actor_is_in_the_view_only() -> None:
    cell = Cell()
    cell.mesh.calls = (AwaitedCall("a.step", (12,), 20.0),)
    cell.run(11.0)
    assert list(cell.mesh.shown) == [
        WaitView("[0] waits for 20 s for a.step of [1]; [1] runs no code of it", (0,), (1,))
    ]
    cell.mesh.calls = ()
    cell.run(15.0)
    assert not cell.mesh.shown
    assert not cell.lines


def test_the_next_wait_is_another_one() -> None:
    cell = Cell()
    cell.mesh.since = 0.0
    cell.run(34.0)
    cell.mesh.number, cell.mesh.since = 2, 33.0
    assert [text[:20] for _, text in cell.run(44.0).lines[1:]] == ["[0]: the wait in all", "[0] waits for 10 s i"]


def test_a_cell_that_succeeds_tells_the_end_and_one_that_fails_does_not() -> None:
    for succeeded in (True, False):
        cell = Cell()
        cell.mesh.since = 0.0
        cell.run(20.0)
        cell.watch.end(20.0, succeeded=succeeded)
        assert len(cell.lines) == 1 + succeeded
        assert not cell.mesh.shown


def test_a_rank_that_has_finished_is_named_so() -> None:
    cell = Cell()
    cell.mesh.since, cell.answers[1] = 0.0, DONE
    assert cell.run(11.0).lines[0][1].endswith("; [1] has finished the cell")


def test_another_limit_and_none() -> None:
    cell = Cell(after_s=1.0)
    cell.mesh.since = 0.0
    assert cell.run(2.0).times == [1]
    cell = Cell(after_s=0.0)
    cell.mesh.since = 0.0
    assert not cell.run(100.0).mesh.asked_at


def test_waits_of_other_ranks_are_left_out() -> None:
    cell = Cell()
    cell.mesh.since = 0.0
    cell.watch = WaitWatch(cell.mesh, (1,), lambda text: cell.lines.append((0.0, text)), 10.0, 0.0)
    assert not cell.run(20.0).lines


def test_many_waits_are_bounded() -> None:
    cell = Cell()
    calls = tuple(Collective("all_reduce", 1, f"g{i}", (0, 1), "", 20.0) for i in range(9))
    cell.mesh.doing = lambda *, brief=False: Future.resolved({0: Doing((), calls), 1: Doing()})  # type: ignore[method-assign]
    assert len(cell.run(11.0).lines) == 5
    assert cell.lines[-1][1] == "and 5 more waits, of [0] (%mesh stacks shows them)"


def test_a_stopped_process_that_others_wait_for_is_named() -> None:
    cell = Cell()
    waits = Doing((), (Collective("all_reduce", 1, "", (0, 1), "4", 20.0),), {"": 1})
    cell.mesh.doing = lambda *, brief=False: Future.resolved(
        {0: waits, 1: Failure("interrupted", "CancelledError", "")}
    )  # type: ignore[method-assign]
    cell.mesh.states = {1: "state: T 4711 0\n"}
    (line,) = cell.run(12.0).lines
    assert line[1].endswith("; [1] is stopped by a signal, such as SIGSTOP (kill -CONT 4711 lets it go on)")


def test_a_rank_that_does_not_answer_does_not_stop_the_watch() -> None:
    cell = Cell()
    silent: Future[Any] = Future(Future.resolved(None).owner, 1, lambda answers: {})
    cell.mesh.doing = lambda *, brief=False: silent  # type: ignore[method-assign]
    cell.run(10.5)
    assert cell.watch is not None
    silent.resolve((), True)
    cell.run(12.0)
    assert not cell.lines
