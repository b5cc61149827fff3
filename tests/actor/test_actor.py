"""What an actor may rely on: order, one message at a time, its own thread, copies, and what ends it and what does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_host,
)
from monarch_kernel.mesh import Extent
from tests.waiting import wait_until

LONG_S = 60.0
"""For what takes a moment: a failure, not a measure."""


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    """Four processes; ranks can't import tests, so the classes of this module travel by value."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    mesh = this_host().spawn_procs({"dp": 2, "tp": 2}, device="cpu")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop().get()  # the session is the folder's
    cloudpickle.unregister_pickle_by_value(module)


class Log(Actor):
    """Remembers what it is told."""

    def __init__(self, *first: object) -> None:
        self.seen: list[object] = list(first)
        self.local = threading.local()
        self.local.here = True
        self.busy = False
        self.overlaps = 0

    @endpoint
    def add(self, value: object) -> None:
        """Remember."""
        self.seen.append(value)

    @endpoint
    def add_and_count(self, value: object) -> int:
        self.seen.append(value)
        return len(self.seen)

    @endpoint
    def get(self) -> list[object]:
        return self.seen

    @endpoint
    def thread(self) -> tuple[int, bool]:
        return threading.get_ident(), getattr(self.local, "here", False)

    @endpoint
    def alone(self) -> int:
        self.overlaps += self.busy
        self.busy = True
        time.sleep(0.001)
        self.busy = False
        return self.overlaps

    @endpoint
    def change(self, value: list[int]) -> int:
        value.append(1)
        return id(value)

    @endpoint
    def fail(self, text: str, *ranks: int) -> int:
        rank = context().actor_instance.rank.rank
        if rank in ranks:
            raise ValueError(text)
        return rank

    @endpoint
    def leave(self) -> None:
        sys.exit(3)

    @endpoint
    def lock(self) -> object:
        return threading.Lock()

    @endpoint
    def call_own(self) -> int:
        self.add("own")  # type: ignore[operator]
        return len(self.seen)

    @endpoint
    def spin(self, started: str) -> str:
        Path(started, str(context().actor_instance.rank.rank)).touch()
        try:
            while True:
                time.sleep(0.001)
        finally:
            self.seen.append("left")


class AsyncLog(Actor):
    """The same, asynchronous."""

    def __init__(self, fail: bool = False) -> None:
        self.seen: list[object] = []
        self.thread_id = threading.get_ident()
        self.busy = False
        self.overlaps = 0
        if fail:
            raise RuntimeError("not today")

    @endpoint
    async def add(self, value: object) -> int:
        await asyncio.sleep(0)
        self.seen.append(value)
        return len(self.seen)

    @endpoint
    async def get(self) -> list[object]:
        return self.seen

    @endpoint
    async def alone(self) -> tuple[int, bool]:
        self.overlaps += self.busy
        self.busy = True
        await asyncio.sleep(0.002)
        self.busy = False
        return self.overlaps, threading.get_ident() == self.thread_id

    @endpoint
    async def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    async def leave(self) -> None:
        raise SystemExit(3)

    @endpoint
    async def leave_in_a_task(self) -> None:
        async def leave() -> None:
            raise SystemExit(4)

        task = asyncio.create_task(leave())
        await asyncio.sleep(LONG_S)
        await task

    @endpoint
    async def spin(self, started: str) -> None:
        Path(started, str(context().actor_instance.rank.rank)).touch()
        try:
            await asyncio.sleep(LONG_S)
        finally:
            self.seen.append("left")


class Where(Actor):
    """Says where it is."""

    def __init__(self) -> None:
        self.born = (current_rank(), current_size(), current_actor_name())

    @endpoint
    def born_as(self) -> tuple[Any, ...]:
        return self.born

    @endpoint
    def here(self) -> tuple[int, dict[str, int], int, str]:
        return current_rank().rank, dict(current_size()), context().actor_instance.rank.rank, current_actor_name()


class Signaller(Actor):
    """Two of them prove that they run at the same time: each waits for the other's file."""

    @endpoint
    def meet(self, mine: str, others: str) -> bool:
        Path(mine).touch()
        deadline = time.monotonic() + LONG_S
        while not os.path.exists(others):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True


class Broken(Actor):
    """Can't be made on some ranks."""

    def __init__(self, *ranks: int) -> None:
        rank = current_rank().rank
        if rank in ranks:
            raise LookupError(f"no weights for rank {rank}")

    @endpoint
    def ok(self) -> bool:
        return True


# -- context


