"""Calls between actors: handles are passed as arguments, calls keep their order, actors spawn actors and use ports."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import monarch_kernel.actor as api
from monarch_kernel.actor import (
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    context,
    current_rank,
    current_size,
    endpoint,
    this_host,
)
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

PROCS = {"dp": 2, "tp": 2}


class Log(Actor):
    """Records values, and returns its point in the mesh that a call addresses."""

    def __init__(self, *first: object) -> None:
        self.seen: list[Any] = list(first)

    @endpoint
    def add(self, value: object) -> int:
        self.seen.append(value)
        return len(self.seen)

    @endpoint
    def get(self) -> list[Any]:
        return self.seen

    @endpoint
    def here(self) -> tuple[int, dict[str, int], int]:
        return current_rank().rank, dict(current_size()), context().actor_instance.rank.rank

    @endpoint
    def process(self) -> int:
        return os.getpid()

    @endpoint
    def grow(self, values: list[int]) -> int:
        values.append(1)
        return len(values)

    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def die(self) -> None:
        os._exit(17)


class Caller(Actor):
    """Runs functions with handles; the functions are pickled by value."""

    def __init__(self, *kept: Any) -> None:
        self.kept = kept

    @endpoint
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @endpoint
    def run_with_kept(self, function: Callable[..., Any]) -> Any:
        return function(*self.kept)


class AsyncCaller(Actor):
    """The same for coroutine functions."""

    def __init__(self, *kept: Any) -> None:
        self.kept = kept

    @endpoint
    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await function(*args)

    @endpoint
    async def run_with_kept(self, function: Callable[..., Any]) -> Any:
        return await function(*self.kept)


@pytest.fixture
def doomed(procs: ProcMesh) -> Iterator[ProcMesh]:
    """Two processes that a test may end."""
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


@pytest.fixture(scope="module")
def counter(procs: ProcMesh) -> Iterator[Any]:
    """An actor in the controller's process."""
    log: Any = api.get_or_spawn_controller("the counter", Log).get(LONG_S)
    yield log
    log.stop().get(LONG_S)


@pytest.fixture
def log(procs: ProcMesh) -> Any:
    return procs.spawn("log", Log)


@pytest.fixture(scope="module")
def callers(procs: ProcMesh) -> Any:
    return procs.spawn("callers", Caller)


@pytest.fixture(scope="module")
def caller(callers: Any) -> Any:
    """One caller."""
    return callers.slice(dp=0, tp=0)


@pytest.fixture(scope="module")
def async_caller(procs: ProcMesh) -> Any:
    return procs.slice(dp=0, tp=1).spawn("async caller", AsyncCaller)


# -- references as arguments


def test_a_sync_endpoint_calls_others_and_waits(log: Any, caller: Any) -> None:
    def use(log: Any) -> tuple[Any, ...]:
        return log.add.call("a").get(LONG_S).values(), log.slice(dp=1, tp=0).get.call_one().get(LONG_S)

    assert caller.run.call_one(use, log).get(LONG_S) == ((1, 1, 1, 1), ["a"])


def test_an_async_endpoint_awaits_others(log: Any, async_caller: Any) -> None:
    async def use(log: Any) -> tuple[Any, ...]:
        values = await log.add.call("a")
        first, second = await asyncio.gather(
            log.slice(dp=0, tp=0).get.call_one().as_asyncio(), log.slice(dp=1, tp=1).get.call_one().as_asyncio()
        )
        return values.values(), first, second

    assert async_caller.run.call_one(use, log).get(LONG_S) == ((1, 1, 1, 1), ["a"], ["a"])


def test_handles_are_passed_in_containers_closures_and_constructors(procs: ProcMesh, log: Any, caller: Any) -> None:
    part = log.slice(dp=1)
    assert (
        caller.run.call_one(lambda given: given["a"][0].process.call().get(LONG_S).values(), {"a": [part]}).get(LONG_S)
        == part.process.call().get(LONG_S).values()
    )
    assert caller.run.call_one(lambda: len(part.process.call().get(LONG_S))).get(LONG_S) == 2
    kept: Any = procs.slice(dp=0, tp=0).spawn("kept", Caller, log)
    assert kept.run_with_kept.call_one(lambda log: log.size()).get(LONG_S) == 4


def test_handles_are_returned_as_results(log: Any, caller: Any) -> None:
    mine = caller.run.call_one(lambda log: {"the log": log.slice(tp=1)}, log).get(LONG_S)["the log"]
    assert dict(mine.extent) == {"dp": 2}
    assert mine.here.call().get(LONG_S).values() == ((0, {"dp": 2}, 1), (1, {"dp": 2}, 3))


