"""``__cleanup__`` runs once, however the actor ends, and blocks no other actor."""

from __future__ import annotations

import asyncio
import atexit
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    Channel,
    Port,
    ProcMesh,
    SupervisionError,
    context,
    endpoint,
    this_host,
    this_proc,
)
from tests.support.ranks import LIGHT_RANKS
from tests.support.waiting import LONG_S, wait_until


class Tidy(Actor):
    """Appends a line with the reason of its end to a file."""

    def __init__(self, path: str, *, fail: bool = False, fail_at_end: bool = False) -> None:
        self.path = path
        self.fail_at_end = fail_at_end
        if fail:
            raise ValueError("not born")

    @endpoint
    def fail(self, error: BaseException) -> None:
        raise error

    @endpoint
    def rank(self) -> int:
        return 1

    @endpoint
    def sleep(self, started: str) -> None:
        Path(started).touch()
        while True:
            time.sleep(0.001)

    def __cleanup__(self, error: BaseException | None) -> None:
        with open(self.path, "a") as file:
            file.write(f"{error!r}\n")
        if self.fail_at_end:
            raise RuntimeError("no end")


class AsyncTidy(Tidy):
    """The same, asynchronous."""

    @endpoint
    async def fail(self, error: BaseException) -> None:
        raise error

    @endpoint
    async def rank(self) -> int:
        return 1

    @endpoint
    async def sleep(self, started: str) -> None:
        Path(started).touch()
        await asyncio.sleep(1000)

    async def __cleanup__(self, error: BaseException | None) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().__cleanup__(error)


both = pytest.mark.parametrize("kind", [Tidy, AsyncTidy])


@both
def test_a_stop_waits_for_the_cleanup(procs: ProcMesh, kind: type[Tidy], tmp_path: Path) -> None:
    end = tmp_path / "end"
    tidy = procs.slice(r=0).spawn("tidy", kind, str(end))
    tidy.rank.broadcast()
    tidy.stop().get(LONG_S)
    assert end.read_text() == "None\n"


@both
@pytest.mark.parametrize("error", [ValueError("no good"), SystemExit(3), KeyboardInterrupt()])
def test_the_cleanup_gets_the_failure(procs: ProcMesh, kind: type[Tidy], error: BaseException, tmp_path: Path) -> None:
    end = tmp_path / "end"
    tidy = procs.slice(r=0).spawn("tidy", kind, str(end))
    tidy.fail.broadcast(error)
    with pytest.raises(SupervisionError):
        tidy.rank.call_one().get(LONG_S)
    wait_until(end.exists, "the cleanup")
    tidy.stop().get(LONG_S)  # the actor has already ended
    assert end.read_text() == f"{error!r}\n"
    assert procs.slice(r=0).spawn("tidy", kind, str(end)).rank.call_one().get(LONG_S) == 1


@both
def test_an_error_that_is_an_answer_does_not_end_the_actor(procs: ProcMesh, kind: type[Tidy], tmp_path: Path) -> None:
    end = tmp_path / "end"
    tidy = procs.slice(r=0).spawn("tidy", kind, str(end))
    with pytest.raises(ActorError):
        tidy.fail.call_one(ValueError("no good")).get(LONG_S)
    assert tidy.rank.call_one().get(LONG_S) == 1
    assert not end.exists()
    tidy.stop().get(LONG_S)


@both
def test_an_actor_whose_init_fails_is_not_cleaned_up(procs: ProcMesh, kind: type[Tidy], tmp_path: Path) -> None:
    end = tmp_path / "end"
    tidy = procs.slice(r=0).spawn("tidy", kind, str(end), fail=True)
    with pytest.raises(ActorError, match="not born"):
        tidy.initialized.get(LONG_S)
    tidy.stop().get(LONG_S)
    assert not end.exists()


@both
def test_a_stop_raises_the_error_of_the_cleanup(procs: ProcMesh, kind: type[Tidy], tmp_path: Path) -> None:
    tidy = procs.spawn("tidy", kind, str(tmp_path / "end"), fail_at_end=True)
    with pytest.raises(ActorError, match="stopping tidy") as caught:
        tidy.stop("enough").get(LONG_S)
    assert {repr(error) for error in caught.value.failures.values()} == {"RuntimeError('no end')"}
    with pytest.raises(SupervisionError, match="enough"):
        tidy.rank.call().get(LONG_S)


