"""Deadlocks: actors that wait for each other in a cycle get an error where they wait; all other waits go on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    ProcMesh,
    concurrent_endpoint,
    context,
    endpoint,
    this_proc,
)
from monarch_kernel.errors import DeadlockError
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_for_files, wait_until

PROCS = {"r": 3}

SOON_S = 10.0
"""The time limit for a cycle to become an error; it takes a quarter of a second on an idle machine."""


class Sync(Actor):
    """Calls other actors, and waits."""

    @endpoint
    def go(self, *way: Any) -> Any:
        """Call the first actor, which goes on with the rest."""
        return way[0].go.call(*way[1:]).get().values() if way else "the end"

    @endpoint
    def go_within(self, seconds: float, *way: Any) -> str:
        try:
            way[0].go.call(*way[1:]).get(seconds)
        except TimeoutError:
            return "timeout"
        return "the end"

    @endpoint
    def catch(self, back: Any) -> str:
        """Wait twice for an actor that waits for this one, and catch the errors."""
        cycles = []
        future = back.go.call_one()
        for _ in range(2):
            try:
                future.get()
            except DeadlockError as error:
                cycles.append(error.circle)
        assert not future.done()
        return " and ".join(cycles)

    @endpoint
    def ask_one_that_catches(self, other: Any, back: Any, pause_s: float) -> str:
        future = other.catch.call_one(back)
        time.sleep(pause_s)
        while True:
            with contextlib.suppress(DeadlockError):
                return future.get()  # type: ignore[no-any-return]

    @endpoint
    def wait_for(self, path: str, *way: Any) -> Any:
        """Create a file, wait until another one exists, and go on."""
        Path(f"{path} awaited").touch()
        wait_until(Path(path).exists, path)
        return way[0].go.call(*way[1:]).get().values() if way else None

    @endpoint
    def begin(self, path: str, *way: Any) -> Any:
        """Create a file, and go on."""
        Path(path).touch()
        return way[0].go.call(*way[1:]).get().values()

    @endpoint
    def broadcast_to(self, other: Any, *way: Any) -> None:
        other.go.broadcast(*way)

    @endpoint
    def to_next(self, line: Any, folder: str) -> Any:
        """Call the next actor when all of them run."""
        me = context().actor_instance.rank.rank
        Path(folder, str(me)).touch()
        wait_for_files(Path(folder), *map(str, range(len(line))))
        return line.slice(rank=(me + 1) % len(line)).go.call_one().get()


class Async(Actor):
    """The same on an event loop."""

    @endpoint
    async def go(self, *way: Any) -> Any:
        return (await way[0].go.call(*way[1:])).values() if way else "the end"

    @endpoint
    async def gather(self, *others: Any, back: Any) -> Any:
        """Wait for several actors; the last one calls back."""
        futures = [other.go.call() for other in others[:-1]] + [others[-1].go.call(back)]
        return await asyncio.gather(*futures)

    @endpoint
    async def first(self, *others: Any, back: Any) -> int:
        """Wait for the first of several calls, and return how many of them have ended after a second."""
        futures = [asyncio.ensure_future(other.go.call(back)) for other in others]
        done, _ = await asyncio.wait(
            [*futures, asyncio.ensure_future(asyncio.sleep(1.0))], return_when="FIRST_COMPLETED"
        )
        return len(done.intersection(futures))

    @endpoint
    async def go_within(self, seconds: float, *way: Any) -> str:
        try:
            await asyncio.wait_for(way[0].go.call(*way[1:]), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return "timeout"
        return "the end"

    @endpoint
    async def block(self, *way: Any) -> Any:
        return way[0].go.call(*way[1:]).get().values()

    @endpoint
    async def watched(self, other: Any, back: Any) -> str:
        """Wait for a call and for a user's watchdog."""
        try:
            await asyncio.gather(other.go.call(back), self._bark())
        except TimeoutError:
            return "barked"
        return "the end"

    async def _bark(self) -> None:
        await asyncio.sleep(1.0)
        raise TimeoutError


class Passing(Actor):
    """Passes on its response port, and waits for an actor that waits for the answer."""

    @endpoint(explicit_response_port=True)
    def go(self, port: Any, other: Any, back: Any) -> None:
        other.late.broadcast(port)
        back.go.call_one().get()


class PassingAsync(Actor):
    """The same on an event loop."""

    @endpoint(explicit_response_port=True)
    async def go(self, port: Any, other: Any, back: Any) -> None:
        other.late.broadcast(port)
        await back.go.call_one()


class Late(Actor):
    """Answers through the port of another actor."""

    @endpoint
    def late(self, port: Any) -> None:
        time.sleep(0.7)  # longer than the deadlock detector takes
        port.send("late")


class Overlapping(Actor):
    """Answers while it waits."""

    @concurrent_endpoint
    async def go(self, *way: Any) -> Any:
        return (await way[0].go.call(*way[1:])).values() if way else "the end"


