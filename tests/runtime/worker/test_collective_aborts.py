"""When a rank aborts its process group after an interrupt, by a clock of the test. Pure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.net.wire.codec import Packed, join, load, split
from monarch_kernel.net.wire.messages import GetStacks, Result
from monarch_kernel.runtime.diagnostics.stacks import Collective, Doing
from monarch_kernel.runtime.worker.collective_aborts import ABORT_GRACE_S, COLLECTIVE_GRACE_S, CollectiveAborts
from monarch_kernel.runtime.worker.executor import Executor

REQUEST = 7


class Work:
    """An interrupted request of an executor, in a process with a group.

    Attributes:
        now: the time since the interrupt, in seconds.
        is_raised: whether KeyboardInterrupt was raised.
        waits: whether the code waits in a collective.
        other_waits: whether the code of another executor does.
        messaged_at: when the code has sent or received its last message.
        aborts: when the group was aborted.
    """

    thread_id = 1

    def __init__(self) -> None:
        self.now = 0.0
        self.current = REQUEST
        self.is_raised = False
        self.waits = False
        self.other_waits = False
        self.began_at = 100.0
        self.messaged_at = 0.0
        self.messages = self
        self.aborts: list[float] = []
        self._calls: list[tuple[float, Callable[[], object]]] = []
        rank: Any = SimpleNamespace(group=self, executors=lambda: [self, SimpleNamespace(thread_id=2)])
        self._looks = CollectiveAborts(rank, self._later, self._sleep)

    def interrupt(self, abort: bool = False) -> None:
        executor: Any = self
        self._looks.after_interrupt(executor, REQUEST, abort)

    def leave(self) -> None:
        """End the interrupted request."""
        executor: Any = self
        self._looks.leave(executor)

    def until(self, now: float) -> None:
        """Let time pass."""
        while self._calls and min(self._calls, key=lambda call: call[0])[0] <= now:
            self._calls.sort(key=lambda call: call[0])
            self.now, function = self._calls.pop(0)
            function()
        self.now = now

    @property
    def is_watched(self) -> bool:
        return bool(self._calls)

    def _later(self, after_s: float, function: Callable[..., object], *args: Any) -> None:
        self._calls.append((self.now + after_s, lambda: function(*args)))

    def _sleep(self, for_s: float) -> None:
        self.until(self.now + for_s)

    # -- as an executor, and as a group

    def collectives(self) -> int:
        return 5

    def was_raised(self, id: int) -> bool:
        return self.is_raised

    def waits_s(self, thread: int) -> float:
        return 0.0

    def pending_s(self, others: Collection[int] = ()) -> float:
        return 1e-9 if self.waits or (self.other_waits and 2 not in others) else 0.0

    def since(self, at: float) -> bool:
        return self.messaged_at >= at

    def abort(self) -> None:
        self.aborts.append(self.now)


@pytest.fixture
def work() -> Work:
    return Work()


def test_code_that_waits_in_a_collective_is_freed_after_the_grace(work: Work) -> None:
    work.waits = True
    work.interrupt()
    work.until(60)
    assert work.aborts == [COLLECTIVE_GRACE_S]
    assert not work.is_watched


def test_an_insistent_interrupt_frees_code_even_if_no_wait_is_known(work: Work) -> None:
    work.interrupt(abort=True)
    work.until(60)
    assert work.aborts == [ABORT_GRACE_S]


@pytest.mark.parametrize("after_s", [0.4, 5.0])
def test_code_that_enters_a_collective_before_the_interrupt_is_raised_is_freed(work: Work, after_s: float) -> None:
    """Such as the constructor of DistributedDataParallel, which first imports a part of torch, and so is not interrupted."""
    work.interrupt()
    work.until(after_s)
    assert not work.aborts
    work.waits = True
    work.until(after_s + 2.1 * COLLECTIVE_GRACE_S)
    assert len(work.aborts) == 1


def test_a_collective_of_other_code_is_left_alone(work: Work) -> None:
    """Such as that of a cell, while an actor is interrupted in native code."""
    work.other_waits = True
    work.interrupt()
    work.until(60)
    assert not work.aborts


def test_code_that_has_stopped_is_left_alone(work: Work) -> None:
    work.interrupt()
    work.current, work.waits = REQUEST + 1, True
    work.until(60)
    assert not work.aborts
    assert not work.is_watched


def test_code_that_has_caught_the_interrupt_may_use_collectives_after_the_grace(work: Work) -> None:
    work.is_raised = True
    work.interrupt()
    work.until(2 * COLLECTIVE_GRACE_S)
    work.waits = True
    work.until(60)
    assert not work.aborts
    assert not work.is_watched


def test_a_collective_in_the_cleanup_after_a_late_interrupt_has_the_whole_grace(work: Work) -> None:
    work.interrupt()
    work.until(1.0)
    work.is_raised = work.waits = True
    work.until(1.1 + COLLECTIVE_GRACE_S)
    assert not work.aborts
    work.until(60)
    assert len(work.aborts) == 1
    assert not work.is_watched


def test_a_collective_that_ends_between_two_looks_is_left_alone(work: Work) -> None:
    work.interrupt()
    for turn in range(1, 20):
        work.waits = turn % 2 == 0
        work.until((turn + 0.5) * COLLECTIVE_GRACE_S)
    assert not work.aborts


def test_a_collective_that_was_started_and_left_breaks_the_group(work: Work) -> None:
    """The other ranks have not started it, so that the next one would have another number there."""
    work.waits = True
    work.leave()
    assert work.aborts == [pytest.approx(COLLECTIVE_GRACE_S)]


def test_code_that_has_used_messages_breaks_the_group_at_once(work: Work) -> None:
    """What its peers have sent, and it has not received, would be taken by the next cell."""
    work.messaged_at = work.began_at + 1
    work.leave()
    assert work.aborts == [0]


def test_messages_of_an_earlier_request_do_not_count(work: Work) -> None:
    work.messaged_at = work.began_at - 1
    work.leave()
    assert not work.aborts


def test_a_collective_that_ends_soon_after_it_was_left_keeps_the_group(work: Work) -> None:
    work.waits = True
    work._later(0.1, lambda: setattr(work, "waits", False))
    work.leave()
    assert not work.aborts
    assert work.now < COLLECTIVE_GRACE_S


def test_an_actor_counts_as_interrupted_as_soon_as_its_thread_moves_on() -> None:
    """An asynchronous exception is raised at the next bytecode, so a thread that stays in one native call has not seen it."""
    executor = Executor(SimpleNamespace(driving=None, debugger=None), "actor")  # type: ignore[arg-type]
    places = iter([(1, 2), (1, 2), (1, 4)])
    executor._place = lambda: next(places)  # type: ignore[method-assign]
    executor.interrupt_thread()
    assert [executor.was_raised(REQUEST) for _ in range(2)] == [False, True]


def told(*collectives: Collective) -> Doing:
    """What a rank without running requests says that it does."""
    sent: list[Packed] = []
    group = SimpleNamespace(pending=lambda brief: (collectives, {}), groups=lambda: 0, has_aborted=False)
    rank: Any = SimpleNamespace(
        group=group,
        spec=SimpleNamespace(rank=2),
        activities=lambda: (),
        awaited_calls=SimpleNamespace(describe=lambda: ()),
        loop_ends=SimpleNamespace(values=dict),
        send_answer_now=lambda id, packed: sent.append(packed),
    )
    CollectiveAborts(rank, lambda *args: None).get_stacks(GetStacks(5), ())
    ((message, frames),) = split(join(sent))
    assert isinstance(message, Result)
    doing: Doing = load(message.payload, frames)
    return doing


@pytest.mark.parametrize(
    ("name", "shown"), [(None, "thread meet"), ("loader-0_3", "thread loader"), ("mine", "thread mine")]
)
def test_a_thread_of_the_user_that_waits_has_its_line(name: str | None, shown: str) -> None:
    ready, over = threading.Event(), threading.Event()

    def meet() -> None:
        ready.set()
        over.wait()

    thread = threading.Thread(target=meet, name=name)
    thread.start()
    try:
        assert ready.wait(30)
        barrier = Collective("barrier", 1, thread=thread.ident or 0)
        (found,) = told(barrier, Collective("all_reduce", 2, thread=1)).activities  # there is no thread 1
        assert (found.executor, found.thread) == (shown, thread.ident)
        assert found.user_frame is not None
        assert found.user_frame.function == "meet"
    finally:
        over.set()
        thread.join()
    assert told(barrier).activities == ()