def test_context_says_who_is_asked(procs: ProcMesh) -> None:
    where = procs.spawn("where", Where)
    size = {"dp": 2, "tp": 2}
    assert where.here.call().get().values() == tuple((rank, size, rank, "where") for rank in range(4))
    point, extent, name = where.born_as.call().get().values()[3]
    assert (point.rank, dict(point), dict(extent), name) == (3, {"dp": 1, "tp": 1}, size, "where")


def test_context_of_a_slice_counts_within_the_slice(procs: ProcMesh) -> None:
    where = procs.spawn("where", Where)
    assert where.slice(dp=1).here.call().get().values() == ((0, {"tp": 2}, 2, "where"), (1, {"tp": 2}, 3, "where"))
    assert where.slice(dp=1, tp=0).here.call_one().get() == (0, {}, 2, "where")
    assert where.flatten("rank").here.call().get().item(rank=3) == (3, {"rank": 4}, 3, "where")
    assert where.here.call().get().values()[2] == (2, {"dp": 2, "tp": 2}, 2, "where")  # the whole is as it was


def test_context_on_the_controller_is_the_clients() -> None:
    assert current_actor_name() == "client"
    assert current_size() == Extent()
    assert current_rank().rank == 0


# -- order


def test_everything_from_one_sender_arrives_in_order(procs: ProcMesh) -> None:
    log = procs.spawn("log", Log)
    last = log.slice(dp=1, tp=1)
    expected: list[int] = []
    for i in range(0, 300, 3):
        log.add.broadcast(i)
        last.add.broadcast(i + 1)
        answer = log.add_and_count.call(i + 2)
        expected += [i, i + 1, i + 2]
    assert answer.get(LONG_S).values()[3] == 300
    assert last.get.call_one().get() == expected


def test_init_runs_before_the_first_message(procs: ProcMesh) -> None:
    log = procs.spawn("log", Log, "first", 2)
    log.add.broadcast("third")
    assert log.get.call().get().values() == (["first", 2, "third"],) * 4


@pytest.mark.parametrize("kind", [Log, AsyncLog])
def test_one_message_at_a_time(procs: ProcMesh, kind: type[Log]) -> None:
    log = procs.slice(dp=0, tp=0).spawn("log", kind)
    futures = [log.alone.call_one() for _ in range(50)]
    answers = [future.get(LONG_S) for future in futures]
    assert set(answers) == ({0} if kind is Log else {(0, True)})  # type: ignore[comparison-overlap]


def test_two_actors_of_one_process_run_at_the_same_time(procs: ProcMesh, tmp_path: Path) -> None:
    one = procs.slice(dp=0, tp=0)
    a, b = one.spawn("a", Signaller), one.spawn("b", Signaller)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    waits = a.meet.call_one(first, second)
    assert b.meet.call_one(second, first).get(LONG_S)
    assert waits.get(LONG_S)


def test_an_actor_stays_on_its_thread(procs: ProcMesh) -> None:
    log = procs.spawn("log", Log)
    other = procs.spawn("other", Log)
    threads = [log.thread.call().get().values() for _ in range(5)]
    assert set(threads) == {threads[0]}
    assert all(here for _, here in threads[0])
    assert not {thread for thread, _ in other.thread.call().get().values()} & {thread for thread, _ in threads[0]}


def test_an_actor_can_call_its_own_endpoints_as_methods(procs: ProcMesh) -> None:
    assert procs.slice(dp=0, tp=0).spawn("log", Log).call_own.call_one().get() == 1


# -- arguments and results


def test_arguments_are_copies(procs: ProcMesh) -> None:
    log = procs.slice(dp=0, tp=0).spawn("log", Log)
    mine = [0]
    log.change.call_one(mine).get()
    assert mine == [0]
    log.add.call_one(mine).get()
    seen = log.get.call_one().get()
    assert seen == [[0]]
    seen.append("mine alone")
    assert log.get.call_one().get() == [[0]]


def test_an_argument_that_is_changed_after_a_call_was_sent_as_it_was(procs: ProcMesh) -> None:
    log = procs.slice(dp=0, tp=0).spawn("log", Log)
    value = [1]
    done = log.add.call_one(value)
    value.append(2)
    done.get()
    assert log.get.call_one().get() == [[1]]


def test_an_argument_that_cannot_be_pickled_is_named_at_the_call(procs: ProcMesh) -> None:
    log = procs.spawn("log", Log)
    with pytest.raises(TypeError, match=r"argument 'value' \(a lock\)"):
        log.add.call(threading.Lock())
    with pytest.raises(TypeError, match="'value'"):
        log.add.broadcast(value=threading.Lock())
    with pytest.raises(TypeError, match="Log or its arguments"):
        procs.spawn("log", Log, threading.Lock())
    assert log.get.call().get().values() == ([],) * 4


