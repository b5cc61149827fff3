"""Tests what an interrupted wait says: which collectives it waited in, what has stopped, and what goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from monarch_kernel.errors import Failure, Frame, MeshDownError
from monarch_kernel.runtime.controller import interrupt_effects
from monarch_kernel.runtime.diagnostics.stacks import IN_POOL, Activity, Collective, Doing
from monarch_kernel.runtime.rpc.future import Future

PROCS = (11, 12, 13)
LINE = Frame("<remote cell [2]>", 9, "step", ("dist.all_reduce(x)",), 9, user=True)
STOPPED = "the wait for a.step was interrupted, and so is what the ranks run for it"
WAITED = (
    "  [0-1] waited for 9.5 s in all_reduce #3 (shape 4), actor a: cell [2], line 9; [2] had finished the call; "
    "[3] was not in the call"
)


def in_sum(rank: int, age_s: float = 9.5) -> Doing:
    activity = Activity(7, "actor a", (LINE,), "dist.all_reduce(x)", thread=1)
    return Doing((activity,), (Collective("all_reduce", 3, "", (0, 1, 2, 3), "4", age_s, 1),), {"": 3}, rank=rank)


class Ranks:
    """Stands for the client of processes that do what the test says, and its own futures.

    Args:
        doing: what each process does.
        stops: whether the interrupt ends the work.
        silent: the processes that never say what they do.
    """

    def __init__(self, *doing: Doing, stops: bool = True, silent: Sequence[int] = ()) -> None:
        self.doing = dict(zip(PROCS, doing, strict=True))
        self.stops = stops
        self.silent = silent
        self.left: tuple[Activity, ...] = ()
        self.said: list[str] = []
        self.future: Future[None] = Future(
            Future.resolved(None).owner, 7, lambda answers: None, description="a.step", procs=PROCS
        )

    def owing(self, future: object) -> Sequence[int]:
        return PROCS[:2]

    def ask(self, procs: Sequence[int], message: object, read: object) -> Any:
        self.said.append("asked")
        gone = Failure("interrupted", "CancelledError", "cancelled by the caller")
        doing = dict.fromkeys(procs, Doing(self.left)) if "interrupted" in self.said and self.stops else self.doing
        return Future.resolved([gone if proc in self.silent else doing[proc] for proc in procs])

    def wait(self, waiter: object, timeout_s: float | None) -> bool:
        return self.future.done()

    def interrupt(self) -> None:
        self.said.append("interrupted")
        if self.stops:
            self.future.resolve((), True)

    def effect(self, waiting_for: Callable[[object], Sequence[int]] | None = None) -> str:
        client: Any = self
        return interrupt_effects.interrupt_work(client, [self.future], waiting_for or self.owing, self.interrupt)


def test_the_collective_in_which_a_call_waited_is_named_with_the_ranks_that_were_missing() -> None:
    ranks = Ranks(in_sum(0), in_sum(1), Doing(reached={"": 2}, rank=2))
    assert ranks.effect() == f"{STOPPED}\n{WAITED}"
    assert ranks.said == ["asked", "interrupted", "asked"]  # afterwards no rank waits any longer


def test_a_call_that_goes_on_is_named_before_what_it_waited_in() -> None:
    ranks = Ranks(in_sum(0), in_sum(1), Doing(reached={"": 2}, rank=2), stops=False)
    going_on = "[0-1] go on with a.step until dist.all_reduce(x) returns (cell [2], line 9)"
    assert ranks.effect() == f"the wait for a.step was interrupted; {going_on}\n{WAITED}"


def test_what_a_call_has_left_in_a_thread_pool_is_named() -> None:
    ranks = Ranks(in_sum(0, 0.5), in_sum(1, 0.5), Doing(rank=2), silent=PROCS[:1])
    leaving, other = Activity(7, "actor a"), Activity(8, "actor a", (LINE,))
    ranks.left = (leaving, Activity(7, f"actor a{IN_POOL}", (LINE,), "time.sleep(s)"), other)
    assert ranks.effect() == (
        "the wait for a.step was interrupted; "
        "[1-2] go on with a.step until time.sleep(s) returns (cell [2], line 9, in a thread of a pool)"
    )


def test_work_in_a_thread_pool_that_stops_directly_after_the_call_does_not_go_on() -> None:
    """Such as a collective, which the abort of its process group ends at the same time as the call."""

    class Stopping(Ranks):
        def ask(self, procs: Sequence[int], message: object, read: object) -> Any:
            answers = super().ask(procs, message, read)
            if "interrupted" in self.said:
                self.left = ()
            return answers

    ranks = Stopping(in_sum(0, 0.5), in_sum(1, 0.5), Doing(rank=2))
    ranks.left = (Activity(7, f"actor a{IN_POOL}", (LINE,)),)
    assert ranks.effect() == STOPPED


def test_a_call_that_has_answered_does_not_go_on_where_a_rank_is_about_to_leave_it() -> None:
    ranks = Ranks(in_sum(0, 0.5), in_sum(1, 0.5), Doing(rank=2))
    ranks.left = (Activity(7, "actor a", (LINE,), "time.sleep(s)"),)
    assert ranks.effect() == STOPPED


@pytest.mark.parametrize("stopped", [PROCS, PROCS[:1]])
def test_ranks_that_stop_while_they_are_asked_do_not_go_on(stopped: Sequence[int]) -> None:
    class Late(Ranks):
        """Its processes stop when they are asked what goes on."""

        owed: Sequence[int] = PROCS[:2]

        def owing(self, future: object) -> Sequence[int]:
            return self.owed

        def ask(self, procs: Sequence[int], message: object, read: object) -> Any:
            if "interrupted" in self.said:
                self.owed = [proc for proc in self.owed if proc not in stopped]
                if not self.owed:
                    self.future.resolve((), True)
                    self.doing = dict.fromkeys(PROCS, Doing())
            return super().ask(procs, message, read)

    ranks = Late(in_sum(0, 0.5), in_sum(1, 0.5), Doing(rank=2), stops=False)
    goes_on = "[1] goes on with a.step until dist.all_reduce(x) returns (cell [2], line 9)"
    assert ranks.effect() == (STOPPED if stopped == PROCS else f"the wait for a.step was interrupted; {goes_on}")


def test_short_waits_and_ranks_that_do_not_say_where_they_are_are_left_out() -> None:
    assert Ranks(in_sum(0, 0.5), in_sum(1, 0.5), Doing(rank=2)).effect() == STOPPED
    assert Ranks(in_sum(0), in_sum(1), Doing(rank=2), silent=PROCS[:1]).effect() == STOPPED


def test_ranks_that_say_what_they_do_after_the_others_have_stopped_are_waited_for() -> None:
    class Late(Ranks):
        """Its processes answer when something waits for their answer."""

        client = None
        looking: ClassVar[list[Future[Any]]] = []

        def ask(self, procs: Sequence[int], message: object, read: object) -> Any:
            said = super().ask(procs, message, read).get()
            self.looking.append(Future(self, 8, lambda answers: said))
            return self.looking[-1]

        def wait(self, waiter: Any, timeout_s: float | None) -> bool:
            if not waiter.ready:
                for looking in self.looking:
                    looking.resolve((), True)
            return True

        def attend(self, future: object) -> None: ...

        def on_slow_wait(self, wait: object) -> None: ...

    ranks = Late(in_sum(0), in_sum(1), Doing(reached={"": 2}, rank=2))
    ranks.future.resolve((), True)  # it needs no wait
    assert ranks.effect() == f"{STOPPED}\n{WAITED}"


def test_ranks_of_two_meshes_are_not_taken_for_one_another() -> None:
    assert Ranks(in_sum(0), in_sum(1), Doing(rank=0)).effect() == STOPPED


def test_nothing_is_claimed_of_a_wait_for_which_no_rank_has_a_request() -> None:
    ranks = Ranks(in_sum(0), in_sum(1), Doing(rank=2), stops=False)
    assert ranks.effect(lambda future: ()) == "the wait was interrupted; what it waited for may go on"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MeshDownError("the session was shut down")])
def test_the_ranks_are_interrupted_whatever_happens_before(error: Any) -> None:
    def fails(future: object) -> Sequence[int]:
        raise error

    ranks = Ranks(in_sum(0), in_sum(1), Doing(rank=2))
    assert ranks.effect(fails) == ""
    assert ranks.said == ["interrupted"]