@both
def test_an_interrupt_of_the_running_call_lets_the_stop_proceed(
    procs: ProcMesh, kind: type[Tidy], tmp_path: Path
) -> None:
    tidy = procs.slice(r=0).spawn("tidy", kind, str(tmp_path / "end"))
    running = tidy.sleep.call_one(str(tmp_path / "started"))
    wait_until((tmp_path / "started").exists, "the actor to sleep")
    stopping = tidy.stop()
    assert not stopping.done()
    running.interrupt()
    stopping.get(LONG_S)
    assert (tmp_path / "end").read_text() == "None\n"


@both
@pytest.mark.parametrize("busy", [False, True])
def test_the_cleanup_runs_when_the_processes_are_stopped(
    kind: type[Tidy], busy: bool, procs: ProcMesh, tmp_path: Path
) -> None:
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    tidy: Any = mesh.spawn("tidy", kind, str(tmp_path / "end"))
    tidy.initialized.get(LONG_S)
    if busy:
        tidy.sleep.call(str(tmp_path / "started"))
        wait_until((tmp_path / "started").exists, "the actor to sleep")
    mesh.stop(grace_s=LONG_S).get(LONG_S)
    wait_until(lambda: (tmp_path / "end").exists() and bool((tmp_path / "end").read_text()), "the cleanup")
    assert (tmp_path / "end").read_text() == "None\n"