@pytest.fixture
def spawn(procs: ProcMesh) -> Iterator[Callable[..., Any]]:
    """Spawn actors on one rank each, and stop them after the test."""
    made: list[Any] = []

    def spawn(name: str, cls: type[Actor], rank: int) -> Any:
        made.append(procs.slice(r=rank).spawn(name, cls))
        return made[-1]

    yield spawn
    for mesh in made:
        mesh.stop().get(LONG_S)


def cycle_of(error: BaseException | None) -> str:
    """Return the cycle in the error of a call, which may have passed through several calls."""
    assert isinstance(error, ActorError), error
    cause: BaseException = error
    while isinstance(cause, ActorError):
        cause = cause.exception
    assert isinstance(cause, DeadlockError), cause
    return cause.circle


@pytest.mark.parametrize("kind", [Sync, Async])
def test_two_actors_that_call_each_other_get_an_error(spawn: Any, kind: type[Actor], bar: Bar) -> None:
    a, b = spawn("a", kind, 0), spawn("b", kind, 1)
    with bar.below(SOON_S, "the error"):
        error = a.go.call_one(b, a).exception(LONG_S)
    assert cycle_of(error) in (
        "a.go on t[0] -> b.go on t[1] -> a.go on t[0] (behind a.go)",
        "b.go on t[1] -> a.go on t[0] (behind a.go) -> b.go on t[1]",
    )
    assert "calls wait for each other" in str(error)
    assert a.go.call_one(b).get(LONG_S) == ("the end",)  # the actors go on as before


@pytest.mark.parametrize("kind", [Sync, Async])
def test_an_actor_that_calls_itself_gets_an_error(spawn: Any, kind: type[Actor]) -> None:
    a = spawn("a", kind, 2)
    error = a.go.call_one(a).exception(LONG_S)
    assert cycle_of(error) == "a.go on t[2] -> a.go on t[2] (behind a.go)"


def test_a_cycle_through_several_processes_and_kinds_is_found(spawn: Any) -> None:
    a, b, c = spawn("a", Sync, 0), spawn("b", Async, 1), spawn("c", Sync, 2)
    assert cycle_of(a.go.call_one(b, c, a).exception(LONG_S)).count(" -> ") == 3
    assert a.go.call_one(b, c).get(LONG_S) == (("the end",),)


def test_a_cycle_within_one_process_is_found(spawn: Any) -> None:
    a, b = spawn("a", Sync, 0), spawn("b", Sync, 0)
    assert cycle_of(a.go.call_one(b, a).exception(LONG_S)).count("t[0]") == 3


def test_a_cycle_through_the_controllers_process_is_found(spawn: Any) -> None:
    a, here = spawn("a", Sync, 0), this_proc().spawn("here", Sync)
    for way in ((a, (here, a)), (here, (a, here))):
        cycle = cycle_of(way[0].go.call_one(*way[1]).exception(LONG_S))
        assert "here.go on the controller" in cycle
        assert "a.go on t[0]" in cycle
    here.stop().get(LONG_S)


def test_a_call_queued_behind_another_call_is_part_of_the_cycle(spawn: Any, tmp_path: Path) -> None:
    """The call from ``a`` is queued at ``b`` behind a call that starts to wait for ``a`` later.

    The call that waits last gets the error, or the other one if its search for a cycle runs only then.
    """
    a, b = spawn("a", Sync, 0), spawn("b", Sync, 1)
    later = b.wait_for.call_one(str(tmp_path / "go"), a)
    wait_for_files(tmp_path, "go awaited")
    first = a.begin.call_one(str(tmp_path / "a runs"), b)
    wait_for_files(tmp_path, "a runs")
    with pytest.raises(TimeoutError):
        first.get(0.5)  # longer than the deadlock detector takes; there is no cycle yet
    (tmp_path / "go").touch()
    failed, succeeded = (later, first) if later.exception(LONG_S) else (first, later)
    assert cycle_of(failed.exception(LONG_S)) in (
        "b.wait_for on t[1] -> a.go on t[0] (behind a.begin) -> b.go on t[1] (behind b.wait_for)",
        "a.begin on t[0] -> b.go on t[1] (behind b.wait_for) -> a.go on t[0] (behind a.begin)",
    )
    assert succeeded.get(LONG_S) == ("the end",)


def test_a_cycle_of_a_whole_mesh_is_found(procs: ProcMesh, tmp_path: Path) -> None:
    ring: Any = procs.spawn("ring", Sync)
    line = ring.rename(r="rank")
    error = line.to_next.call(line, str(tmp_path)).exception(LONG_S)
    assert "ring.to_next on t[" in cycle_of(error)
    assert line.slice(rank=0).go.call_one().get(LONG_S) == "the end"
    ring.stop().get(LONG_S)


