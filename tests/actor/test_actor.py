"""Guarantees for actors: order, one message at a time, a separate thread, copies, and which errors end an actor."""

from __future__ import annotations

import asyncio
import gc
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
    this_proc,
)
from monarch_kernel.base.mesh import Extent
from tests.support.actors import Worker, main_thread_waits_for_a_future
from tests.support.ranks import LIGHT_RANKS
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_for_files, wait_until

PROCS = {"dp": 2, "tp": 2}


class Log(Actor):
    """Records values, and the thread that it runs on."""

    def __init__(self, *first: object) -> None:
        self.seen: list[object] = list(first)
        self.local = threading.local()
        self.local.here = True
        self.busy = False
        self.overlaps = 0

    @endpoint
    def add(self, value: object) -> int:
        self.seen.append(value)
        return len(self.seen)

    @endpoint
    def get(self) -> list[object]:
        return self.seen

    @endpoint
    def place(self) -> tuple[int, int]:
        return os.getpid(), threading.get_ident()

    @endpoint
    def thread(self) -> tuple[int, bool]:
        return threading.get_ident(), getattr(self.local, "here", False)

    @endpoint
    def alone(self) -> tuple[int, bool]:
        self.overlaps += self.busy
        self.busy = True
        time.sleep(0.001)
        self.busy = False
        return self.overlaps, getattr(self.local, "here", False)

    @endpoint
    def grow(self, values: list[int]) -> list[int]:
        values.append(1)
        return values

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
        return [1, {"door": threading.Lock()}]

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

    def __init__(self, *first: object, fail: bool = False) -> None:
        self.seen: list[object] = list(first)
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
        await asyncio.sleep(0.001)
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

    @endpoint
    def actor(self) -> tuple[str, int]:
        here = context().actor_instance
        return here.name, here.actor_id

    @endpoint
    def meshes(self) -> tuple[dict[str, int], dict[str, int]]:
        here: Any = context().actor_instance
        return dict(here.proc.extent), dict(here.proc_mesh.extent)


class Signaller(Actor):
    """Proves that two actors run at the same time: each waits for the file of the other."""

    @endpoint
    def meet(self, mine: str, others: str) -> bool:
        Path(mine).touch()
        return wait_until(Path(others).exists, others)


class LastWords(Worker):
    """Prints before it dies."""

    @endpoint
    def die(self, code: int = 17) -> None:
        print("the last words", flush=True)
        os._exit(code)


class Fatal(Actor):
    """Ends its process in the constructor."""

    def __init__(self) -> None:
        os._exit(5)

    @endpoint
    def get(self) -> None: ...


class Broken(Actor):
    """Fails in the constructor on some ranks."""

    def __init__(self, *ranks: int) -> None:
        rank = current_rank().rank
        if rank in ranks:
            raise LookupError(f"no weights for rank {rank}")

    @endpoint
    def ok(self) -> bool:
        return True


both = pytest.mark.parametrize("kind", [Log, AsyncLog])


@pytest.fixture
def doomed(procs: ProcMesh) -> Iterator[ProcMesh]:
    """Two processes that a test may end."""
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


# -- context


def test_context_of_an_endpoint_and_of_init(procs: ProcMesh) -> None:
    where = procs.spawn("where", Where)
    size = {"dp": 2, "tp": 2}
    assert where.here.call().get().values() == tuple((rank, size, rank, "where") for rank in range(4))
    point, extent, name = where.born_as.call().get().values()[3]
    assert (point.rank, dict(point), dict(extent), name) == (3, {"dp": 1, "tp": 1}, size, "where")


def test_the_context_of_a_slice_numbers_ranks_within_the_slice(procs: ProcMesh) -> None:
    where = procs.spawn("where", Where)
    assert where.slice(dp=1).here.call().get().values() == ((0, {"tp": 2}, 2, "where"), (1, {"tp": 2}, 3, "where"))
    assert where.slice(dp=1, tp=0).here.call_one().get() == (0, {}, 2, "where")
    assert where.flatten("rank").here.call().get().item(rank=3) == (3, {"rank": 4}, 3, "where")
    assert where.here.call().get().values()[2] == (2, {"dp": 2, "tp": 2}, 2, "where")  # the whole mesh has not changed


def test_context_knows_the_actor(procs: ProcMesh) -> None:
    where = procs.spawn("where", Where)
    found = where.actor.call().get(LONG_S).values()
    assert {name for name, _ in found} == {"where"}
    assert len({number for _, number in found}) == 1


