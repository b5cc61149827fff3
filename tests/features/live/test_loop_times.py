"""The speed of a loop and the time that is left are without pauses; the elapsed time ends with the loop."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.base.events import LoopView
from monarch_kernel.features.live import worker
from monarch_kernel.features.live.loops import LoopBook
from monarch_kernel.features.live.worker import LoopPort, RankLoop
from monarch_kernel.net.wire.codec import Packed, join, split
from monarch_kernel.net.wire.messages import Logged, LoopAlarm, LoopGrant, LoopLeft, LoopReport, LoopStarted, LoopStep
from monarch_kernel.testing import rank_spec

KEY = (4, 1)


class Clock:
    """A clock that only tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(
            worker, "time", SimpleNamespace(perf_counter=self.read, monotonic=self.read, time=self.read)
        )

    def read(self) -> float:
        return self.now


class Rank:
    """A loop of a rank whose waits for the controller take a time and end with a grant."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.reports: list[LoopReport] = []
        self.steps: list[LoopStep] = []
        self.coming: list[tuple[float, LoopGrant]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        port = LoopPort(self.submit, self.wait, request=lambda: KEY[0], later=self.later)
        self.loop = RankLoop(*KEY, None, port)

    def submit(self, packed: Packed) -> None:
        ((message, _),) = split(join([packed]))
        if isinstance(message, LoopReport):
            self.reports.append(message)
        elif isinstance(message, LoopStep):
            self.steps.append(message)

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        self.timers.append((self.clock.now + seconds, function))

    def fire(self) -> None:
        """Let the time of the only timer come."""
        ((at, function),) = self.timers
        self.timers.clear()
        self.clock.now = max(self.clock.now, at)
        function()

    def wait(self, waiter: object, timeout_s: float | None) -> bool:
        after_s, grant = self.coming.pop(0)
        self.clock.now += after_s
        self.loop.granted(grant)
        return True


def grant(horizon: int, *, is_paused: bool = False) -> LoopGrant:
    return LoopGrant(*KEY, horizon, 2, is_paused=is_paused)


def test_the_duration_of_a_step_is_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rank = Rank(clock)
    rank.coming = [
        (0.0, grant(2)),
        (0.03, grant(2, is_paused=True)),  # the controller was slow, which is no pause
        (0.75, grant(3, is_paused=True)),  # one step in a pause
        (0.75, grant(3)),
        (0.03, grant(1 << 20)),
    ]
    for step in rank.loop.run():
        clock.now += 0.1
        if step == 5:
            break
    durations = {report.step: report.step_s for report in rank.reports if report.step_s}
    assert durations[3] == pytest.approx(0.13)
    assert durations[4] == pytest.approx(0.13)
    assert max(durations.values()) < 0.14


def test_a_rank_that_hangs_in_a_step_reports_it_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rank = Rank(clock)
    rank.coming = [(0.0, LoopGrant(*KEY, 1 << 20, 200))]
    run = rank.loop.run()
    while next(run) < 250:
        clock.now += 0.001
    assert rank.reports[-1].step == 200
    rank.fire()
    assert not rank.steps  # the last report is less than a second ago
    while rank.timers:
        rank.fire()
    assert [(step.request, step.number, step.step) for step in rank.steps] == [(*KEY, 250)]
    clock.now += 60
    assert next(run) == 251
    assert rank.reports[-1].step == 251  # it reports a step itself that starts so late
    rank.fire()
    assert len(rank.steps) == 1  # this step was reported already
    run.close()


def test_a_timer_ends_with_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rank = Rank(clock)
    rank.coming = [(0.0, LoopGrant(*KEY, 1 << 20, 200))]
    run = rank.loop.run()
    while next(run) < 150:
        pass
    run.close()
    clock.now += 10
    rank.fire()
    assert not rank.timers
    assert not rank.steps


def test_a_timer_does_not_keep_an_ended_loop_and_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rank = Rank(clock)
    rank.coming = [(0.0, LoopGrant(*KEY, 1 << 20, 200))]
    run = rank.loop.run()
    while next(run) < 250:
        pass
    run.close()
    loop = weakref.ref(rank.loop)
    del rank.loop, run
    gc.collect()
    assert loop() is None
    rank.fire()
    assert not rank.timers


class Book:
    """A loop of two ranks in the controller."""

    def __init__(self, steps: int | None, **more: Any) -> None:
        self.book = LoopBook()
        started = LoopStarted(*KEY, -1 if steps is None else steps, **more)
        for rank in (0, 1):
            self.book.started(rank_spec(10 + rank, rank=rank, world_size=2, mesh="t"), "", started, 50.0)

    def report(self, rank: int, step: int, step_s: float, now: float, loader_s: float = 0.0) -> None:
        self.book.reported(10 + rank, LoopReport(*KEY, step, step_s, loader_s=loader_s), now)

    def leave(self, rank: int, steps: int, now: float) -> None:
        self.book.left(10 + rank, LoopLeft(*KEY, steps), now)

    def view(self, now: float) -> LoopView:
        (record,) = self.book.of([10, 11])
        return record.view(now)


def test_the_time_left_is_that_of_the_slowest_rank() -> None:
    book = Book(100)
    assert book.view(50.0).left_s is None
    book.report(0, 10, 0.5, 55.0)
    book.report(1, 8, 0.25, 52.0)
    assert book.view(60.0).left_s == pytest.approx((100 - 8) * 0.5)
    book.report(0, 40, 0.5, 70.0)
    book.report(1, 11, 8.0, 76.0)
    assert book.view(76.0).left_s == pytest.approx((100 - 11) * (8 * 0.25 + 3 * 8) / 11)
    assert Book(None).view(60.0).left_s is None


def test_the_step_and_the_state_are_those_that_users_see() -> None:
    book = Book(100)
    (record,) = book.book.of([10, 11])
    for rank in (0, 1):
        book.report(rank, 10 + rank, 0.5, 55.0)
    assert (book.view(55.0).step, book.view(55.0).state) == (10, "running")
    at = record.pace.pause().horizon
    assert book.view(56.0).state == "pausing"
    book.report(1, at, 0.5, 57.0)
    assert book.view(57.0).state == "pausing"
    book.report(0, at, 0.5, 58.0)
    assert (book.view(58.0).step, book.view(58.0).state) == (at, "paused")
    record.pace.resume()
    book.leave(0, at, 59.0)  # it has failed
    book.report(1, 100, 0.5, 99.0)
    book.leave(1, 100, 99.0)
    assert (book.view(100.0).step, book.view(100.0).state) == (100, "over")


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_loop_that_was_stopped_is_stopping_until_its_last_rank_has_left(is_paused: bool) -> None:
    book = Book(100)
    (record,) = book.book.of([10, 11])
    for rank in (0, 1):
        book.report(rank, 10, 0.5, 55.0)
    assert book.view(55.0).left_s is not None
    if is_paused:
        record.pace.pause()
    at = record.pace.stop()[0].step
    assert (book.view(56.0).state, book.view(56.0).left_s) == ("stopping", None)
    book.leave(0, at, 57.0)
    assert book.view(57.0).state == "stopping"
    book.leave(1, at, 58.0)
    assert book.view(58.0).state == "over"


def test_the_step_is_shown_in_which_ranks_hang() -> None:
    book = Book(1000)
    for rank in (0, 1):
        book.report(rank, 100, 0.001, 51.0)
    for rank in (0, 1):
        book.book.in_step(10 + rank, LoopStep(*KEY, 150 + rank))
    assert book.view(53.0).step == 150
    for rank in (0, 1):
        book.report(rank, 200, 0.1, 61.0)
    assert book.view(61.0).step == 200
    assert book.view(61.0).left_s == pytest.approx(
        800 * (100 * 0.001 + 100 * 0.1) / 200
    )  # no step is lost or counts twice
    book.leave(0, 200, 62.0)
    assert book.book.in_step(10, LoopStep(*KEY, 199)) == []


def test_a_hook_of_any_rank_makes_the_loop_act() -> None:
    book = Book(100)
    (record,) = book.book.of([10, 11])
    stopping = LoopStarted(*KEY, 100, hooks={"nan": "stop"})
    book.book.started(rank_spec(12, rank=2, world_size=3, mesh="t"), "", stopping, 50.0)
    assert not any(change.name == "" for change in record.pace.changes)
    alarm = LoopAlarm("nan", "loss", 3, float("nan"))
    book.book.reported(
        10, LoopReport(*KEY, 4, 0.5, {"loss": (Logged(3, 0.0, 0, float("nan")),)}, alarms=(alarm,)), 51.0
    )
    assert [change.name for change in record.pace.changes] == [""]


def test_one_slow_step_changes_the_time_left_little() -> None:
    book = Book(1000)
    for rank in (0, 1):
        book.report(rank, 100, 0.1, 60.0)
        book.report(rank, 101, 3.0, 63.0)
    assert book.view(63.0).left_s == pytest.approx(899 * 13.0 / 101)
    assert book.view(63.0).step_s == 3.0


def test_the_speed_is_the_mean_of_a_second_so_that_one_step_before_a_pause_changes_it_little() -> None:
    book = Book(1000)
    for step in range(1, 21):
        book.report(0, step, 0.05, 50.0 + step / 20)
        book.report(1, step, 0.02, 50.0 + step / 50)
    book.report(0, 21, 0.15, 52.0)
    assert book.view(52.0).step_s == pytest.approx((19 * 0.05 + 0.15) / 20, rel=0.06)


def test_the_share_of_the_loader_is_that_of_the_last_seconds_and_of_ranks_that_use_one() -> None:
    book = Book(1000)
    for step in range(1, 9):
        book.report(0, step, 1.0, 50.0 + step, loader_s=1.0 if step < 3 else 0.25)
        book.report(1, step, 1.0, 50.0 + step)
    ((rank, share),) = book.view(60.0).loader
    assert (rank, share) == (0, pytest.approx(0.25))


def test_the_elapsed_time_ends_with_the_loop() -> None:
    book = Book(10)
    assert book.view(53.0).age_s == 3.0
    for rank in (0, 1):
        book.report(rank, 10, 0.5, 55.0 + rank)
        book.leave(rank, 10, 57.0 + rank)
    assert book.view(1000.0).state == "over"
    assert book.view(1000.0).age_s == 8.0
    assert book.view(1000.0).left_s is None


def test_a_new_controller_learns_when_the_loop_has_started() -> None:
    assert Book(10, age_s=20.0).view(53.0).age_s == 23.0
