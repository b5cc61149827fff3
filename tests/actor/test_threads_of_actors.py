"""Threads that an endpoint starts belong to its actor: they know its rank, and the actor owns what they spawn."""

from __future__ import annotations

import _thread
import asyncio
import os
import queue
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ProcMesh,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_proc,
)
from monarch_kernel.errors import BufferGoneError, RemoteInterrupt, SupervisionError
from monarch_kernel.rdma import RDMABuffer
from monarch_kernel.runtime.controller import interrupt_effects
from tests.support.actors import Counter, main_thread_waits_for_a_future
from tests.support.waiting import LONG_S, wait_until

PROCS = {"r": 2}

Place = tuple[int, dict[str, int], int, str, int]


def place() -> Place:
    """Return all that the calling code can know about its location."""
    instance = context().actor_instance
    return current_rank().rank, dict(current_size()), instance.rank.rank, current_actor_name(), instance.actor_id


def in_a_thread(function: Callable[[], Any]) -> Any:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(function())).start()
    return answers.get(timeout=LONG_S)


class Threaded(Actor):
    """Returns its location in all kinds of threads."""

    def __init__(self) -> None:
        self.born = in_a_thread(place)
        self.questions: queue.SimpleQueue[queue.SimpleQueue[Place] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.answer)
        self.thread.start()
        self.pool = ThreadPoolExecutor(1)

    def answer(self) -> None:
        while (answers := self.questions.get()) is not None:
            answers.put(place())

    def __cleanup__(self, error: BaseException | None) -> None:
        self.questions.put(None)
        self.thread.join()
        self.pool.shutdown()

    @endpoint
    def places(self) -> list[Place]:
        """Return the locations; the first one is that of the endpoint itself."""
        answers: queue.SimpleQueue[Place] = queue.SimpleQueue()
        timer = threading.Timer(0, lambda: answers.put(place()))
        timer.start()
        with ThreadPoolExecutor(1) as pool, ThreadPool(1) as others:
            return [
                place(),
                in_a_thread(place),
                in_a_thread(lambda: in_a_thread(place)),
                answers.get(timeout=LONG_S),
                pool.submit(place).result(LONG_S),
                *pool.map(lambda _: place(), [0]),
                in_a_thread(lambda: pool.submit(place).result(LONG_S)),
                others.apply(place),
                asyncio.run(asyncio.to_thread(place)),
                in_a_thread(lambda: asyncio.run(asyncio.to_thread(place))),
            ]

    @endpoint
    def lasting(self) -> list[Place]:
        """Return the locations of two threads that outlive a call: one from the constructor, and one that it has joined."""
        answers: queue.SimpleQueue[Place] = queue.SimpleQueue()
        self.questions.put(answers)
        return [self.born, answers.get(timeout=LONG_S)]

    @endpoint
    def pooled(self) -> Place:
        """Return the location of work in a pool that calls share."""
        return self.pool.submit(place).result(LONG_S)

    @endpoint
    def native(self) -> Place:
        """Return the location of a thread that Python's `threading` has not started."""
        answers: queue.SimpleQueue[Place] = queue.SimpleQueue()
        _thread.start_new_thread(lambda: answers.put(place()), ())
        return answers.get(timeout=LONG_S)

    @endpoint
    def spawn_in_a_thread(self, procs: Any) -> Any:
        return in_a_thread(lambda: procs.spawn("below", Counter, 5))

    @endpoint
    def lend_in_a_thread(self) -> Any:
        return in_a_thread(lambda: RDMABuffer(bytearray(b"abc")))


class AsyncThreaded(Actor):
    """The same, on an event loop."""

    @endpoint
    async def places(self) -> list[Place]:
        loop = asyncio.get_running_loop()

        async def in_a_task() -> Place:
            return place()

        return [
            place(),
            await asyncio.to_thread(place),
            await asyncio.to_thread(in_a_thread, place),
            await loop.run_in_executor(None, place),
            await asyncio.create_task(in_a_task()),
        ]

    @endpoint
    async def from_a_thread(self) -> Place:
        """Return the location of a coroutine that another thread has scheduled on the loop."""
        loop = asyncio.get_running_loop()

        async def on_the_loop() -> Place:
            return place()

        return await asyncio.to_thread(
            in_a_thread, lambda: asyncio.run_coroutine_threadsafe(on_the_loop(), loop).result(LONG_S)
        )


@pytest.fixture(params=["ranks", "program"])
def where(request: pytest.FixtureRequest, procs: ProcMesh) -> Any:
    return procs if request.param == "ranks" else this_proc()


def expected(mesh: Any, name: str) -> list[Place]:
    """Return the expected location on each rank for an actor that was spawned on the whole mesh."""
    return [(rank, dict(mesh.extent), rank, name, mesh._actor) for rank in range(len(mesh))]