def test_context_knows_the_process_and_the_mesh_of_processes(procs: ProcMesh) -> None:
    assert procs.spawn("where", Where).meshes.call().get(LONG_S).values() == (({}, {"dp": 2, "tp": 2}),) * 4
    assert procs.slice(dp=1).spawn("where", Where).meshes.call().get(LONG_S).values() == (({}, {"tp": 2}),) * 2


def test_the_context_on_the_controller_is_that_of_the_client() -> None:
    assert current_actor_name() == "client"
    assert current_size() == Extent()
    assert current_rank().rank == 0


# -- order


@both
def test_broadcasts_calls_and_slices_of_one_sender_share_one_order(procs: ProcMesh, kind: type[Log]) -> None:
    log: Any = procs.spawn("log", kind)
    last = log.slice(dp=1, tp=1)
    for number in range(0, 400, 4):
        log.add.broadcast(number)
        last.add.broadcast(number + 1)
        answer = log.add.call(number + 2)
        last.add.call_one(number + 3)
    assert answer.get(LONG_S).values()[3] == 399
    assert last.get.call_one().get(LONG_S) == list(range(400))
    assert log.slice(dp=0, tp=0).get.call_one().get(LONG_S) == [n for n in range(400) if n % 4 in (0, 2)]


@both
def test_init_runs_before_the_first_message(procs: ProcMesh, kind: type[Log]) -> None:
    log = procs.spawn("log", kind, "first", 2)
    log.add.broadcast("third")
    assert log.get.call().get(LONG_S).values() == (["first", 2, "third"],) * 4


@both
def test_one_message_at_a_time_on_one_thread(procs: ProcMesh, kind: type[Log]) -> None:
    log = procs.slice(dp=0, tp=0).spawn("log", kind)
    futures = [log.alone.call_one() for _ in range(50)]
    assert {future.get(LONG_S) for future in futures} == {(0, True)}


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
    for (mine, _), (others, _) in zip(threads[0], other.thread.call().get().values()):
        assert mine != others  # per rank, because thread ids of different processes can be equal


def test_an_actor_can_call_its_own_endpoints_as_methods(procs: ProcMesh) -> None:
    assert procs.slice(dp=0, tp=0).spawn("log", Log).call_own.call_one().get() == 1


# -- arguments and results


def test_arguments_and_results_are_copies(procs: ProcMesh) -> None:
    log = procs.slice(dp=0, tp=0).spawn("log", Log)
    mine = [0]
    assert log.grow.call_one(mine).get(LONG_S) == [0, 1]
    assert mine == [0]
    log.add.call_one(mine).get()
    seen = log.get.call_one().get()
    assert seen == [[0]]
    seen.append("mine alone")
    assert log.get.call_one().get() == [[0]]


def test_a_change_of_an_argument_after_the_call_has_no_effect(procs: ProcMesh) -> None:
    log = procs.slice(dp=0, tp=0).spawn("log", Log)
    value = [1]
    done = log.add.call_one(value)
    value.append(2)
    done.get()
    assert log.get.call_one().get() == [[1]]


def test_the_call_names_an_argument_that_cannot_be_pickled(procs: ProcMesh) -> None:
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
    assert "'_thread.lock' object, at result[1]['door']" in str(caught.value)
    assert "caused by" not in str(caught.value)
    assert log.get.call().get().values() == (["kept"],) * 4


def test_large_arguments_and_results(procs: ProcMesh) -> None:
    import numpy as np

    class Mirror(Actor):
        @endpoint
        def turn(self, array: Any) -> Any:
            array[0] = -1  # the actor gets its own copy
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
    futures = [log.add.call_one(i) for i in range(20_000)]
    assert [future.get(LONG_S) for future in futures] == list(range(1, 20_001))