def test_a_handle_on_a_rank_is_a_mesh(log: Any, caller: Any) -> None:
    def use(log: Any) -> list[Any]:
        one = log.flatten("rank").slice(rank=slice(1, 4, 2))
        found = [one.here.call().get(LONG_S).values(), log.extent == one.extent, one.size("rank")]
        found.append(sorted((future.rank, future.get(LONG_S)) for future in log.add.stream(0)))
        found.append(log.add.choose(0).get(LONG_S))
        for misuse in (lambda: log.add(1), lambda: log.add.call(), lambda: log.nope, lambda: log.add.call_one(1)):
            try:
                misuse()
            except Exception as error:
                found.append(type(error).__name__)
        return found

    assert caller.run.call_one(use, log).get(LONG_S) == [
        ((0, {"rank": 2}, 1), (1, {"rank": 2}, 3)),
        False,
        2,
        [(0, 1), (1, 1), (2, 1), (3, 1)],
        2,
        "TypeError",
        "TypeError",
        "AttributeError",
        "ValueError",
    ]


def test_an_actor_can_get_handles_of_itself_and_its_neighbors(callers: Any) -> None:
    def ask_next(callers: Any) -> int:
        rank = context().actor_instance.rank.rank
        ahead = callers.flatten("rank").slice(rank=(rank + 1) % 4)
        return ahead.run.call_one(lambda: context().actor_instance.rank.rank).get(LONG_S)  # type: ignore[no-any-return]

    def broadcast(callers: Any) -> None:
        callers.run.broadcast(lambda: None)

    # One after another: concurrent calls would be a deadlock.
    line = callers.flatten("rank")
    found = [line.slice(rank=rank).run.call_one(ask_next, callers).get(LONG_S) for rank in range(4)]
    assert found == [1, 2, 3, 0]
    assert callers.run.call(broadcast, callers).get(LONG_S).values() == (None,) * 4


def test_errors_of_a_call_between_ranks_are_those_of_the_controller(log: Any, caller: Any) -> None:
    def use(log: Any) -> tuple[Any, ...]:
        try:
            log.fail.call("no good").get(LONG_S)
        except ActorError as error:
            return error.ranks, repr(error.exception), "raise ValueError(text)" in str(error)
        raise AssertionError("it did not fail")

    assert caller.run.call_one(use, log).get(LONG_S) == ((0, 1, 2, 3), "ValueError('no good')", True)
    assert log.add.call(1).get(LONG_S).values() == (1,) * 4


def test_an_error_that_passes_through_two_actors_names_both(log: Any, caller: Any) -> None:
    with pytest.raises(ActorError, match="no good") as caught:
        caller.run.call_one(lambda log: log.fail.call("no good").get(LONG_S), log).get(LONG_S)
    text = str(caught.value)
    assert "callers.run" in text
    assert "log.fail" in text


def test_a_caller_on_a_rank_gets_an_error_when_the_called_process_dies(doomed: ProcMesh, caller: Any, bar: Bar) -> None:
    log = doomed.spawn("log", Log)

    def use(log: Any) -> tuple[Any, ...]:
        error = log.slice(r=1).die.call_one().exception(LONG_S)
        again = log.add.call(1).exception(LONG_S)
        rest = log.slice(r=0).add.call_one(1).get(LONG_S)
        return type(error).__name__, "17" in str(error), type(again).__name__, rest

    with bar.below(1.0, "both errors"):
        assert caller.run.call_one(use, log).get(LONG_S) == ("SupervisionError", True, "SupervisionError", 1)


def test_arguments_are_copies_within_a_process_too(procs: ProcMesh, log: Any, caller: Any) -> None:
    def use(log: Any) -> tuple[int, list[int], bool]:
        mine: list[int] = []
        return log.grow.call_one(mine).get(LONG_S), mine, log.process.call_one().get(LONG_S) == os.getpid()

    beside = log.slice(dp=0, tp=0)
    assert caller.run.call_one(use, beside).get(LONG_S) == (1, [], True)


def test_a_call_on_a_rank_names_an_argument_that_cannot_be_pickled(log: Any, caller: Any) -> None:
    def use(log: Any) -> str:
        try:
            log.add.call(threading.Lock())
        except TypeError as error:
            return str(error)
        return ""

    assert "'value'" in caller.run.call_one(use, log).get(LONG_S)


# -- order


def test_everything_from_one_actor_arrives_in_order(log: Any, caller: Any) -> None:
    def use(log: Any) -> None:
        last = log.slice(dp=1, tp=1)
        for number in range(0, 200, 4):
            log.add.broadcast(number)
            last.add.broadcast(number + 1)
            log.add.call(number + 2)
            future = last.add.call_one(number + 3)
        future.get(LONG_S)

    caller.run.call_one(use, log).get(LONG_S)
    assert log.slice(dp=1, tp=1).get.call_one().get(LONG_S) == list(range(200))