def test_a_call_of_several_actors_is_part_of_a_cycle_if_one_of_them_is(procs: ProcMesh, spawn: Any) -> None:
    a, many = spawn("a", Sync, 0), procs.spawn("many", Sync)
    assert "many.go on t[" in cycle_of(a.go.call_one(many, a).exception(LONG_S))
    many.stop().get(LONG_S)  # type: ignore[attr-defined]


def test_a_broadcast_that_waits_can_be_part_of_a_cycle(spawn: Any) -> None:
    a, b = spawn("a", Sync, 0), spawn("b", Sync, 1)
    a.broadcast_to.call_one(b, a, b).get(LONG_S)  # b waits for a, and a waits for b
    wait_until(lambda: b.go.call_one().exception(LONG_S), "the end of b: an exception without a reply ends it")
    assert "calls wait for each other" in str(b.go.call_one().exception(LONG_S))


def test_a_call_that_waits_for_a_cycle_is_not_part_of_it(spawn: Any) -> None:
    a, b, c = spawn("a", Sync, 0), spawn("b", Sync, 1), spawn("c", Sync, 2)
    assert "c." not in cycle_of(c.go.call_one(a, b, a).exception(LONG_S))


# -- async


def test_waiting_for_all_of_several_is_waiting_for_each(spawn: Any) -> None:
    a, b, c = spawn("a", Async, 0), spawn("b", Sync, 1), spawn("c", Sync, 2)
    assert "c.go on t[2]" in cycle_of(a.gather.call_one(b, c, back=a).exception(LONG_S))


def test_waiting_for_the_first_of_several_is_not_a_cycle(spawn: Any) -> None:
    a, b, c = spawn("a", Async, 0), spawn("b", Async, 1), spawn("c", Async, 2)
    assert a.first.call_one(b, c, back=a).get(LONG_S) == 0


def test_a_blocked_event_loop_can_be_part_of_a_cycle(spawn: Any) -> None:
    a, b = spawn("a", Async, 0), spawn("b", Async, 1)
    assert "a.block" in cycle_of(a.block.call_one(b, a).exception(LONG_S))


def test_concurrent_endpoints_make_no_cycle(spawn: Any) -> None:
    a, b = spawn("a", Overlapping, 0), spawn("b", Sync, 1)
    assert a.go.call_one(b, a).get(LONG_S) == (("the end",),)
    c = spawn("c", Overlapping, 2)
    assert "b.go" in cycle_of(c.go.call_one(b, c, b).exception(LONG_S))


# -- waits without a cycle


@pytest.mark.parametrize("kind", [Sync, Async])
def test_a_wait_with_a_timeout_is_not_a_deadlock(spawn: Any, kind: type[Actor], bar: Bar) -> None:
    a, b = spawn("a", kind, 0), spawn("b", kind, 1)
    begin_s = time.perf_counter()
    assert a.go_within.call_one(0.7, b, a).get(LONG_S) == "timeout"
    bar.check_above(time.perf_counter() - begin_s, 0.699, "the wait")


def test_a_wait_gathered_with_a_watchdog_is_not_a_deadlock(spawn: Any) -> None:
    a, b = spawn("a", Async, 0), spawn("b", Async, 1)
    assert a.watched.call_one(b, a).get(LONG_S) == "barked"


@pytest.mark.parametrize("kind", [Passing, PassingAsync])
def test_an_actor_that_has_passed_on_its_response_port_is_not_part_of_a_cycle(spawn: Any, kind: type[Actor]) -> None:
    a, b, c = spawn("a", Sync, 0), spawn("b", kind, 1), spawn("c", Late, 2)
    assert a.go.call_one(b, c, a).get(LONG_S) == ("late",)


def test_long_calls_are_not_a_deadlock(spawn: Any, tmp_path: Path) -> None:
    a, b, c = spawn("a", Sync, 0), spawn("b", Sync, 1), spawn("c", Sync, 2)
    slow = c.wait_for.call_one(str(tmp_path / "go"))
    wait_for_files(tmp_path, "go awaited")
    waiting = a.go.call_one(b, c)  # queued behind it
    with pytest.raises(TimeoutError):
        waiting.get(0.7)
    (tmp_path / "go").touch()
    assert waiting.get(LONG_S) == (("the end",),)
    slow.get(LONG_S)


@pytest.mark.parametrize("pause_s", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_an_actor_that_catches_the_error_can_go_on(spawn: Any, pause_s: float) -> None:
    """The future stays valid. As long as there is a cycle, its actors get the error in turn.

    After a pause the other actor already waits, so the calling actor gets the first error, and waits again.
    """
    a, b = spawn("a", Sync, 0), spawn("b", Sync, 1)
    cycle = "b.catch on t[1] -> a.go on t[0] (behind a.ask_one_that_catches) -> b.catch on t[1]"
    assert a.ask_one_that_catches.call_one(b, a, pause_s).get(LONG_S) == f"{cycle} and {cycle}"