@pytest.mark.parametrize("kind", [Threaded, AsyncThreaded])
def test_threads_that_an_endpoint_starts_know_its_location(where: ProcMesh, kind: Any) -> None:
    actors = where.spawn("actors", kind)
    for found, right in zip(actors.places.call().get(LONG_S).values(), expected(actors, "actors"), strict=True):
        assert found == [right] * len(found)
    actors.stop().get(LONG_S)


def test_threads_of_a_call_to_a_slice_number_ranks_within_the_slice(procs: ProcMesh) -> None:
    actors: Any = procs.spawn("actors", Threaded)
    found = actors.slice(r=1).places.call_one().get(LONG_S)
    assert found == [(0, {}, 1, "actors", actors._actor)] * len(found)
    actors.stop().get(LONG_S)


def test_threads_that_outlive_a_call_keep_the_location_of_the_actor(where: ProcMesh) -> None:
    actors: Any = where.spawn("actors", Threaded)
    assert actors.lasting.call().get(LONG_S).values() == tuple([right] * 2 for right in expected(actors, "actors"))
    actors.stop().get(LONG_S)


def test_work_in_a_pool_has_the_location_of_the_call_that_submits_it(procs: ProcMesh) -> None:
    actors: Any = procs.spawn("actors", Threaded)
    number = actors._actor
    assert actors.pooled.call().get(LONG_S).values()[1] == (1, {"r": 2}, 1, "actors", number)
    assert actors.slice(r=1).pooled.call_one().get(LONG_S) == (0, {}, 1, "actors", number)
    actors.stop().get(LONG_S)


def test_a_coroutine_that_a_thread_schedules_on_the_loop_knows_the_location(where: ProcMesh) -> None:
    actors: Any = where.spawn("actors", AsyncThreaded)
    assert actors.from_a_thread.call().get(LONG_S).values() == tuple(expected(actors, "actors"))
    actors.stop().get(LONG_S)


def test_cells_and_threads_of_native_code_know_the_rank_of_their_process(procs: ProcMesh) -> None:
    actors = procs.slice(r=1).spawn("actors", Threaded)
    of_process = [(rank, {"r": 2}, rank, "client", 0) for rank in range(2)]
    assert actors.native.call_one().get(LONG_S) == of_process[1]
    actors.stop().get(LONG_S)
    assert procs.map(place).get(LONG_S).values() == tuple(of_process)
    assert procs.map(lambda: in_a_thread(place)).get(LONG_S).values() == tuple(of_process)
    assert in_a_thread(place) == (0, {}, 0, "client", 0)


def test_actors_that_a_thread_of_an_actor_spawns_end_with_the_actor(procs: ProcMesh) -> None:
    actors = procs.slice(r=0).spawn("actors", Threaded)
    below = actors.spawn_in_a_thread.call_one(procs.slice(r=1)).get(LONG_S)
    assert below.value.call_one().get(LONG_S) == 5
    actors.stop().get(LONG_S)
    with pytest.raises(SupervisionError, match="its owner"):
        below.value.call_one().get(LONG_S)


def test_memory_that_a_thread_of_an_actor_lends_is_freed_with_the_actor(procs: ProcMesh) -> None:
    actors = procs.slice(r=0).spawn("actors", Threaded)
    buffer = actors.lend_in_a_thread.call_one().get(LONG_S)
    copy = bytearray(3)
    buffer.read_into(copy).get(LONG_S)
    assert copy == b"abc"
    actors.stop().get(LONG_S)
    with pytest.raises(BufferGoneError):
        buffer.read_into(copy).get(LONG_S)


class Reader(Actor):
    """Reads a file in a thread of a pool."""

    def read(self, path: str) -> None:
        Path(path).read_bytes()

    @endpoint
    async def wait(self, path: str) -> None:
        await asyncio.gather(asyncio.to_thread(self.read, path))


def test_an_interrupt_names_what_an_async_endpoint_leaves_in_a_thread_pool(
    procs: ProcMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt_effects, "STOP_S", LONG_S)  # the endpoint ends before the text is made
    reader = procs.slice(r=1).spawn("reader", Reader)
    os.mkfifo(tmp_path / "pipe")
    writers: list[int] = []

    def interrupt() -> None:
        writers.append(os.open(tmp_path / "pipe", os.O_WRONLY))  # waits until the thread reads
        wait_until(main_thread_waits_for_a_future, "the main thread to wait")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    waiting = reader.wait.call_one(str(tmp_path / "pipe"))
    thread.start()
    with pytest.raises(RemoteInterrupt) as caught:
        waiting.get(LONG_S)
    thread.join()
    place = rf"{re.escape(__file__)}, line \d+, in a thread of a pool"
    going_on = rf"\[0\] goes on with reader\.wait until Path\(path\)\.read_bytes\(\) returns \({place}\)"
    assert re.fullmatch(rf"the wait for reader\.wait was interrupted; {going_on}", str(caught.value))
    os.close(writers[0])  # ends the thread
    reader.stop().get(LONG_S)