def test_calls_of_each_of_many_senders_arrive_in_order(log: Any, callers: Any) -> None:
    one = log.slice(dp=0, tp=0)

    def use(one: Any) -> None:
        rank = context().actor_instance.rank.rank
        for number in range(0, 99, 3):
            one.add.broadcast((rank, number))
            one.add.call_one((rank, number + 1))
            one.add.call_one((rank, number + 2)).get(LONG_S)

    answers = callers.run.call(use, one)
    for number in range(99):
        one.add.broadcast(("controller", number))
    answers.get(LONG_S)
    seen = one.get.call_one().get(LONG_S)
    assert len(seen) == 5 * 99
    for sender in (0, 1, 2, 3, "controller"):
        assert [number for source, number in seen if source == sender] == list(range(99))


def test_a_call_can_arrive_before_another_process_has_spawned_the_actor(procs: ProcMesh, caller: Any) -> None:
    for number in range(20):
        late: Any = procs.slice(dp=1).spawn("late", Log, number)
        assert caller.run.call_one(lambda late: late.get.call().get(LONG_S).values(), late).get(LONG_S) == (
            [number],
            [number],
        )


# -- actors spawn actors


def test_an_actor_spawns_actors_from_an_endpoint_and_passes_them_on(procs: ProcMesh, caller: Any) -> None:
    def use(procs: Any) -> Any:
        children = procs.spawn("children", Log, "born")
        children.add.call("by the parent").get(LONG_S)
        return children

    children = caller.run.call_one(use, procs.slice(dp=1)).get(LONG_S)
    assert children.get.call().get(LONG_S).values() == (["born", "by the parent"],) * 2
    assert dict(children.extent) == {"tp": 2}


def test_an_async_actor_spawns_actors(procs: ProcMesh, async_caller: Any) -> None:
    async def use(procs: Any) -> list[Any]:
        children = procs.spawn("children", Log)
        await children.initialized
        return [value for _, value in await children.add.call(1)]

    assert async_caller.run.call_one(use, procs).get(LONG_S) == [1, 1, 1, 1]


def test_an_actor_spawns_actors_in_its_constructor(procs: ProcMesh) -> None:
    class Parent(Actor):
        def __init__(self, procs: Any) -> None:
            self.children = procs.spawn("children", Log, "born")

        @endpoint
        def seen(self) -> Any:
            return self.children.get.call().get(LONG_S).values()

    parent = procs.slice(dp=0, tp=0).spawn("parent", Parent, procs.slice(dp=1))
    assert parent.seen.call_one().get(LONG_S) == (["born"], ["born"])


def test_an_actor_spawns_in_its_own_process(caller: Any) -> None:
    def use() -> tuple[bool, ...]:
        from monarch_kernel.actor import this_proc  # type: ignore[attr-defined,unused-ignore]

        here: Any = context().actor_instance
        first, second = this_proc().spawn("first", Log), here.proc.spawn("second", Log)
        return tuple(each.process.call_one().get(LONG_S) == os.getpid() for each in (first, second))

    assert caller.run.call_one(use).get(LONG_S) == (True, True)


def test_a_stop_also_stops_the_spawned_actors(procs: ProcMesh) -> None:
    parent: Any = procs.slice(dp=0, tp=0).spawn("parent", Caller)
    child = parent.run.call_one(lambda procs: procs.spawn("child", Log), procs.slice(dp=1, tp=1)).get(LONG_S)
    assert child.add.call_one(1).get(LONG_S) == 1
    parent.stop("no longer needed").get(LONG_S)
    with pytest.raises(SupervisionError):
        child.add.call_one(1).get(LONG_S)


def test_the_spawned_actors_of_a_dead_actor_are_stopped(procs: ProcMesh) -> None:
    parent: Any = procs.slice(dp=0, tp=0).spawn("parent", Caller)
    child = parent.run.call_one(lambda procs: procs.spawn("child", Log), procs.slice(dp=1, tp=1)).get(LONG_S)
    assert child.add.call_one(1).get(LONG_S) == 1
    with pytest.raises((ActorError, SupervisionError)):
        parent.run.call_one(sys.exit, 3).get(LONG_S)
    wait_until(lambda: child.add.call_one(1).exception(LONG_S) is not None, "the child to end")
    assert isinstance(child.add.call_one(1).exception(LONG_S), SupervisionError)


def test_a_mesh_of_processes_can_be_an_argument(procs: ProcMesh, caller: Any) -> None:
    assert caller.run.call_one(lambda procs: (procs.size(), dict(procs.slice(dp=0).extent)), procs).get(LONG_S) == (
        4,
        {"tp": 2},
    )


# -- actors of the controller


def test_ranks_call_actors_in_the_controllers_process(caller: Any) -> None:
    here = api.this_proc().spawn("here", Log)  # type: ignore[attr-defined,unused-ignore]
    assert caller.run.call_one(lambda here: here.process.call_one().get(LONG_S), here).get(LONG_S) == os.getpid()
    here.stop().get(LONG_S)


