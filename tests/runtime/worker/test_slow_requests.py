"""Tests the description of what an interrupt has not stopped."""

from __future__ import annotations

from monarch_kernel.errors import Failure, Frame
from monarch_kernel.runtime.diagnostics.stacks import Activity, Doing
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.worker.slow_requests import by_rank, goes_on_text

LINE = Frame("<remote cell [2]>", 9, "block", ("time.sleep(s)",), 9, user=True)
LIBRARY = Frame("/usr/lib/python3/site-packages/torch/nn.py", 9, "forward")
SILENT = Failure("interrupted", "CancelledError", "cancelled by the caller")


def future(note: str = "a.block") -> Future[None]:
    return Future(Future.resolved(None).owner, 7, lambda answers: None, note=note, procs=(11, 12, 13))


def at(request: int, *frames: Frame, call: str = "") -> Doing:
    return Doing((Activity(request, "actor a", frames, call),))


def test_a_call_that_has_not_returned() -> None:
    doing = at(7, LINE, call="time.sleep(s)")
    assert goes_on_text(future(), {0: doing, 2: doing}) == (
        "[0,2] go on with a.block until time.sleep(s) returns (cell [2], line 9)"
    )


def test_other_code_has_its_place_only() -> None:
    assert goes_on_text(future(), {1: at(7, LINE, call="i += 1")}) == "[1] goes on with a.block at cell [2], line 9"
    assert goes_on_text(future(), {1: at(7, LIBRARY)}) == "[1] goes on with a.block"


def test_a_rank_that_does_not_answer_and_one_that_works_for_others() -> None:
    assert goes_on_text(future(), {0: SILENT, 1: at(8, LINE)}) == (
        "[0] goes on with a.block, and can't say what it does: native code holds the GIL, or the process is stopped; "
        "[1] goes on with a.block, and waits its turn: the actor is at cell [2], line 9, in block: time.sleep(s)"
    )


def test_processes_are_assigned_to_ranks() -> None:
    doing = at(7, LINE)
    assert by_rank(future(), [13, 11], [doing, SILENT]) == {2: doing, 0: SILENT}
