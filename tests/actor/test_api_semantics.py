"""What scripts rely on: order, one message at a time, copies, what an error ends and what it does not, birth and death."""

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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from monarch_kernel.actor import Actor, ActorError, ProcMesh, SupervisionError, endpoint, this_host
from tests.waiting import undisturbed_s, wait_until

LONG_S = 60.0
"""For what takes a moment: a failure, not a measure."""
QUICK_S = 1.0
"""What is told at once; the machine may be busy."""


class Log(Actor):
    """Remembers what it is told."""

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
    def meet(self, mine: str, others: str) -> bool:
        """Show that two run at the same time: each waits for the other's file."""
        Path(mine).touch()
        deadline = time.monotonic() + LONG_S
        while not os.path.exists(others) and time.monotonic() < deadline:
            time.sleep(0.001)
        return os.path.exists(others)

    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def leave(self) -> None:
        sys.exit(3)

    @endpoint
    def lock(self) -> object:
        return threading.Lock()

    @endpoint
    def process(self) -> int:
        return os.getpid()

    @endpoint
    def die(self) -> None:
        print("the last words", flush=True)
        os._exit(17)


class AsyncLog(Actor):
    """The same, asynchronous."""

    def __init__(self, *first: object) -> None:
        self.seen: list[object] = list(first)
        self.busy = False
        self.overlaps = 0
        self.thread = threading.get_ident()

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
        return self.overlaps, threading.get_ident() == self.thread

    @endpoint
    async def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    async def leave(self) -> None:
        raise SystemExit(3)

    @endpoint
    async def lock(self) -> object:
        return threading.Lock()


class Broken(Actor):
    """Can't be made."""

    def __init__(self) -> None:
        raise LookupError("no weights")

    @endpoint
    def get(self) -> None: ...


class Fatal(Actor):
    """Ends its process when it is made."""

    def __init__(self) -> None:
        os._exit(5)

    @endpoint
    def get(self) -> None: ...


class Tidy(Actor):
    """Says in a file how it ended."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __cleanup__(self, error: BaseException | None) -> None:
        Path(self.path).write_text(repr(error))

    @endpoint
    def fail(self) -> None:
        raise ValueError("no good")


both = pytest.mark.parametrize("kind", [Log, AsyncLog])


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    """Two processes; ranks can't import tests, so the classes of this module travel by value."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop().get()  # the session is the folder's
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def one(procs: ProcMesh) -> ProcMesh:
    return procs.slice(r=0)


@contextmanager
def doomed() -> Iterator[ProcMesh]:
    """Two processes of a test's own, which it may end."""
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    try:
        yield mesh
    finally:
        mesh.stop(grace_s=0).get(LONG_S)


# -- 1 to 3: order, one at a time, __init__ first


@both
def test_broadcasts_calls_and_slices_of_one_sender_share_one_order(procs: ProcMesh, kind: type[Log]) -> None:
    log: Any = procs.spawn("log", kind)
    last = log.slice(r=1)
    for number in range(0, 200, 4):
        log.add.broadcast(number)
        last.add.broadcast(number + 1)
        answer = log.add.call(number + 2)
        last.add.call_one(number + 3)
    answer.get(LONG_S)
    assert last.get.call_one().get(LONG_S) == list(range(200))
    assert log.slice(r=0).get.call_one().get(LONG_S) == [n for n in range(200) if n % 4 in (0, 2)]


@both
def test_one_message_at_a_time_on_one_thread(one: ProcMesh, kind: type[Log]) -> None:
    log = one.spawn("log", kind)
    answers = [log.alone.call_one() for _ in range(50)]
    assert {answer.get(LONG_S) for answer in answers} == {(0, True)}


def test_two_actors_of_one_process_run_at_the_same_time(one: ProcMesh, tmp_path: Path) -> None:
    a, b = one.spawn("a", Log), one.spawn("b", Log)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    waits = a.meet.call_one(first, second)
    assert b.meet.call_one(second, first).get(LONG_S)
    assert waits.get(LONG_S)


@both
def test_init_runs_before_the_first_message(procs: ProcMesh, kind: type[Log]) -> None:
    log = procs.spawn("log", kind, "first", 2)
    log.add.broadcast("third")
    assert log.get.call().get(LONG_S).values() == (["first", 2, "third"],) * 2


