"""Cancellation and timeouts: a cancel reaches running code wherever it waits; a timeout alone does not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    Future,
    ProcMesh,
    concurrent_endpoint,
    context,
    endpoint,
    this_proc,
)
from tests.support.actors import Counter, main_thread_waits_for_a_future
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_for_files, wait_until

PROCS = {"r": 3}


class Sleeper(Actor):
    """Waits, and records what ended the wait."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, folder: str) -> None:
        Path(folder, f"{context().actor_instance.name}-{context().actor_instance.rank.rank}").touch()

    @endpoint
    def sleep(self, folder: str) -> None:
        try:
            self.note(folder)  # in here, as an interrupt may come as soon as the file is there
            while True:
                time.sleep(0.001)
        except BaseException as error:
            self.seen.append(type(error).__name__)
            raise
        finally:
            self.seen.append("left")

    @endpoint
    def ask(self, other: Any, folder: str) -> Any:
        try:
            self.note(folder)  # in here, as an interrupt may come as soon as the file is there
            return other.sleep.call_one(folder).get()
        except BaseException as error:
            self.seen.append("KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
            raise

    @endpoint
    def stubborn(self, folder: str) -> str:
        try:
            self.note(folder)  # in here, as an interrupt may come as soon as the file is there
            while True:
                time.sleep(0.001)
        except KeyboardInterrupt:
            return "as you wish"

    @endpoint
    def look(self) -> list[str]:
        return self.seen

    @endpoint
    def rank(self) -> int:
        self.seen.append("asked")
        return context().actor_instance.rank.rank


class AsyncSleeper(Sleeper):
    """The same, asynchronous."""

    @endpoint
    async def sleep(self, folder: str) -> None:
        self.note(folder)
        try:
            await asyncio.sleep(1000)
        except BaseException as error:
            self.seen.append(type(error).__name__)
            raise
        finally:
            self.seen.append("left")

    @endpoint
    async def ask(self, other: Any, folder: str) -> Any:
        self.note(folder)
        try:
            return await other.sleep.call_one(folder)
        except BaseException as error:
            self.seen.append(type(error).__name__)
            raise

    @endpoint
    async def stubborn(self, folder: str) -> str:
        self.note(folder)
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            return "as you wish"
        return ""

    @endpoint
    async def look(self) -> list[str]:
        return self.seen

    @endpoint
    async def rank(self) -> int:
        self.seen.append("asked")
        return context().actor_instance.rank.rank


class Overlapping(AsyncSleeper):
    """The same, with calls that overlap."""

    @concurrent_endpoint
    async def sleep(self, folder: str) -> None:
        await AsyncSleeper.sleep.function(self, folder)  # type: ignore[attr-defined]


every = pytest.mark.parametrize("kind", [Sleeper, AsyncSleeper, Overlapping])
both = pytest.mark.parametrize("kind", [Sleeper, AsyncSleeper])
RAISED = {Sleeper: "KeyboardInterrupt", AsyncSleeper: "CancelledError", Overlapping: "CancelledError"}


def ended(future: Future[Any]) -> ActorError:
    """The error of a call that was cancelled."""
    assert future.wait(LONG_S)
    error = future.exception(0)
    assert isinstance(error, ActorError)
    assert {report.kind for report in error.reports.values()} == {"interrupted"}
    return error


@every
def test_a_cancel_reaches_the_endpoint_and_the_actor_lives(
    procs: ProcMesh, kind: type[Sleeper], tmp_path: Path, bar: Bar
) -> None:
    sleeper = procs.spawn("sleeper", kind)
    future = sleeper.sleep.call(str(tmp_path))
    wait_for_files(tmp_path, *(f"sleeper-{rank}" for rank in range(3)))
    with bar.below(1.0, "a cancel"):
        future.cancel()
        assert "cancelled by the caller" in str(ended(future))
    assert sleeper.look.call().get(LONG_S).values() == ([RAISED[kind], "left"],) * 3
    future.cancel()  # no effect
    assert sleeper.rank.call().get(LONG_S).values() == (0, 1, 2)


@both
def test_a_cancelled_queued_call_never_starts(procs: ProcMesh, kind: type[Sleeper], tmp_path: Path) -> None:
    sleeper = procs.slice(r=0).spawn("sleeper", kind)
    running, waiting = sleeper.sleep.call_one(str(tmp_path)), sleeper.rank.call_one()
    wait_for_files(tmp_path, "sleeper-0")
    waiting.cancel()
    ended(waiting)
    running.cancel()
    ended(running)
    assert sleeper.look.call_one().get(LONG_S) == [RAISED[kind], "left"]


@both
def test_a_cancel_after_the_answer_has_no_effect(procs: ProcMesh, kind: type[Sleeper]) -> None:
    sleeper = procs.spawn("sleeper", kind)
    future = sleeper.rank.call()
    assert future.wait(LONG_S)
    future.cancel()
    assert future.get(0).values() == (0, 1, 2)
    assert sleeper.look.call().get(LONG_S).values() == (["asked"],) * 3


@both
def test_ranks_that_have_answered_keep_their_results(procs: ProcMesh, kind: type[Sleeper], tmp_path: Path) -> None:
    sleeper = procs.spawn("sleeper", kind)
    busy = sleeper.slice(r=1).sleep.call_one(str(tmp_path))
    wait_for_files(tmp_path, "sleeper-1")
    future = sleeper.rank.call()
    for rank in (0, 2):
        sleeper.slice(r=rank).look.call_one().get(LONG_S)
    future.cancel()
    error = ended(future)
    assert error.ranks == (1,)
    assert {point.rank: value for point, value in error.results.items()} == {0: 0, 2: 2}
    busy.cancel()
    assert sleeper.slice(r=1).look.call_one().get(LONG_S) == [RAISED[kind], "left"]


@every
def test_a_timeout_alone_does_not_affect_the_endpoint(procs: ProcMesh, kind: type[Sleeper], tmp_path: Path) -> None:
    sleeper = procs.slice(r=0).spawn("sleeper", kind)
    future = sleeper.sleep.call_one(str(tmp_path))
    for wait in (future.get, future.exception):
        with pytest.raises(TimeoutError, match="the request goes on"):
            wait(0.05)
    assert not future.wait(0.05)
    assert not future.done()
    if kind is Overlapping:
        assert sleeper.look.call_one().get(LONG_S) == []
    wait_for_files(tmp_path, "sleeper-0")
    future.cancel()
    assert sleeper.look.call_one().get(LONG_S) == [RAISED[kind], "left"]


@pytest.mark.parametrize("where", ["another rank", "the same rank", "the controller"])
@pytest.mark.parametrize("asked", [Sleeper, AsyncSleeper, Overlapping])
@pytest.mark.parametrize("asking", [Sleeper, AsyncSleeper])
def test_a_cancel_is_passed_to_the_actors_that_an_endpoint_calls(
    procs: ProcMesh, asking: type[Sleeper], asked: type[Sleeper], where: str, tmp_path: Path
) -> None:
    place = {"another rank": procs.slice(r=1), "the same rank": procs.slice(r=0), "the controller": this_proc()}[where]
    first, second = procs.slice(r=0).spawn("first", asking), place.spawn("second", asked)
    future = first.ask.call_one(second, str(tmp_path))
    wait_for_files(tmp_path, "first-0", "second-0")
    future.cancel()
    ended(future)
    assert first.look.call_one().get(LONG_S) == [RAISED[asking]]
    expected = [RAISED[asked], "left"]
    if asked is Overlapping:  # the cancel takes a different path than this request, and may arrive later
        wait_until(lambda: second.look.call_one().get(LONG_S) == expected, "the cancel")
    assert second.look.call_one().get(LONG_S) == expected
    second.stop().get(LONG_S)


@both
def test_an_endpoint_can_answer_after_an_interrupt_or_a_cancel(
    procs: ProcMesh, kind: type[Sleeper], tmp_path: Path
) -> None:
    sleeper = procs.slice(r=0).spawn("sleeper", kind)
    interrupted, cancelled = sleeper.stubborn.call_one(str(tmp_path)), None
    wait_for_files(tmp_path, "sleeper-0")
    interrupted.interrupt()
    assert interrupted.get(LONG_S) == "as you wish"  # the caller waits after an interrupt, not after a cancel
    (tmp_path / "sleeper-0").unlink()
    cancelled = sleeper.stubborn.call_one(str(tmp_path))
    wait_for_files(tmp_path, "sleeper-0")
    cancelled.cancel()
    ended(cancelled)
    assert sleeper.rank.call_one().get(LONG_S) == 0


@every
def test_a_task_that_is_cancelled_cancels_what_it_awaits(procs: ProcMesh, kind: type[Sleeper], tmp_path: Path) -> None:
    sleeper = procs.slice(r=0).spawn("sleeper", kind)

    async def wait() -> None:
        for count, wrap in enumerate((lambda future: future, lambda future: future.as_asyncio()), 1):
            task = asyncio.ensure_future(wrap(sleeper.sleep.call_one(str(tmp_path))))
            await asyncio.sleep(0)  # the task starts: one that is cancelled before never awaits the call
            while not (tmp_path / "sleeper-0").exists():
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            deadline = time.monotonic() + LONG_S
            while await sleeper.look.call_one() != [RAISED[kind], "left"] * count:  # the loop sends it a moment later
                assert time.monotonic() < deadline
            (tmp_path / "sleeper-0").unlink()

    asyncio.run(wait())


@every
def test_a_shield_keeps_a_timeout_of_asyncio_from_the_ranks(
    procs: ProcMesh, kind: type[Sleeper], tmp_path: Path
) -> None:
    sleeper = procs.slice(r=0).spawn("sleeper", kind)
    future = sleeper.sleep.call_one(str(tmp_path))

    async def wait() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(future.as_asyncio()), 0.05)

    asyncio.run(wait())
    assert not future.done()
    wait_for_files(tmp_path, "sleeper-0")
    future.cancel()
    assert sleeper.look.call_one().get(LONG_S) == [RAISED[kind], "left"]


