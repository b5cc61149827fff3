"""Changes take effect at the same step on all ranks, whatever the delays, and no rank waits without need."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import pytest

from monarch_kernel.features.live.pace import Grant, Pace, StepGrant


class Rank:
    """A rank that runs through the loop as fast as it can, and records what it sees."""

    def __init__(self, lab: Lab, number: int, step_s: float) -> None:
        self.lab = lab
        self.number = number
        self.step_s = step_s
        self.lease = StepGrant()
        self.step = 0
        self.seen: list[Any] = []
        self.waited_s = 0.0
        self.waits_since: float | None = 0.0
        self.is_out = False

    def receive(self, grant: Grant) -> None:
        self.lease.granted(grant)
        if self.waits_since is not None:
            self.go()

    def go(self) -> None:
        """Start the next step, or wait; report progress when it is due."""
        lab = self.lab
        if not self.lease.may_begin(self.step):
            self.waits_since = lab.now if self.waits_since is None else self.waits_since
            if self.lease.should_report(self.step, waits=True):
                self.report()
            return
        if self.waits_since is not None and self.step > 3:
            self.waited_s += lab.now - self.waits_since
        self.waits_since = None
        self.lease.begin(self.step)
        if self.lease.is_stopped or self.step == lab.steps:
            self.is_out = True
            lab.to_controller(lambda: lab.pace.left(self.number))
            return
        self.seen.append(self.lease.values.get("lr"))
        if self.lease.should_report(self.step):
            self.report()
        took = self.step_s * lab.chance.uniform(0.8, 1.2)
        self.step += 1
        lab.at(took, self.go)

    def report(self) -> None:
        step, step_s = self.step, self.step_s if self.step else 0.0
        self.lab.to_controller(lambda: self.lab.pace.progressed(self.number, step, step_s))


class Lab:
    """Ranks, a controller, and messages with delays."""

    def __init__(self, seed: int, step_s: list[float], steps: int, delay_s: float = 0.005) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.steps = steps
        self.delay_s = delay_s
        self.pace = Pace()
        self.ranks = [Rank(self, number, each) for number, each in enumerate(step_s)]
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._last: dict[int, float] = {}
        for rank in self.ranks:
            self.at(self.chance.uniform(0, 0.05), lambda rank=rank: self.deliver(rank, self.pace.joined(rank.number)))

    def at(self, after_s: float, do: Callable[[], object], earliest: float = 0.0) -> float:
        """Schedule an event; returns its time."""
        self._count += 1
        when = max(self.now + after_s, earliest)
        heapq.heappush(self._events, (when, self._count, do))
        return when

    def deliver(self, rank: Rank, grant: Grant) -> None:
        """Deliver a message to a rank; messages to the same rank keep their order."""
        delay_s, last = self.chance.uniform(0, self.delay_s), self._last.get(rank.number, 0.0)
        self._last[rank.number] = self.at(delay_s, lambda: rank.receive(grant), last)

    def tell(self, grant: Grant | None) -> None:
        for rank in self.ranks:
            if grant is not None and not rank.is_out:
                self.deliver(rank, grant)

    def to_controller(self, do: Callable[[], Grant | None]) -> None:
        self.at(self.chance.uniform(0, self.delay_s), lambda: self.tell(do()))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self._events and not until():
            self.now, _, do = heapq.heappop(self._events)
            do()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("step_s", [[1e-5] * 4, [0.004, 0.005, 0.004, 0.02], [0.7, 0.9], [0.001, 3.0]])
def test_a_knob_has_the_same_value_at_the_same_step_on_all_ranks(seed: int, step_s: list[float]) -> None:
    lab = Lab(seed, step_s, steps=400)
    turned: list[tuple[int, int]] = []

    def turn(value: int) -> None:
        change, grant = lab.pace.change("lr", value)
        turned.append((change.step, value))
        lab.tell(grant)

    for value in range(10):
        lab.at(lab.chance.uniform(0, 300 * max(step_s)), lambda value=value: turn(value))
    lab.run()
    first, *others = [rank.seen for rank in lab.ranks]
    assert len(first) == 400
    assert all(other == first for other in others)
    expected: list[Any] = [None] * 400
    for step, value in turned:
        expected[step:] = [value] * (400 - step if step < 400 else 0)
    assert first == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("step_s", [[1e-5] * 4, [0.004, 0.005, 0.004], [0.3, 0.3]])
def test_no_rank_waits_in_a_running_loop(seed: int, step_s: list[float]) -> None:
    lab = Lab(seed, step_s, steps=20_000 if step_s[0] < 1e-4 else 400)
    lab.run()
    assert [rank.waited_s for rank in lab.ranks] == [0.0] * len(step_s)


@pytest.mark.parametrize("seed", range(10))
def test_all_ranks_pause_before_the_same_step_and_resume_there(seed: int) -> None:
    lab = Lab(seed, [0.004, 0.01, 0.002], steps=500)
    lab.run(lambda: lab.now > 0.5)
    grant = lab.pace.pause()
    at = grant.horizon
    lab.tell(grant)
    lab.run()
    assert [rank.step for rank in lab.ranks] == [at] * 3
    lab.tell(lab.pace.step(3))
    lab.run()
    assert [rank.step for rank in lab.ranks] == [at + 3] * 3
    _, grant = lab.pace.change("lr", "other")
    lab.tell(grant)
    lab.tell(lab.pace.resume())
    lab.run()
    assert [rank.seen for rank in lab.ranks] == [[None] * (at + 3) + ["other"] * (500 - at - 3)] * 3


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_paused", [False, True])
def test_ranks_save_before_the_same_step(seed: int, is_paused: bool) -> None:
    lab = Lab(seed, [0.004, 0.01, 0.002], steps=500)
    lab.run(lambda: lab.now > 0.5)
    if is_paused:
        lab.pace.pause()
        lab.run()
    before = lab.pace.horizon
    first, second = lab.pace.preempt(), lab.pace.preempt()  # of two ranks
    steps = [change.step for change in (*first.changes, *second.changes)]
    assert steps == [before, before + is_paused]  # ranks that wait for a step count as having reached it
    for grant in (first, second):
        lab.tell(grant)
    lab.pace.stop()
    lab.run()
    assert all(rank.lease.is_preempted for rank in lab.ranks)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_loop_ends_at_the_same_step_on_all_ranks(seed: int, is_paused: bool) -> None:
    lab = Lab(seed, [0.004, 0.01, 0.002], steps=500)
    lab.run(lambda: lab.now > 0.5)
    if is_paused:
        lab.pace.pause()
        lab.run()
    change, grant = lab.pace.stop()
    lab.tell(grant)
    lab.run()
    assert {len(rank.seen) for rank in lab.ranks} == {change.step}
    assert lab.pace.is_over
    assert lab.pace.stop()[0] == change


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("apart", [2, 3, 10, 500])
@pytest.mark.parametrize("step_s", [[1e-4] * 4, [0.004, 0.03, 0.002], [0.001, 1.0]])
def test_ranks_that_do_not_wait_for_each_other_stay_together(seed: int, apart: int, step_s: list[float]) -> None:
    lab = Lab(seed, step_s, steps=300)
    lab.pace.apart = apart
    for rank in lab.ranks:
        lab.pace.joined(rank.number)
    widest = 0

    def look() -> bool:
        nonlocal widest
        steps = [rank.step for rank in lab.ranks]
        widest = max(widest, max(steps) - min(steps))
        return False

    lab.run(look)
    assert all(len(rank.seen) == 300 for rank in lab.ranks)
    assert widest <= apart
    if max(step_s) > 10 * min(step_s):
        assert widest >= min(apart, 100) // 2  # and no closer than necessary


def test_a_change_takes_effect_soon() -> None:
    for step_s, most in ((1e-4, 2 * 0.1 / 1e-4), (0.05, 4), (10.0, 2)):
        lab = Lab(1, [step_s] * 2, steps=100_000)
        lab.run(lambda lab=lab, step_s=step_s: lab.now > 20 * step_s + 1)
        change, _ = lab.pace.change("lr", 1)
        # Their steps are those that they start next.
        assert 0 <= change.step - max(rank.step for rank in lab.ranks) <= most


def test_a_slow_rank_reports_often_enough() -> None:
    lab = Lab(1, [0.001, 0.004], steps=4000)
    lab.run(lambda: lab.now > 3)
    slow = lab.ranks[1].step
    assert slow - 150 <= lab.pace.reached <= slow


def test_each_of_many_ranks_reports_less_often() -> None:
    pace = Pace()
    for rank in range(1000):
        pace.joined(rank)
    grant = pace.progressed(0, 1, 0.01)
    assert grant is not None
    assert grant.ahead == 200


def test_a_late_rank_gets_all_changes() -> None:
    pace = Pace()
    pace.joined(1)
    pace.change("lr", 1)
    pace.progressed(1, 1, 0.01)
    pace.change("lr", 2)
    lease = StepGrant()
    lease.granted(pace.joined(2))
    values = []
    for step in range(pace.horizon):
        lease.begin(step)
        values.append(lease.values.get("lr"))
    assert values[:3] == [None, None, 1]
    assert values[-1] == 1  # the second is for a later step


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_ran_freely_follow_the_next_controller(seed: int) -> None:
    lab = Lab(seed, [0.004, 0.001, 0.002], steps=3000)
    lab.run(lambda: lab.now > 0.3)
    for rank in lab.ranks:  # there is no controller: their reports are lost
        rank.lease.go_free()
    lab.to_controller = lambda do: None  # type: ignore[method-assign]
    lab.run(lambda: lab.now > 0.6)
    lab.pace = Pace()
    held: list[Callable[[], Grant | None]] = []  # until all have reported their progress
    lab.to_controller = held.append  # type: ignore[method-assign]
    told: list[tuple[Rank, int, int]] = []
    for rank in lab.ranks:
        lab.at(lab.chance.uniform(0, 0.1), lambda rank=rank: told.append((rank, *rank.lease.come_back())))
    lab.run(lambda: len(told) == 3)
    for rank, step, horizon in told:
        assert rank.lease.may_begin(rank.step) == (rank.step < horizon)
        lab.deliver(rank, lab.pace.joined(rank.number, step, horizon))
    del lab.to_controller  # type: ignore[attr-defined]
    for do in held:
        lab.to_controller(do)
    change, grant = lab.pace.change("lr", 7)
    lab.tell(grant)
    lab.run()
    first, *others = [rank.seen for rank in lab.ranks]
    assert len(first) == 3000
    assert others == [first, first]
    assert first == [None] * change.step + [7] * (3000 - change.step)


def test_a_paused_loop_stays_paused_under_the_next_controller() -> None:
    pace, lease = Pace(), StepGrant()
    lease.granted(pace.joined(1))
    lease.granted(pace.pause())
    _, grant = pace.change("lr", 3)
    lease.granted(grant)
    assert lease.is_paused
    assert lease.turned() == {"lr": 3}
    assert lease.values == {}
    assert lease.come_back() == (0, pace.horizon)
    lease.granted(pace.resume())
    assert not lease.is_paused


def test_zero_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="can't run 0 steps"):
        Pace().step(0)


@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_that_has_not_started_holds_the_others(comes: bool) -> None:
    pace = Pace(apart=10, awaited={1}, first=20)
    pace.joined(0, 20, 21)
    step = 20
    while (grant := pace.progressed(0, step, 0.001)) is not None:
        step = grant.horizon
    assert step == pace.horizon == 30
    if comes:
        assert pace.joined(1, 20, 21).horizon == 30
        grant = pace.progressed(1, 30, 0.001)
    else:
        grant = pace.missed(1)
    assert grant is not None
    assert grant.horizon == 40


def test_the_progress_is_not_set_back_by_a_rank_that_fails_joins_late_or_is_slow() -> None:
    pace = Pace()
    for rank in (0, 1):
        pace.joined(rank)
    for rank in (0, 1):
        pace.progressed(rank, 60 - 10 * rank, 0.01)
    assert pace.progress == 50
    pace.left(1, 50)  # it has failed
    assert pace.progress == 60
    pace.joined(2)
    assert (pace.progress, pace.reached) == (60, 0)
    pace.progressed(2, 61, 0.01)
    assert pace.progress == 60
    pace.progressed(0, 100, 0.01)
    pace.left(2, 70)
    pace.left(0, 100)
    assert pace.is_over
    assert pace.progress == 100


@pytest.mark.parametrize("seed", range(3))
def test_a_loop_is_pausing_until_its_last_rank_waits(seed: int) -> None:
    lab = Lab(seed, [0.004, 0.01], steps=500)
    lab.run(lambda: lab.now > 0.5)
    assert not lab.pace.is_pausing
    for halt in (lab.pace.pause, lambda: lab.pace.step(3)):
        lab.tell(halt())
        assert lab.pace.is_pausing
        lab.run()
        assert lab.pace.is_paused
        assert not lab.pace.is_pausing
    lab.tell(lab.pace.step(3))
    lab.pace.left(0)  # no other rank waits for one that has left
    lab.pace.left(1)
    assert not lab.pace.is_pausing


def test_a_stopped_loop_is_stopping_until_all_ranks_have_left_it() -> None:
    lab = Lab(0, [0.004, 0.01], steps=500)
    lab.run(lambda: lab.now > 0.5)
    assert not lab.pace.is_stopping
    lab.pace.change("lr", 1.0)
    assert not lab.pace.is_stopping
    lab.tell(lab.pace.stop()[1])
    lab.pace.left(0)
    assert lab.pace.is_stopping
    lab.pace.left(1)
    assert not lab.pace.is_stopping