# -- 4: remote causes never raise where something is spawned


def test_what_fails_remotely_is_told_by_the_first_get_and_by_initialized(procs: ProcMesh) -> None:
    broken: Any = procs.spawn("broken", Broken)
    with pytest.raises(SupervisionError, match="no weights"):
        broken.get.call().get(LONG_S)
    with pytest.raises((ActorError, SupervisionError), match="no weights"):
        broken.initialized.get(LONG_S)


def test_spawning_in_a_process_that_dies_at_once_does_not_raise() -> None:
    with doomed() as mesh:
        log: Any = mesh.spawn("log", Fatal)
        with pytest.raises((ActorError, SupervisionError), match="exit code 5"):
            log.initialized.get(LONG_S)
        with pytest.raises(SupervisionError, match="exit code 5"):
            mesh.initialized.get(LONG_S)


# -- 5: arguments are copies, classes of __main__ travel by value


def test_arguments_and_results_are_copies(one: ProcMesh) -> None:
    log = one.spawn("log", Log)
    mine = [0]
    assert log.grow.call_one(mine).get(LONG_S) == [0, 1]
    assert mine == [0]
    log.add.call_one(mine).get(LONG_S)
    mine.append(2)
    log.get.call_one().get(LONG_S).append("of the caller")  # type: ignore[attr-defined]
    assert log.get.call_one().get(LONG_S) == [[0]]


def test_classes_and_functions_of_main_travel_by_value_and_may_be_defined_anew() -> None:
    program = """
        from monarch_kernel.actor import *

        STEP = 1

        def step():
            return STEP

        class Counter(Actor):
            def __init__(self, start):
                self.value = start
            @endpoint
            def bump(self, function):
                self.value = function(self.value) + step()
                return self.value

        procs = this_host().spawn_procs({"r": 2}, device="cpu")
        first = procs.spawn("counter", Counter, 10)
        print(first.bump.call(lambda value: value * STEP).get().values())

        class Counter(Actor):
            @endpoint
            def bump(self):
                return "anew"

        print(procs.spawn("counter", Counter).bump.call().get().values())
        print(first.bump.call(abs).get().values())
        shutdown_context().get()
    """
    code = textwrap.dedent(program)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert run.stdout.splitlines() == ["(11, 11)", "('anew', 'anew')", "(12, 12)"], run.stdout + run.stderr


# -- 7 and 11: what an error ends


@both
def test_an_exception_with_a_reply_leaves_the_actor_alive(procs: ProcMesh, kind: type[Log]) -> None:
    log = procs.spawn("log", kind, "kept")
    for _ in range(2):
        with pytest.raises(ActorError, match="no good") as caught:
            log.fail.call("no good").get(LONG_S)
        assert isinstance(caught.value.exception, ValueError)
    assert log.get.call().get(LONG_S).values() == (["kept"],) * 2


@both
def test_a_result_that_cannot_be_pickled_leaves_the_actor_alive(one: ProcMesh, kind: type[Log]) -> None:
    log = one.spawn("log", kind, "kept")
    with pytest.raises(ActorError, match="pickle"):
        log.lock.call_one().get(LONG_S)
    assert log.get.call_one().get(LONG_S) == ["kept"]


@both
def test_an_exception_without_a_reply_ends_the_actor(one: ProcMesh, kind: type[Log]) -> None:
    log = one.spawn("log", kind)
    log.fail.broadcast("nobody asked")
    with pytest.raises(SupervisionError, match="nobody asked"):
        log.get.call_one().get(LONG_S)


@both
def test_what_is_no_exception_ends_the_actor_and_not_its_process(one: ProcMesh, kind: type[Log]) -> None:
    pid = one.run("import os; os.getpid()").get(LONG_S).item()
    log = one.spawn("log", kind)
    with pytest.raises((ActorError, SupervisionError), match="SystemExit"):
        log.leave.call_one().get(LONG_S)
    with pytest.raises(SupervisionError, match="SystemExit"):
        log.get.call_one().get(LONG_S)
    assert one.run("os.getpid()").get(LONG_S).item() == pid


