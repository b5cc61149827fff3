"""A failure ends one actor and nothing else: the next spawn works on the same processes."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    concurrent_endpoint,
    endpoint,
)
from monarch_kernel.errors import PayloadError, RanksError
from tests.support.waiting import LONG_S, wait_until


class Unpicklable(Exception):
    """An error that does not survive pickling."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")
        self.lock = threading.Lock()


class Evil(BaseException):
    """A BaseException whose text can't be computed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Poison(Actor):
    """Fails in every possible way."""

    def __init__(self, how: str = "") -> None:
        if how:
            self.fail_now(how)

    def fail_now(self, how: str) -> Any:
        if how == "error":
            raise ValueError("no good")
        if how == "unpicklable error":
            raise Unpicklable(1, 2)
        if how == "evil":
            raise Evil
        if how == "exit":
            sys.exit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "cancelled":
            raise asyncio.CancelledError
        if how == "generator exit":
            raise GeneratorExit
        if how == "stop iteration":
            raise StopIteration
        if how == "recursion":
            return self.fail_now(how)
        if how == "memory":
            raise MemoryError
        if how == "group":
            raise ValueError("outer") from Unpicklable(3, 4)
        raise AssertionError(how)

    @endpoint
    def fail(self, how: str) -> Any:
        return self.fail_now(how)

    @endpoint
    def lock(self) -> Any:
        return threading.Lock()

    @endpoint
    def thread(self) -> None:
        def work() -> None:
            raise ValueError("in a thread")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    @endpoint
    def ok(self) -> int:
        return 1


class AsyncPoison(Poison):
    """The same, asynchronous."""

    @endpoint
    async def fail(self, how: str) -> Any:
        await asyncio.sleep(0)
        return self.fail_now(how)

    @concurrent_endpoint
    async def fail_beside(self, how: str) -> Any:
        await asyncio.sleep(0)
        return self.fail_now(how)

    @endpoint
    async def lock(self) -> Any:
        return threading.Lock()

    @endpoint
    async def thread(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.fail_now, "error")

    @endpoint
    async def ok(self) -> int:
        return 1


WAYS = [
    "error",
    "unpicklable error",
    "evil",
    "exit",
    "interrupt",
    "cancelled",
    "generator exit",
    "stop iteration",
    "recursion",
    "memory",
    "group",
]
both = pytest.mark.parametrize("kind", [Poison, AsyncPoison])


@pytest.fixture
def the_processes_stay(procs: ProcMesh) -> Iterator[None]:
    """Check after the test that both kinds of actor work on the same processes, under the same name."""
    before = procs.run("import os; os.getpid()").get(LONG_S).values()
    yield
    for kind in (Poison, AsyncPoison):
        again = procs.spawn("poison", kind)
        assert again.ok.call().get(LONG_S).values() == (1, 1)
        again.stop().get(LONG_S)
    assert procs.run("os.getpid()").get(LONG_S).values() == before


@both
@pytest.mark.parametrize("how", WAYS)
def test_init(procs: ProcMesh, kind: type[Poison], how: str, the_processes_stay: None) -> None:
    poison = procs.spawn("poison", kind, how)
    with pytest.raises(ActorError):
        poison.initialized.get(LONG_S)
    with pytest.raises(SupervisionError, match="this ended actor 'poison'"):
        poison.ok.call().get(LONG_S)
    poison.stop().get(LONG_S)


@both
@pytest.mark.parametrize("how", WAYS)
def test_call(procs: ProcMesh, kind: type[Poison], how: str, the_processes_stay: None) -> None:
    poison = procs.spawn("poison", kind)
    with pytest.raises(RanksError):
        poison.fail.call(how).get(LONG_S)
    if how in ("error", "unpicklable error", "recursion", "memory", "group", "stop iteration"):  # an Exception
        assert poison.ok.call().get(LONG_S).values() == (1, 1)
    else:
        with pytest.raises(SupervisionError, match="this ended actor 'poison'"):
            poison.ok.call().get(LONG_S)


@both
@pytest.mark.parametrize("how", WAYS)
def test_broadcast(procs: ProcMesh, kind: type[Poison], how: str, the_processes_stay: None) -> None:
    poison = procs.spawn("poison", kind)
    poison.fail.broadcast(how)
    with pytest.raises(SupervisionError, match="this ended actor 'poison'"):
        poison.ok.call().get(LONG_S)


@pytest.mark.parametrize("adverb", ["call", "broadcast"])
@pytest.mark.parametrize("how", WAYS)
def test_concurrent(procs: ProcMesh, how: str, adverb: str, the_processes_stay: None) -> None:
    poison = procs.spawn("poison", AsyncPoison)
    sent = getattr(poison.fail_beside, adverb)(how)
    if sent is not None:
        with pytest.raises(RanksError):
            sent.get(LONG_S)


@both
def test_results_and_threads(procs: ProcMesh, kind: type[Poison], the_processes_stay: None) -> None:
    poison = procs.spawn("poison", kind)
    for _ in range(3):
        with pytest.raises(ActorError, match="can't be pickled"):
            poison.lock.call().get(LONG_S)
    if kind is AsyncPoison:
        with pytest.raises(ActorError, match="no good"):
            poison.thread.call().get(LONG_S)
    else:
        poison.thread.call().get(LONG_S)
    assert poison.ok.call().get(LONG_S).values() == (1, 1)


@both
def test_values_that_cannot_be_pickled_or_unpickled(
    procs: ProcMesh, kind: type[Poison], the_processes_stay: None
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return exec, ("raise LookupError('opened')",)

    with pytest.raises(PayloadError):
        procs.spawn("poison", kind, threading.Lock())  # type: ignore[arg-type]
    unborn = procs.spawn("poison", kind, Bomb())  # type: ignore[arg-type]
    with pytest.raises(ActorError, match="opened"):
        unborn.initialized.get(LONG_S)
    poison = procs.spawn("poison", kind)
    with pytest.raises(ActorError, match="opened"):
        poison.fail.call(Bomb()).get(LONG_S)  # type: ignore[arg-type]
    assert poison.ok.call().get(LONG_S).values() == (1, 1)


def test_three_failed_actors_do_not_keep_a_name(procs: ProcMesh, the_processes_stay: None) -> None:
    unborn, failed, left = (
        procs.spawn("poison", Poison, "error"),
        procs.spawn("poison", Poison),
        procs.spawn("poison", Poison),
    )
    failed.fail.broadcast("error")
    left.fail.call("exit")
    assert procs.spawn("poison", Poison).ok.call().get(LONG_S).values() == (1, 1)
    for poison in (unborn, failed, left):
        with pytest.raises(SupervisionError):
            poison.ok.call().get(LONG_S)


def test_many_failures_in_a_random_order_leave_nothing_behind(procs: ProcMesh, the_processes_stay: None) -> None:
    count = "import threading; sum(t.name.startswith('monarch-actor') for t in threading.enumerate())"
    before = procs.run(count).get(LONG_S).values()
    rng = random.Random(0)
    for _ in range(60):
        kind, how = rng.choice([Poison, AsyncPoison]), rng.choice(WAYS)
        if rng.random() < 0.3:
            poison = procs.spawn("poison", kind, how)
        else:
            poison = procs.spawn("poison", kind)
            sent = poison.fail.call(how) if rng.random() < 0.5 else poison.fail.broadcast(how)  # type: ignore[func-returns-value]
            if sent is not None and rng.random() < 0.5:
                sent.exception(LONG_S)
        poison.stop().get(LONG_S)
    wait_until(lambda: max(procs.run(count).get(LONG_S).values()) <= max(before), "threads of actors to end")


def test_dead_actors_have_no_threads_but_still_answer_with_the_reason(
    procs: ProcMesh, the_processes_stay: None
) -> None:
    count = "import threading; sum(t.name.startswith('monarch-actor') for t in threading.enumerate())"
    before = procs.run(count).get(LONG_S).values()
    kinds = [Poison, AsyncPoison]
    dead = [procs.spawn("poison", kinds[i % 2], "error") for i in range(60)]
    for poison in dead:
        assert isinstance(poison.initialized.exception(LONG_S), ActorError)
    wait_until(lambda: max(procs.run(count).get(LONG_S).values()) <= max(before) + 20, "threads of dead actors to end")
    for poison in dead:
        with pytest.raises(SupervisionError, match="no good.*this ended actor 'poison'"):
            poison.ok.call().get(LONG_S)
        poison.stop().get(LONG_S)