def test_all_ranks_get_the_same_controller_actor(callers: Any, counter: Any) -> None:
    def count(name: str) -> int:
        from monarch_kernel.actor import get_or_spawn_controller  # type: ignore[attr-defined,unused-ignore]

        return get_or_spawn_controller(name, Log).get(LONG_S).add.call_one(1).get(LONG_S)  # type: ignore[no-any-return,unused-ignore]

    assert sorted(callers.run.call(count, "the counter").get(LONG_S).values()) == [1, 2, 3, 4]
    assert count("the counter") == counter.add.call_one(1).get(LONG_S) - 1 == 5


# -- channels


def test_ports_are_sent_anywhere_and_received_in_order(callers: Any) -> None:
    port, receiver = api.Channel.open()  # type: ignore[attr-defined,unused-ignore]
    assert isinstance(port, api.Port)  # type: ignore[attr-defined,unused-ignore]
    assert isinstance(receiver, api.PortReceiver)  # type: ignore[attr-defined,unused-ignore]

    def say(port: Any) -> None:
        for number in range(50):
            port.send((context().actor_instance.rank.rank, number))

    early = receiver.recv()
    with pytest.raises(TimeoutError):
        early.get(0.01)
    callers.run.call(say, port).get(LONG_S)
    received = [early.get(LONG_S), *(receiver.recv().get(LONG_S) for _ in range(199))]
    for rank in range(4):
        assert [number for source, number in received if source == rank] == list(range(50))


def test_a_receive_takes_its_value_when_it_is_used(procs: ProcMesh) -> None:
    port, receiver = api.Channel.open()  # type: ignore[attr-defined,unused-ignore]
    for value in (1, 2, 3):
        port.send(value)
    first, second, unused = receiver.recv(), receiver.recv(), receiver.recv()
    assert second.get(LONG_S) == 1
    wait_until(first.done, "the second value has arrived")
    assert (first.get(LONG_S), second.get(LONG_S)) == (2, 1)
    del unused
    assert receiver.recv().get(LONG_S) == 3
    port.send(4)
    dropped = receiver.recv()
    dropped.cancel()
    with pytest.raises(CancelledError):
        dropped.get(LONG_S)
    assert receiver.recv().get(LONG_S) == 4


def test_a_port_takes_an_exception(caller: Any) -> None:
    port, receiver = api.Channel.open()  # type: ignore[attr-defined,unused-ignore]
    caller.run.call_one(lambda port: port.exception(ValueError("no good")), port).get(LONG_S)
    with pytest.raises((ValueError, ActorError), match="no good"):
        receiver.recv().get(LONG_S)


def test_other_processes_send_to_a_channel_of_a_rank(callers: Any) -> None:
    def listen(sender: Any) -> list[int]:
        from monarch_kernel.actor import Channel  # type: ignore[attr-defined,unused-ignore]

        port, receiver = Channel.open()
        sender.run.broadcast(lambda port: [port.send(number) for number in range(3)] and None, port)
        return [receiver.recv().get(LONG_S) for _ in range(3)]

    assert callers.slice(dp=0, tp=0).run.call_one(listen, callers.slice(dp=1, tp=1)).get(LONG_S) == [0, 1, 2]


def test_a_receive_can_be_awaited(async_caller: Any) -> None:
    async def listen() -> int:
        from monarch_kernel.actor import Channel  # type: ignore[attr-defined,unused-ignore]

        port, receiver = Channel.open()
        port.send(3)
        return await receiver.recv()  # type: ignore[no-any-return,unused-ignore]

    assert async_caller.run.call_one(listen).get(LONG_S) == 3


def test_an_accumulator_folds_in_order_of_arrival(log: Any, callers: Any, tmp_path: Path) -> None:
    total = api.Accumulator(log.add, 0, lambda so_far, value: so_far + value)  # type: ignore[attr-defined,unused-ignore]
    assert total.accumulate("x").get(LONG_S) == 4
    assert total.accumulate("x").get(LONG_S) == 8

    def wait_by_rank(folder: str) -> int:
        rank = context().actor_instance.rank.rank
        wait_until(Path(folder, str(rank)).exists, f"{folder}/{rank}")
        return rank

    in_order = api.Accumulator(callers.run, (), lambda so_far, value: (*so_far, value))  # type: ignore[attr-defined,unused-ignore]
    future = in_order.accumulate(partial(wait_by_rank, str(tmp_path)))
    flat = callers.flatten("rank")
    for rank in (2, 0, 3, 1):
        (tmp_path / str(rank)).touch()
        flat.slice(rank=rank).run.call_one(os.getpid).get(LONG_S)  # its answer comes after the folded one
    assert future.get(LONG_S) == (2, 0, 3, 1)