def test_a_result_that_cannot_be_pickled_is_an_error_and_the_actor_lives_on(procs: ProcMesh) -> None:
    log = procs.spawn("log", Log, "kept")
    with pytest.raises(ActorError, match="the result can't be pickled") as caught:
        log.lock.call().get()
    assert caught.value.ranks == (0, 1, 2, 3)
    assert log.get.call().get().values() == (["kept"],) * 4


def test_large_arguments_and_results(procs: ProcMesh) -> None:
    import numpy as np

    class Mirror(Actor):
        @endpoint
        def turn(self, array: Any) -> Any:
            array[0] = -1  # what arrives is the actor's own
            return array[::-1].copy()

    mirror = procs.slice(dp=0).spawn("mirror", Mirror)
    array = np.arange(1 << 23)
    assert array.nbytes == 64 << 20
    for value in mirror.turn.call(array).get(LONG_S).values():
        assert value.nbytes == array.nbytes
        assert value[-1] == -1
        assert (value[-2::-1] == array[1:]).all()
        value[0] = 0
    assert array[0] == 0


def test_twenty_thousand_calls_in_flight(procs: ProcMesh) -> None:
    log = procs.slice(dp=0, tp=0).spawn("log", Log)
    futures = [log.add_and_count.call_one(i) for i in range(20_000)]
    assert [future.get(LONG_S) for future in futures] == list(range(1, 20_001))


def test_calls_from_several_threads_keep_the_order_of_each(procs: ProcMesh) -> None:
    log = procs.slice(dp=0, tp=0).spawn("log", Log)
    counts: list[list[int]] = [[] for _ in range(4)]

    def work(me: int) -> None:
        for i in range(100):
            counts[me].append(log.add_and_count.call_one((me, i)).get(LONG_S))

    threads = [threading.Thread(target=work, args=[me]) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(sum(counts, [])) == list(range(1, 401))
    seen: list[Any] = log.get.call_one().get()
    for me in range(4):
        assert [i for who, i in seen if who == me] == list(range(100))


# -- failures


def test_an_error_carries_ranks_failures_and_results(procs: ProcMesh) -> None:
    log = procs.spawn("log", Log)
    with pytest.raises(ActorError, match="no good") as caught:
        log.fail.call("no good", 1, 3).get()
    error = caught.value
    assert (error.rank, error.ranks) == (1, (1, 3))
    assert {point.rank: value for point, value in error.results.items()} == {0: 0, 2: 2}
    assert {dict(point)["dp"] for point in error.failures} == {0, 1}
    assert all(isinstance(failure, ValueError) for failure in error.failures.values())
    assert isinstance(error.exception, ValueError)
    assert error.exception.args == ("no good",)
    assert "[1,3] ValueError: no good" in str(error)
    assert "log.fail() failed on log" in str(error)
    pids = procs.run("import os; os.getpid()").get().values()
    assert {point.rank: report.pid for point, report in error.reports.items()} == {1: pids[1], 3: pids[3]}
    where = error.primary.user_frame
    assert where is not None
    assert "raise ValueError(text)" in "".join(where.source)


def test_an_exception_in_a_call_leaves_the_actor_as_it_was(procs: ProcMesh) -> None:
    for kind in (Log, AsyncLog):
        log: Any = procs.slice(dp=0, tp=0).spawn("log", kind)
        log.add.call_one("kept").get()
        with pytest.raises(ActorError):
            log.fail.call_one("no good", *([0] if kind is Log else [])).get()
        assert log.get.call_one().get() == ["kept"]


def test_an_exception_in_a_broadcast_ends_the_actor(procs: ProcMesh) -> None:
    for kind in (Log, AsyncLog):
        log: Any = procs.slice(dp=0, tp=0).spawn("casualty", kind)
        log.fail.broadcast("nobody asked", *([0] if kind is Log else []))
        for _ in range(2):
            with pytest.raises(SupervisionError, match="nobody asked.*this ended actor 'casualty'"):
                log.get.call_one().get(LONG_S)
        log.stop().get(LONG_S)
    assert procs.run("1").get().values() == (1,) * 4


@pytest.mark.parametrize("kind", [Log, AsyncLog])
def test_exit_in_an_endpoint_ends_the_actor_and_not_its_process(procs: ProcMesh, kind: type[Log]) -> None:
    pids = procs.run("import os; os.getpid()").get()
    log = procs.spawn("log", kind)
    behind = [log.leave.call(), log.get.call()]
    with pytest.raises(ActorError, match="SystemExit"):
        behind[0].get(LONG_S)
    with pytest.raises(SupervisionError, match="SystemExit"):
        behind[1].get(LONG_S)
    assert procs.run("os.getpid()").get() == pids


def test_exit_in_a_task_of_an_async_actor_ends_the_actor_and_not_its_process(procs: ProcMesh) -> None:
    one = procs.slice(dp=0, tp=0)
    log = one.spawn("log", AsyncLog)
    with pytest.raises((ActorError, SupervisionError)):
        log.leave_in_a_task.call_one().get(LONG_S)
    with pytest.raises(SupervisionError, match="this ended actor 'log'"):
        log.get.call_one().get(LONG_S)
    assert one.run("1").get().item() == 1


def test_a_failed_init_is_told_by_every_later_call_and_frees_the_name(procs: ProcMesh) -> None:
    broken = procs.spawn("model", Broken, 2)
    with pytest.raises(ActorError, match="no weights for rank 2") as first:
        broken.initialized.get(LONG_S)
    assert first.value.ranks == (2,)
    for _ in range(2):
        with pytest.raises(SupervisionError, match="no weights for rank 2") as later:
            broken.ok.call().get(LONG_S)
        assert "raise LookupError" in later.value.primary.traceback
        assert {point.rank for point in later.value.results} == {0, 1, 3}
    assert broken.slice(dp=0).ok.call().get().values() == (True, True)
    assert procs.spawn("model", Broken).ok.call().get().values() == (True,) * 4


def test_a_failed_init_of_an_async_actor(procs: ProcMesh) -> None:
    log = procs.spawn("log", AsyncLog, fail=True)
    with pytest.raises(SupervisionError, match="not today"):
        log.get.call().get(LONG_S)
    with pytest.raises(ActorError, match="not today"):
        log.initialized.get(LONG_S)
    assert procs.spawn("log", AsyncLog).get.call().get().values() == ([],) * 4


# -- interrupts


def main_thread_waits_for_a_future() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not frame.f_code.co_filename.endswith("transport/driver.py"):
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("kind", [Log, AsyncLog])
def test_an_interrupt_of_a_wait_reaches_the_ranks(procs: ProcMesh, kind: type[Log], tmp_path: Path) -> None:
    log = procs.spawn("log", kind)
    future = log.spin.call(str(tmp_path))

    def interrupt_when_all_run() -> None:
        wait_until(lambda: len(os.listdir(tmp_path)) == 4, "all ranks to spin")
        wait_until(main_thread_waits_for_a_future, "the main thread to wait")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_all_run)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        future.get(LONG_S)
    thread.join()
    assert log.get.call().get(LONG_S).values() == (["left"],) * 4
    error = future.exception(LONG_S)
    assert isinstance(error, ActorError)
    assert {report.kind for report in error.reports.values()} == {"interrupted"}