def test_calls_from_several_threads_keep_the_order_of_each(procs: ProcMesh) -> None:
    log = procs.slice(dp=0, tp=0).spawn("log", Log)
    counts: list[list[int]] = [[] for _ in range(4)]

    def work(me: int) -> None:
        for i in range(100):
            counts[me].append(log.add.call_one((me, i)).get(LONG_S))

    threads = [threading.Thread(target=work, args=[me]) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(sum(counts, [])) == list(range(1, 401))
    seen: list[Any] = log.get.call_one().get()
    for me in range(4):
        assert [i for source, i in seen if source == me] == list(range(100))


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


def test_an_error_names_rank_host_pid_and_the_users_line(procs: ProcMesh) -> None:
    pids = procs.run("import os; os.getpid()").get(LONG_S).values()
    log = procs.spawn("log", Log)
    with pytest.raises(ActorError) as caught:
        log.fail.call("no good", 0, 1, 2, 3).get(LONG_S)
    text = str(caught.value)
    lines = text.splitlines()
    assert "log.fail() failed" in lines[0]
    assert lines[1].startswith("[0-3] ValueError: no good")
    assert f"line {Log.fail.function.__code__.co_firstlineno + 4}" in lines[1]  # type: ignore[attr-defined]
    assert os.uname().nodename in text
    assert any(str(pid) in text for pid in pids)
    assert "raise ValueError(text)" in text
    assert text.count("ValueError: no good") == 1


def test_an_error_has_the_different_errors_of_all_ranks(procs: ProcMesh) -> None:
    class FailsByRank(Actor):
        @endpoint
        def work(self, bad: tuple[int, ...]) -> int:
            if current_rank().rank in bad:
                raise ValueError(f"no good on {current_rank().rank}")
            return current_rank().rank * 10

    fails: Any = procs.slice(dp=0).spawn("fails", FailsByRank)
    with pytest.raises(ActorError) as both_failed:
        fails.work.call((0, 1)).get(LONG_S)
    error = both_failed.value
    assert (error.rank, error.ranks, error.results) == (0, (0, 1), {})
    assert [str(failure) for failure in error.failures.values()] == ["no good on 0", "no good on 1"]
    assert {point.rank for point in error.failures} == {0, 1}
    text = str(error)
    assert text.count("no good on 0") >= 1
    assert text.count("ValueError: no good on 1") == 1
    with pytest.raises(ActorError) as one_failed:
        fails.work.call((1,)).get(LONG_S)
    assert [(point.rank, value) for point, value in one_failed.value.results.items()] == [(0, 0)]
    assert isinstance(one_failed.value.exception, ValueError)


def test_an_exception_in_a_call_keeps_the_state_of_the_actor(procs: ProcMesh) -> None:
    for kind in (Log, AsyncLog):
        log: Any = procs.slice(dp=0, tp=0).spawn("log", kind)
        log.add.call_one("kept").get()
        for _ in range(2):
            with pytest.raises(ActorError, match="no good") as caught:
                log.fail.call_one("no good", *([0] if kind is Log else [])).get()
            assert isinstance(caught.value.exception, ValueError)
        assert log.get.call_one().get() == ["kept"]


def test_an_exception_in_a_broadcast_ends_the_actor(procs: ProcMesh) -> None:
    for kind in (Log, AsyncLog):
        log: Any = procs.slice(dp=0, tp=0).spawn("casualty", kind)
        log.fail.broadcast("no caller", *([0] if kind is Log else []))
        for _ in range(2):
            with pytest.raises(SupervisionError, match="no caller.*this ended actor 'casualty'"):
                log.get.call_one().get(LONG_S)
        log.stop().get(LONG_S)
    assert procs.run("1").get().values() == (1,) * 4


@both
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


def test_every_later_call_raises_the_error_of_init_and_the_name_is_free(procs: ProcMesh) -> None:
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


def test_a_spawn_in_a_process_that_dies_at_once_does_not_raise(doomed: ProcMesh) -> None:
    log: Any = doomed.spawn("log", Fatal)
    with pytest.raises((ActorError, SupervisionError), match="exit code 5"):
        log.initialized.get(LONG_S)
    with pytest.raises(SupervisionError, match="exit code 5"):
        doomed.initialized.get(LONG_S)


# -- dead processes


def test_a_call_on_a_mesh_with_a_dead_rank_raises_and_a_slice_without_it_works(doomed: ProcMesh, bar: Bar) -> None:
    worker: Any = doomed.spawn("worker", LastWords)
    worker.slice(r=1).die.call_one().exception(LONG_S)
    for call in (worker.value.call, worker.slice(r=1).value.call_one):
        with bar.below(1.0, "an error"), pytest.raises(SupervisionError, match="exit code 17") as caught:
            call().get(LONG_S)
        assert "the last words" in str(caught.value)
    assert worker.slice(r=0).add.call_one().get(LONG_S) == 1


def test_the_host_spawns_processes_after_all_of_a_mesh_have_died(doomed: ProcMesh) -> None:
    doomed.spawn("worker", Worker).die.call().exception(LONG_S)
    other = this_host().spawn_procs({"r": 1}, device="cpu")
    assert other.spawn("worker", Worker).add.call().get(LONG_S).values() == (1,)
    other.stop(grace_s=0).get(LONG_S)


def test_a_failed_call_is_not_sent_again(doomed: ProcMesh) -> None:
    worker: Any = doomed.spawn("worker", Worker)
    worker.slice(r=1).die.call_one().exception(LONG_S)
    for _ in range(3):
        with pytest.raises(SupervisionError):
            worker.add.call().get(LONG_S)
    assert worker.slice(r=0).value.call_one().get(LONG_S) == 0


def test_a_spawn_on_a_mesh_with_a_dead_rank_fails_and_names_it(doomed: ProcMesh, bar: Bar) -> None:
    doomed.slice(r=1).run("import os; os._exit(5)").exception(LONG_S)
    with bar.below(1.0, "an error"), pytest.raises(SupervisionError, match="exit code 5") as caught:
        doomed.spawn("worker", Worker).initialized.get(LONG_S)  # type: ignore[attr-defined]
    assert caught.value.ranks == (1,)
    assert doomed.slice(r=0).spawn("worker", Worker).add.call_one().get(LONG_S) == 1


def test_a_call_fails_when_its_process_is_killed(doomed: ProcMesh, tmp_path: Path, bar: Bar) -> None:
    worker: Any = doomed.spawn("worker", Worker)
    took_s = []
    for rank, pid in enumerate(worker.pid.call().get(LONG_S).values()):
        future = worker.slice(r=rank).sleep.call_one(str(tmp_path))
        wait_for_files(tmp_path, str(rank))
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert isinstance(future.exception(LONG_S), SupervisionError)
        took_s.append(time.monotonic() - begin)
    bar.check(min(took_s), 0.1, "the error")


# -- references


def test_an_actor_lives_without_a_reference(procs: ProcMesh, tmp_path: Path) -> None:
    waiting = (
        procs.slice(dp=0, tp=0)
        .spawn("unreferenced", Signaller)
        .meet.call_one(str(tmp_path / "mine"), str(tmp_path / "others"))
    )
    gc.collect()
    wait_for_files(tmp_path, "mine")
    (tmp_path / "others").touch()
    assert waiting.get(LONG_S)


def test_actors_in_the_controllers_process_have_separate_threads_and_get_copies(procs: ProcMesh) -> None:
    log = this_proc().spawn("log", Log)
    pid, thread = log.place.call_one().get(LONG_S)
    assert pid == os.getpid()
    assert thread != threading.get_ident()
    mine: list[int] = []
    assert log.grow.call_one(mine).get(LONG_S) == [1]
    assert mine == []
    assert log.add.call_one(2).get(LONG_S) == 1
    log.stop().get(LONG_S)


# -- interrupts


@both
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


def test_an_interrupt_drops_a_queued_call(procs: ProcMesh, tmp_path: Path) -> None:
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


def test_an_interrupt_after_the_answer_has_no_effect(procs: ProcMesh) -> None:
    log = procs.spawn("log", Log)
    for i in range(200):
        future = log.add.call(i)
        future.interrupt()
        try:
            future.get(LONG_S)
        except ActorError as error:
            assert {report.kind for report in error.reports.values()} == {"interrupted"}
    assert len(log.get.call().get(LONG_S).values()) == 4


# -- classes of the notebook


def test_classes_and_functions_of_main_are_pickled_by_value_and_can_be_redefined() -> None:
    program = """
        import sys
        from monarch_kernel.actor import *

        STEP = 1

        def step():
            return STEP

        class Bumper(Actor):
            def __init__(self, start):
                self.value = start
            @endpoint
            def bump(self, function):
                self.value = function(self.value) + step()
                return self.value

        procs = this_host().spawn_procs({"r": 2}, device="cpu")
        first = procs.spawn("bumper", Bumper, 10)
        print(first.bump.call(lambda value: value * STEP).get().values())

        class Bumper(Actor):
            @endpoint
            def bump(self):
                return "again"

        second = procs.spawn("bumper", Bumper)
        print(second.bump.call().get().values())
        print(first.bump.call(abs).get().values())
        shutdown_context().get()
    """
    run = subprocess.run(
        [sys.executable, "-c", LIGHT_RANKS + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert run.stdout.splitlines() == ["(11, 11)", "('again', 'again')", "(12, 12)"], run.stdout + run.stderr
    assert run.returncode == 0
    assert run.stderr == ""