def test_after_any_of_this_the_next_spawn_works_under_the_same_name(procs: ProcMesh) -> None:
    broken = procs.spawn("same", Broken)
    failed = procs.spawn("same", Log)
    failed.fail.broadcast("nobody asked")
    left = procs.spawn("same", Log)
    left.leave.call()
    assert procs.spawn("same", Log, 1).get.call().get(LONG_S).values() == ([1],) * 2
    for mesh in (broken, failed, left):
        with pytest.raises(SupervisionError):
            mesh.get.call().get(LONG_S)


# -- 9 and 14: processes die


def test_a_call_on_a_mesh_with_a_dead_rank_raises_and_a_slice_without_it_works() -> None:
    with doomed() as mesh:
        log = mesh.spawn("log", Log)
        log.die.call().exception(LONG_S)
        other = this_host().spawn_procs({"r": 1}, device="cpu")  # the host can spawn again
        assert other.spawn("log", Log).add.call(1).get(LONG_S).values() == (1,)
        other.stop(grace_s=0).get(LONG_S)

    with doomed() as mesh:
        log = mesh.spawn("log", Log)
        log.slice(r=1).die.call_one().exception(LONG_S)  # type: ignore[attr-defined]
        for call in (log.get.call, log.slice(r=1).get.call_one):  # type: ignore[attr-defined]
            begun = undisturbed_s()
            with pytest.raises(SupervisionError, match="exit code 17") as caught:
                call().get(LONG_S)
            assert undisturbed_s() - begun < QUICK_S
            assert "the last words" in str(caught.value)
        assert log.slice(r=0).add.call_one(1).get(LONG_S) == 1  # type: ignore[attr-defined]


def test_nothing_is_sent_again_by_itself() -> None:
    with doomed() as mesh:
        log = mesh.spawn("log", Log)
        log.slice(r=1).die.call_one().exception(LONG_S)  # type: ignore[attr-defined]
        for _ in range(3):
            with pytest.raises(SupervisionError):
                log.add.call("twice").get(LONG_S)
        assert log.slice(r=0).get.call_one().get(LONG_S) == []  # type: ignore[attr-defined]


def test_the_death_of_a_process_is_told_in_milliseconds() -> None:
    took_s = []
    for _ in range(3):
        with doomed() as mesh:
            log = mesh.spawn("log", Log)
            pid = log.process.call().get(LONG_S).values()[1]
            begun = undisturbed_s()
            future = log.slice(r=1).meet.call_one("/dev/null", "/nowhere")  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)
            assert isinstance(future.exception(LONG_S), SupervisionError)
            took_s.append(undisturbed_s() - begun)
    assert min(took_s) < 0.1, took_s


# -- 10: __cleanup__


def test_cleanup_runs_on_stop_with_none(one: ProcMesh, tmp_path: Path) -> None:
    tidy: Any = one.spawn("tidy", Tidy, str(tmp_path / "end"))
    tidy.stop().get(LONG_S)
    assert (tmp_path / "end").read_text() == "None"


def test_cleanup_runs_on_failure_with_the_exception(one: ProcMesh, tmp_path: Path) -> None:
    tidy = one.spawn("tidy", Tidy, str(tmp_path / "end"))
    tidy.fail.broadcast()
    with pytest.raises(SupervisionError):
        tidy.fail.call_one().get(LONG_S)
    assert (tmp_path / "end").read_text() == "ValueError('no good')"


def test_cleanup_runs_when_the_processes_are_stopped(tmp_path: Path) -> None:
    with doomed() as mesh:
        mesh.slice(r=0).spawn("tidy", Tidy, str(tmp_path / "end")).initialized.get(LONG_S)  # type: ignore[attr-defined]
        mesh.stop().get(LONG_S)
        wait_until((tmp_path / "end").exists, "the actor to be cleaned up", 3.0)
        wait_until(lambda: (tmp_path / "end").read_text() == "None", "what it writes")


# -- 12 and 13: the ends of meshes