def test_what_waits_its_turn_is_dropped_by_an_interrupt(procs: ProcMesh, tmp_path: Path) -> None:
    log = procs.slice(dp=0, tp=0).spawn("log", Log)
    running = log.spin.call_one(str(tmp_path))
    queued = log.add.call_one("never")
    wait_until(lambda: bool(os.listdir(tmp_path)), "the rank to spin")
    queued.interrupt()
    error = queued.exception(LONG_S)
    assert isinstance(error, ActorError)
    assert "interrupted before it began" in str(error)
    assert not running.done()
    running.interrupt()
    assert running.exception(LONG_S) is not None
    assert log.get.call_one().get() == ["left"]


def test_an_interrupt_that_comes_too_late_does_nothing(procs: ProcMesh) -> None:
    log = procs.spawn("log", Log)
    for i in range(200):
        future = log.add_and_count.call(i)
        future.interrupt()
        try:
            future.get(LONG_S)
        except ActorError as error:
            assert {report.kind for report in error.reports.values()} == {"interrupted"}
    assert len(log.get.call().get(LONG_S).values()) == 4


# -- classes of the notebook


def test_classes_of_main_travel_by_value_and_may_be_defined_anew() -> None:
    program = """
        import sys
        from monarch_kernel.actor import *

        STEP = 1

        def step():
            return STEP

        class Counter(Actor):
            def __init__(self, start):
                self.value = start
            @endpoint
            def bump(self):
                self.value += step()
                return self.value

        procs = this_host().spawn_procs({"r": 2}, device="cpu")
        first = procs.spawn("counter", Counter, 10)
        print(first.bump.call().get().values())

        class Counter(Actor):
            @endpoint
            def bump(self):
                return "anew"

        second = procs.spawn("counter", Counter)
        print(second.bump.call().get().values())
        print(first.bump.call().get().values())
        shutdown_context().get()
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert run.stdout.splitlines() == ["(11, 11)", "('anew', 'anew')", "(12, 12)"], run.stdout + run.stderr
    assert run.returncode == 0
    assert run.stderr == ""
