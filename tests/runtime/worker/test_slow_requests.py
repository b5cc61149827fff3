"""Tests the descriptions of calls that have not returned, and of what an interrupt has not stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from monarch_kernel.errors import Failure, Frame
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.rpc.waits import Wait
from monarch_kernel.runtime.worker.slow_requests import by_rank, goes_on_text, warn_if_slow

LINE = Frame("<remote cell [2]>", 9, "block", ("time.sleep(s)",), 9, user=True)
LIBRARY = Frame("/usr/lib/python3/site-packages/torch/nn.py", 9, "forward")
SILENT = Failure("interrupted", "CancelledError", "cancelled by the caller")


def future(description: str = "a.block") -> Future[None]:
    return Future(Future.resolved(None).owner, 7, lambda answers: None, description=description, procs=(11, 12, 13))


def at(request: int, *frames: Frame, call: str = "") -> Doing:
    return Doing((Activity(request, "actor a", frames, call),))


def test_a_call_that_has_not_returned() -> None:
    doing = at(7, LINE, call="time.sleep(s)")
    assert goes_on_text(future(), {0: doing, 2: doing}) == (
        "[0,2] go on with a.block until time.sleep(s) returns (cell [2], line 9)"
    )


def test_a_coroutine_goes_on_until_it_awaits_something() -> None:
    (activity,) = at(7, LINE, call="sum(rows)").activities
    doing = Doing((replace(activity, is_coroutine=True),))
    assert goes_on_text(future(), {0: doing}) == (
        "[0] goes on with a.block until sum(rows) returns and its code awaits something or ends (cell [2], line 9)"
    )


@pytest.mark.parametrize(
    ("line", "until"),
    [
        ("self.free.wait(60)", " until self.free.wait(60) returns (cell [2], line 9)"),
        ("    x, y = await load(path, n=3)", " until load(path, n=3) returns (cell [2], line 9)"),
        ("x = load(1) + load(2)", " at cell [2], line 9"),
        ("for row in rows:", " at cell [2], line 9"),
    ],
)
def test_a_call_into_a_library_is_named_by_the_users_line(line: str, until: str) -> None:
    doing = at(7, replace(LINE, source=(line,)), LIBRARY, call="waiter.acquire(True, timeout)")
    assert goes_on_text(future(), {0: doing}) == f"[0] goes on with a.block{until}"


def test_other_code_has_its_place_only() -> None:
    assert goes_on_text(future(), {1: at(7, LINE, call="i += 1")}) == "[1] goes on with a.block at cell [2], line 9"
    assert goes_on_text(future(), {1: at(7, LIBRARY)}) == "[1] goes on with a.block"


def test_a_rank_that_does_not_answer_and_one_that_works_for_others() -> None:
    assert goes_on_text(future(), {0: SILENT, 1: at(8, LINE)}) == (
        "[0] goes on with a.block, and did not answer what it does; "
        "[1] goes on with a.block, and waits its turn: the actor is at cell [2], line 9, in block: time.sleep(s)"
    )


def test_an_actor_of_a_library_is_at_the_line_that_its_own_code_has_called() -> None:
    assert goes_on_text(future(), {0: at(8, LIBRARY, replace(LIBRARY, line=77))}) == (
        "[0] goes on with a.block, and waits its turn: the actor is at torch/nn.py, line 9, in forward"
    )
    assert "the actor is at code without a Python frame" in goes_on_text(future(), {0: at(8)})


def test_processes_are_assigned_to_ranks() -> None:
    doing = at(7, LINE)
    assert by_rank(future(), [13, 11], [doing, SILENT]) == {2: doing, 0: SILENT}


class Asked:
    """Stands for the client of a process whose ranks do what the test says."""

    def __init__(self, *doing: Doing) -> None:
        self.doing = dict(zip((11, 12, 13), doing, strict=True))
        self.asked = 0

    def submit(self, do: Callable[[], object]) -> None:
        do()

    def waiting_for(self, id: int) -> tuple[int, ...]:
        return (11, 12)

    def ask(self, procs: Sequence[int], message: object, read: object) -> Future[list[Doing]]:
        self.asked += 1
        return Future.resolved([self.doing[proc] for proc in procs])


IN_SUM = Doing(
    (Activity(7, "actor a", (LINE,), thread=1),),
    (Collective("all_reduce", 3, "", (0, 1, 2), "4", 9.5, 1),),
    {"": 3},
    rank=0,
)


def slow_wait() -> Wait:
    return Wait(future(), lambda: None, warn_after_s=60.0)


def test_a_call_that_waits_in_a_collective_is_shown_after_ten_seconds() -> None:
    wait, client = slow_wait(), Asked(IN_SUM, replace(at(7, LINE), rank=1), Doing(rank=2))
    assert warn_if_slow(cast(Any, client), wait) == 10.0
    wait.lasts_s = 10.0
    warn_if_slow(cast(Any, client), wait)
    assert wait.news == (
        "a.block: no answer for 10 s from [0-1] of 3\n"
        "  [0-1] cell [2], line 9, in block: time.sleep(s)\n"
        "  [0] waits for 9.5 s in all_reduce #3 (shape 4), actor a: cell [2], line 9; "
        "[1] has not started it: actor a: cell [2], line 9, in block: time.sleep(s); [2] has finished the call"
    )
    assert warn_if_slow(cast(Any, client), wait) is None  # once


def test_a_transfer_for_which_no_process_has_a_request_is_shown_after_a_minute() -> None:
    transfer: Future[None] = Future(
        Future.resolved(None).owner, 0, lambda answers: None, description="a transfer with a buffer", procs=(11,)
    )
    wait, client = Wait(transfer, lambda: None, warn_after_s=60.0), Asked(*[Doing()] * 3)
    wait.lasts_s = 10.0
    assert warn_if_slow(cast(Any, client), wait) == 50.0
    wait.lasts_s = 60.0
    assert warn_if_slow(cast(Any, client), wait) is None
    assert (wait.news, client.asked) == ("a transfer with a buffer: it has not ended for 60 s", 0)


def test_a_call_that_waits_in_no_collective_is_shown_after_a_minute() -> None:
    wait, client = slow_wait(), Asked(*(replace(at(7, LINE), rank=rank) for rank in range(3)))
    wait.lasts_s = 10.0
    assert warn_if_slow(cast(Any, client), wait) == 50.0
    assert warn_if_slow(cast(Any, client), wait) == 50.0
    assert (wait.news, client.asked) == ("", 1)
    wait.lasts_s = 60.0
    assert warn_if_slow(cast(Any, client), wait) is None
    assert wait.news.startswith("a.block: no answer for 60 s from [0-1] of 3")