class Book(Actor):
    """Holds lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @endpoint
    def add(self, line: str) -> int:
        self.lines.append(line)
        return len(self.lines)

    @endpoint
    def all(self) -> list[str]:
        return self.lines


class Signs(Actor):
    """Writes into a book at its end, and sends the answer to a port."""

    def __init__(self, book: Book, port: Port[int]) -> None:
        self.book = book
        self.port = port

    @endpoint
    def rank(self) -> int:
        return 1

    def __cleanup__(self, error: BaseException | None) -> None:
        self.port.send(self.book.add.call_one(f"{error!r}").get(LONG_S))


class AsyncSigns(Signs):
    """The same, asynchronous."""

    @endpoint
    async def rank(self) -> int:
        return 1

    async def __cleanup__(self, error: BaseException | None) -> None:  # type: ignore[override]
        self.port.send(await self.book.add.call_one(f"{error!r}"))


@pytest.mark.parametrize("kind", [Signs, AsyncSigns])
@pytest.mark.parametrize("place", ["program", "rank"])
def test_the_cleanup_of_a_stopped_process_may_call_actors(kind: type[Signs], place: str, procs: ProcMesh) -> None:
    book = (this_proc() if place == "program" else procs.slice(r=0)).spawn("book", Book)
    port, receiver = Channel[int].open()
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    mesh.spawn("signs", kind, book, port).rank.call().get(LONG_S)  # type: ignore[attr-defined]
    mesh.stop(grace_s=LONG_S).get(LONG_S)
    assert receiver.recv().get(LONG_S) == 1
    assert book.all.call_one().get(LONG_S) == ["None"]
    book.stop().get(LONG_S)  # type: ignore[attr-defined]


class Owner(Actor):
    """Spawns two actors, one of them on processes that it has spawned, too."""

    def __init__(self, procs: ProcMesh, book: Book, port: Port[int]) -> None:
        own = this_host().spawn_procs(device="cpu")
        self.spawned: list[Any] = [place.spawn("signs", Signs, book, port) for place in (procs, own)]

    @endpoint
    def check(self) -> None:
        for each in self.spawned:
            each.rank.call().get(LONG_S)


def test_all_that_a_stopped_actor_owns_cleans_up(procs: ProcMesh) -> None:
    book = procs.slice(r=0).spawn("book", Book)
    port, receiver = Channel[int].open()
    owner = procs.slice(r=1).spawn("owner", Owner, procs.slice(r=1), book, port)
    owner.check.call_one().get(LONG_S)
    owner.stop().get(LONG_S)  # type: ignore[attr-defined]
    assert sorted(receiver.recv().get(LONG_S) for _ in range(2)) == [1, 2]
    assert book.all.call_one().get(LONG_S) == ["None"] * 2


class Late(Actor):
    """Cleans up until its process ends, and sends whether that has gone on without it."""

    def __init__(self, exits: str, port: Port[str]) -> None:
        self.exits = exits
        self.port = port
        atexit.register(Path(exits).touch)

    @endpoint
    def rank(self) -> int:
        return 1

    def __cleanup__(self, error: BaseException | None) -> None:
        self.port.send("cleans up")
        server = actor_server_here()
        while not server.is_retiring and not Path(self.exits).exists():
            time.sleep(0.001)
        self.port.send("exited" if Path(self.exits).exists() else "in time")


def actor_server_here() -> Any:
    """Return the actor server of this process."""
    return context().actor_instance._host.actor_server  # type: ignore[union-attr]


def test_a_process_that_stops_waits_for_a_cleanup_that_has_started(procs: ProcMesh, tmp_path: Path) -> None:
    port, receiver = Channel[str].open()
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    late: Any = mesh.spawn("late", Late, str(tmp_path / "exits"), port)
    late.rank.call().get(LONG_S)
    stopping = late.stop()
    assert receiver.recv().get(LONG_S) == "cleans up"
    mesh.stop(grace_s=LONG_S).get(LONG_S)
    assert receiver.recv().get(LONG_S) == "in time"
    assert stopping.done()


class Counter(Actor):
    """Counts, and waits until its process has heard of the stop of another one."""

    def __init__(self) -> None:
        self.n = 0

    @endpoint
    def add(self) -> int:
        self.n += 1
        return self.n

    @endpoint
    def spawn_caller(self, procs: ProcMesh, counter: Counter, path: str) -> int:
        self.caller: Any = procs.spawn("caller", CallsAtItsEnd, counter, path)
        return self.caller.proc.call_one().get(LONG_S)

    @endpoint
    def await_stop(self, proc: int, path: str) -> None:
        client = actor_server_here().client
        wait_until(lambda: client.deaths((proc,)), "the news of the stop")
        Path(path).touch()


class CallsAtItsEnd(Actor):
    """Calls a counter in another process when that has heard that this process was stopped."""

    def __init__(self, counter: Counter, path: str) -> None:
        self.counter = counter
        self.path = path

    @endpoint
    def proc(self) -> int:
        return actor_server_here().proc

    def __cleanup__(self, error: BaseException | None) -> None:
        wait_until(Path(self.path).exists, "the other process")
        Path(f"{self.path}.answer").write_text(str(self.counter.add.call_one().get(LONG_S)))


def test_the_cleanup_in_a_stopped_process_calls_actors_of_a_process_that_knows_of_the_stop(
    procs: ProcMesh, tmp_path: Path
) -> None:
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    one = procs.slice(r=0)
    counter, watcher = one.spawn("counter", Counter), one.spawn("watcher", Counter)
    proc = counter.spawn_caller.call_one(mesh, counter, str(tmp_path / "known")).get(LONG_S)
    known = watcher.await_stop.call_one(proc, str(tmp_path / "known"))
    mesh.stop(grace_s=LONG_S).get(LONG_S)
    known.get(LONG_S)
    assert (tmp_path / "known.answer").read_text() == "1"
    assert counter.add.call_one().get(LONG_S) == 2
    counter.stop().get(LONG_S)
    watcher.stop().get(LONG_S)


IGNORES = """
import pathlib, time
class Ignores:
    def __del__(self):
        pathlib.Path({started!r}).touch()
        while True:
            time.sleep(0.001)
Ignores()
while True:
    time.sleep(0.001)
"""


def test_processes_stop_where_python_ignores_the_exception_that_ends_them(procs: ProcMesh, tmp_path: Path) -> None:
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    mesh.run(IGNORES.format(started=str(tmp_path / "started")))
    wait_until((tmp_path / "started").exists, "the function that Python calls")
    mesh.stop(grace_s=10 * LONG_S).get(LONG_S)


def test_the_cleanup_runs_when_a_script_ends(tmp_path: Path) -> None:
    program = f"""
        from monarch_kernel.actor import *

        class Tidy(Actor):
            @endpoint
            def pid(self):
                import os
                return os.getpid()
            def __cleanup__(self, error):
                open(f"{tmp_path}/{{current_rank().rank}}", "w").write(repr(error))

        print(len(this_host().spawn_procs({{"r": 2}}, device="cpu").spawn("tidy", Tidy).pid.call().get()))
    """
    run = subprocess.run(
        [sys.executable, "-c", LIGHT_RANKS + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (run.stdout, run.stderr) == ("2\n", "")
    assert {name: (tmp_path / name).read_text() for name in os.listdir(tmp_path)} == {"0": "None", "1": "None"}