def test_a_future_may_be_cancelled_by_another_thread(procs: ProcMesh, tmp_path: Path) -> None:
    sleeper = procs.slice(r=0).spawn("sleeper", Sleeper)
    future = sleeper.sleep.call_one(str(tmp_path))
    wait_for_files(tmp_path, "sleeper-0")

    def cancel() -> None:
        wait_until(main_thread_waits_for_a_future, "the main thread to wait")
        future.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(ActorError, match="cancelled by the caller"):
        future.get(LONG_S)
    thread.join()


@every
def test_many_cancels_at_random_moments_do_not_harm_the_actor(
    procs: ProcMesh, kind: type[Sleeper], tmp_path: Path
) -> None:
    sleeper = procs.spawn("sleeper", kind)
    gaps: list[Callable[[], object]] = [lambda: None, lambda: time.sleep(0), lambda: time.sleep(0.001)]
    for i in range(120):
        future = sleeper.sleep.call(str(tmp_path)) if i % 2 else sleeper.rank.call()
        gaps[i % 3]()
        future.cancel()
        assert future.wait(LONG_S)
    for seen in sleeper.look.call().get(LONG_S).values():
        assert set(seen) <= {RAISED[kind], "left", "asked"}
        assert seen.count(RAISED[kind]) == seen.count("left")


def test_a_cancel_of_a_waiting_endpoint_loses_no_message_for_other_actors(procs: ProcMesh, tmp_path: Path) -> None:
    """A waiting endpoint drives the transport of its process, so it also receives messages for other actors."""
    one, two = procs.slice(r=0), procs.slice(r=1)
    asks, sleeper, counter = one.spawn("asks", Sleeper), two.spawn("sleeper", Sleeper), one.spawn("counter", Counter)
    for round in range(1, 41):
        future = asks.ask.call_one(sleeper, str(tmp_path))
        for name in ("asks-0", "sleeper-0"):  # a cancel between the call and its wait leaves the call alone
            wait_for_files(tmp_path, name)
            (tmp_path / name).unlink()
        for _ in range(3):
            counter.add.broadcast()
        future.cancel()
        for _ in range(7):
            counter.add.broadcast()
        assert counter.value.call_one().get(LONG_S) == 10 * round
        assert isinstance(asks.rank.call_one().get(LONG_S), int)
        assert isinstance(sleeper.rank.call_one().get(LONG_S), int)
    for mesh in (asks, sleeper, counter):
        mesh.stop().get(LONG_S)
