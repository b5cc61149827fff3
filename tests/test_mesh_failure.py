"""The report that an owner gets about a failure of an actor mesh that it has spawned."""

from __future__ import annotations

import pickle

import pytest

from monarch_kernel.base.mesh import Extent, Point
from monarch_kernel.errors import ActorError, Failure, Frame, MeshFailure

LOST = Failure(
    "lost",
    "RankDied",
    "killed by SIGKILL; it was running workers.step",
    host="node1",
    pid=17,
    last_lines=("step 7", "step 8"),
    signal="SIGKILL",
)
LINE = Frame("train.py", 12, "step", ("def step():", "    x = y / 0", "    return x"), 11, user=True)
RAISED = Failure("exception", "ZeroDivisionError", "division by zero", (LINE,), host="node2", pid=18)


def test_the_report_shows_what_failed_and_where() -> None:
    failure = MeshFailure("workers", {3: RAISED, 1: LOST, 2: LOST})
    assert failure.crashed_ranks == (1, 2, 3)
    assert (failure.signal, failure.exit_code, failure.host) == ("SIGKILL", None, "node1")
    assert failure.last_lines == ("step 7", "step 8")
    assert failure.headline() == "workers[1-3] failed: RankDied: killed by SIGKILL; it was running workers.step"
    assert str(failure) == failure.report()
    assert failure.report().splitlines() == [
        "workers[1-2] failed: RankDied: killed by SIGKILL; it was running workers.step",
        "    on host node1, pid 17",
        "    | step 7",
        "    | step 8",
        "workers[3] failed: ZeroDivisionError: division by zero",
        "    train.py, line 12, in step",
        "    > x = y / 0",
        "    on host node2, pid 18",
    ]


def test_the_report_shows_the_causes() -> None:
    below = MeshFailure("workers", {1: LOST})
    middle = MeshFailure("groups", {0: Failure("exception", "NotHandled", "it did not handle that")}, {0: below})
    failure = MeshFailure("trainer", {2: RAISED}, {2: middle})
    assert failure.cause is middle
    assert failure.root_cause is below
    assert below.root_cause is below
    assert below.cause is None
    assert [line for line in failure.report().splitlines() if not line.startswith(" ")] == [
        "trainer[2] failed: ZeroDivisionError: division by zero",
        "caused by groups[0] failed: NotHandled: it did not handle that",
        "caused by workers[1] failed: RankDied: killed by SIGKILL; it was running workers.step",
    ]


def test_a_common_cause_of_several_ranks_is_reported_once() -> None:
    below = MeshFailure("workers", {1: LOST})
    failure = MeshFailure("trainer", {0: RAISED, 1: RAISED}, {0: below, 1: below})
    assert failure.report().count("caused by") == 1


def test_a_failure_can_be_pickled_and_gives_the_exception() -> None:
    raised = Failure("exception", "ValueError", "no", exception=pickle.dumps(ValueError("no")))
    failure = MeshFailure("workers", {0: raised}, {0: MeshFailure("below", {1: LOST})}, 7)
    assert pickle.loads(pickle.dumps(failure)) == failure
    with pytest.raises(ValueError, match="no"):
        raise failure.exception


def test_an_error_within_an_error_is_indented_and_its_first_line_has_the_place() -> None:
    raised = Failure("exception", "ActorError", "below.f() failed\n[0] ValueError: no", (LINE,), host="node2", pid=18)
    ended = Failure("stopped", "Stopped", "done", host="node1")
    places = Extent({"r": 2})
    error = ActorError("f() failed", {Point(0, places): raised, Point(1, places): ended})
    assert str(error).splitlines() == [
        "f() failed",
        "[0] ActorError: below.f() failed (train.py, line 12)",
        "    [0] ValueError: no",
        "    on host node2, pid 18",
        "    > x = y / 0",
        "[1] Stopped: done",
        "    on host node1",
    ]