def test_a_call_after_a_stop_holds_the_reason_that_was_given() -> None:
    with doomed() as mesh:
        log: Any = mesh.spawn("log", Log)
        log.initialized.get(LONG_S)
        mesh.stop("out of budget").get(LONG_S)
        with pytest.raises(SupervisionError, match="out of budget"):
            log.get.call().get(LONG_S)


def test_stopping_an_actor_mesh_leaves_its_processes(one: ProcMesh) -> None:
    log: Any = one.spawn("log", Log)
    log.stop("no longer needed").get(LONG_S)
    with pytest.raises(SupervisionError, match="no longer needed"):
        log.get.call_one().get(LONG_S)
    assert one.run("1").get(LONG_S).item() == 1


def test_a_mesh_lives_without_a_reference(one: ProcMesh, tmp_path: Path) -> None:
    waiting = one.spawn("nobody's", Log).meet.call_one(str(tmp_path / "mine"), str(tmp_path / "others"))
    gc.collect()
    wait_until((tmp_path / "mine").exists, "the actor to run")
    (tmp_path / "others").touch()
    assert waiting.get(LONG_S)


# -- where we differ


def test_an_error_of_several_ranks_has_them_all_and_what_succeeded(procs: ProcMesh) -> None:
    class Half(Actor):
        @endpoint
        def work(self, bad: tuple[int, ...]) -> int:
            from monarch_kernel.actor import current_rank

            if current_rank().rank in bad:
                raise ValueError(f"no good on {current_rank().rank}")
            return current_rank().rank * 10

    half: Any = procs.spawn("half", Half)
    with pytest.raises(ActorError) as both_failed:
        half.work.call((0, 1)).get(LONG_S)
    error = both_failed.value
    assert (error.rank, error.ranks, error.results) == (0, (0, 1), {})
    assert [str(failure) for failure in error.failures.values()] == ["no good on 0", "no good on 1"]
    assert {point.rank for point in error.failures} == {0, 1}
    text = str(error)
    assert text.count("no good on 0") >= 1
    assert text.count("ValueError: no good on 1") == 1
    with pytest.raises(ActorError) as one_failed:
        half.work.call((1,)).get(LONG_S)
    assert [(point.rank, value) for point, value in one_failed.value.results.items()] == [(0, 0)]
    assert isinstance(one_failed.value.exception, ValueError)


def test_an_error_names_rank_host_pid_and_the_users_line(procs: ProcMesh) -> None:
    pids = procs.run("import os; os.getpid()").get(LONG_S).values()
    log = procs.spawn("log", Log)
    with pytest.raises(ActorError) as caught:
        log.fail.call("no good").get(LONG_S)
    lines = str(caught.value).splitlines()
    assert "log.fail() failed" in lines[0]
    assert lines[1].startswith("[0-1] ValueError: no good")
    assert f"line {Log.fail.function.__code__.co_firstlineno + 2}" in lines[1]  # type: ignore[attr-defined]
    assert os.uname().nodename in str(caught.value)
    assert any(str(pid) in str(caught.value) for pid in pids)
    assert "raise ValueError(text)" in str(caught.value)
    assert str(caught.value).count("ValueError: no good") == 1


def test_reading_a_future_within_a_loop_gives_no_warning(one: ProcMesh) -> None:
    log = one.spawn("log", Log)

    async def read() -> int:
        return log.add.call_one(1).get(LONG_S)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(read()) == 1


def test_futures_of_a_stream_know_their_rank(procs: ProcMesh) -> None:
    log: Any = procs.spawn("log", Log)
    assert {future.rank: future.get(LONG_S) for future in log.add.stream(1)} == {0: 1, 1: 1}


def test_a_spawn_on_a_mesh_with_a_dead_rank_fails_at_once_and_names_it() -> None:
    with doomed() as mesh:
        mesh.slice(r=1).run("import os; os._exit(5)").exception(LONG_S)
        begun = undisturbed_s()
        with pytest.raises(SupervisionError, match="exit code 5") as caught:
            mesh.spawn("log", Log).initialized.get(LONG_S)  # type: ignore[attr-defined]
        assert undisturbed_s() - begun < QUICK_S
        assert caught.value.ranks == (1,)
        assert mesh.slice(r=0).spawn("log", Log).add.call_one(1).get(LONG_S) == 1
