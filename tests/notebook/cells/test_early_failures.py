"""Tests when a running cell tells that ranks have failed, without processes."""

from __future__ import annotations

from typing import Any

from monarch_kernel.errors import Failure, Frame
from monarch_kernel.net.wire.messages import Payload
from monarch_kernel.notebook.cells.early_failures import ANSWER_S, FOLD_S, RELEASED_S, EarlyFailures
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing
from monarch_kernel.runtime.rpc.answers import Value
from monarch_kernel.runtime.rpc.future import Future

DONE = Value(Payload(), (), {})
EARLY = Failure("exception", "ValueError", "early")
LATE = Failure("exception", "ValueError", "late")
IDLE = Doing()
WAITS = Doing(collectives=(Collective("all_reduce", 1),))


class FakeMesh:
    """Four ranks that do the same."""

    ranks = (0, 1, 2, 3)

    def __init__(self, doing: Doing) -> None:
        self.n_asked = 0
        self._doing = doing

    def doing(self) -> Future[dict[int, Doing | Failure]]:
        self.n_asked += 1
        return Future.resolved(dict.fromkeys(self.ranks, self._doing))


class Watch:
    """The failures of a cell, and the lines about them."""

    def __init__(self, doing: Doing = IDLE) -> None:
        self.lines: list[str] = []
        self.mesh: Any = FakeMesh(doing)
        self.early = EarlyFailures(self.mesh, 5, self.lines.append)

    def poll(self, now: float, *answers: Failure | Value | None) -> list[str]:
        self.early.note(answers, now)
        self.early.tell("Ctrl-C", now)
        lines, self.lines[:] = list(self.lines), []
        return lines


def test_failures_at_nearly_the_same_time_are_one_line() -> None:
    watch = Watch()
    assert not watch.poll(10.0, None, EARLY, None, None)
    assert not watch.poll(10.0 + FOLD_S / 2, None, EARLY, DONE, EARLY)
    assert watch.poll(10.0 + FOLD_S, None, EARLY, DONE, EARLY) == [
        "[1,3] failed with ValueError: early; [0] goes on; Ctrl-C ends it"
    ]
    assert not watch.poll(1_000.0, None, EARLY, DONE, EARLY)


def test_a_later_failure_has_another_line() -> None:
    watch = Watch()
    watch.poll(10.0, EARLY, None, None, None)
    assert len(watch.poll(11.0, EARLY, None, None, None)) == 1
    assert not watch.poll(20.0, EARLY, LATE, None, None)
    assert watch.poll(25.0, EARLY, LATE, None, None) == [
        "[1] failed with ValueError: late; [2-3] go on; Ctrl-C ends them"
    ]


def test_texts_that_differ_in_the_rank_and_consequences_are_said_once() -> None:
    watch = Watch()
    own = [Failure("exception", "ValueError", f"rank {rank} has no data") for rank in range(2)]
    torn = Failure("exception", "RuntimeError", "Connection closed by peer [127.0.0.1]:1234. GLHF")
    watch.poll(10.0, own[0], own[1], torn, None)
    assert watch.poll(11.0, own[0], own[1], torn, None) == [
        "[0-1] failed with ValueError: rank 0 has no data, [2] failed in a collective as a consequence; "
        "[3] goes on; Ctrl-C ends it"
    ]
    assert watch.poll(12.0, torn, torn, torn, None) == []
    alone = Watch()
    alone.poll(10.0, torn, torn, None, None)
    assert "[0-1] failed with RuntimeError: Connection closed" in alone.poll(11.0, torn, torn, None, None)[0]


def test_the_line_of_the_ranks_that_go_on() -> None:
    frame = Frame("<remote cell [5]>", 7, "load", ("    time.sleep(60)",), 7, user=True)
    watch = Watch(Doing((Activity(1, "main", (frame,)),)))
    watch.poll(10.0, EARLY, None, None, None)
    assert watch.poll(11.0, EARLY, None, None, None) == [
        "[0] failed with ValueError: early; [1-3] go on (line 7, in load); Ctrl-C ends them"
    ]


def test_a_cell_that_ends_says_it_in_its_error_only() -> None:
    watch = Watch()
    watch.poll(10.0, EARLY, None, None, None)
    assert not watch.poll(10.0 + FOLD_S, EARLY, EARLY, DONE, EARLY)


def test_consequences_are_no_failures() -> None:
    watch = Watch()
    released, interrupted = Failure("released", "RuntimeError", ""), Failure("interrupted", "KeyboardInterrupt", "")
    assert not watch.poll(10.0, None, released, interrupted, None)
    assert not watch.poll(20.0, None, released, interrupted, None)


def test_a_cell_that_goes_well_asks_the_ranks_nothing() -> None:
    watch = Watch()
    for now in range(100):
        assert not watch.poll(float(now), None, DONE, None, None)
    assert watch.mesh.n_asked == 0


def test_ranks_that_are_about_to_be_released_get_the_time_for_it() -> None:
    watch = Watch(WAITS)
    watch.poll(10.0, None, EARLY, None, None)
    assert not watch.poll(10.0 + FOLD_S, None, EARLY, None, None)
    assert not watch.poll(10.0 + RELEASED_S - 0.1, None, EARLY, None, None)
    assert watch.poll(10.0 + RELEASED_S, None, EARLY, None, None)
    assert watch.mesh.n_asked == 1


def test_ranks_that_do_not_say_what_they_do_delay_the_line_for_a_moment_only() -> None:
    watch = Watch()
    silent: Future[Any] = Future(Future.resolved(None).owner, 1, lambda answers: {})
    watch.mesh.doing = lambda: silent
    watch.poll(10.0, None, EARLY, None, None)
    assert not watch.poll(10.0 + FOLD_S, None, EARLY, None, None)
    assert watch.poll(10.0 + FOLD_S + ANSWER_S, None, EARLY, None, None)
