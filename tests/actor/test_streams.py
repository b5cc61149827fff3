"""Streams of answers: an interrupt ends the wait for the next answer, a deadlock is an error; futures can't be pickled."""

from __future__ import annotations

import copy
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import ActorError, Channel, ProcMesh, endpoint, this_host
from monarch_kernel.errors import DeadlockError, PayloadError, RemoteInterrupt
from tests.support.actors import Worker, main_thread_waits_for_a_future
from tests.support.waiting import LONG_S, wait_for_files, wait_until


class StreamingWorker(Worker):
    """Records interrupts, and streams from other actors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @endpoint
    def sleep(self, folder: str) -> None:
        try:
            Worker.sleep.function(self, folder)  # type: ignore[attr-defined]
        except KeyboardInterrupt:
            self.seen.append("interrupted")
            raise

    @endpoint
    def look(self) -> list[str]:
        return self.seen

    @endpoint
    def stream(self, mesh: Any) -> list[Any]:
        return [future.get() for future in mesh.look.stream()]

    @endpoint
    def stream_sleep(self, mesh: Any, folder: str) -> list[Any]:
        return [future.get() for future in mesh.sleep.stream(folder)]


def test_an_interrupt_of_a_stream_reaches_all_ranks_that_have_not_answered(procs: ProcMesh, tmp_path: Path) -> None:
    workers = procs.spawn("workers", StreamingWorker)

    def interrupt() -> None:
        wait_for_files(tmp_path, "0", "1")
        wait_until(main_thread_waits_for_a_future, "the main thread to wait")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    answers = workers.sleep.stream(str(tmp_path))
    thread.start()
    with pytest.raises(RemoteInterrupt):
        next(answers)
    thread.join()
    assert workers.look.call().get(LONG_S).values() == (["interrupted"], ["interrupted"])
    workers.stop().get(LONG_S)


def test_a_cancel_reaches_the_actors_that_an_endpoint_streams_from(procs: ProcMesh, tmp_path: Path) -> None:
    workers, head = procs.spawn("workers", StreamingWorker), procs.slice(r=0).spawn("head", StreamingWorker)
    future = head.stream_sleep.call_one(workers, str(tmp_path))
    wait_for_files(tmp_path, "0", "1")
    future.cancel()
    assert workers.look.call().get(LONG_S).values() == (["interrupted"], ["interrupted"])
    assert head.look.call_one().get(LONG_S) == []
    for mesh in (workers, head):
        mesh.stop().get(LONG_S)


def test_an_actor_that_streams_from_itself_gets_a_deadlock_error(procs: ProcMesh) -> None:
    workers = procs.spawn("workers", StreamingWorker)
    failed = workers.slice(r=0).stream.call_one(workers).exception(LONG_S)
    assert isinstance(failed, ActorError)
    assert isinstance(failed.exception, DeadlockError)
    assert "workers.look on t[0] (behind workers.stream)" in str(failed)
    workers.stop().get(LONG_S)


def test_a_copy_of_a_handle_is_the_handle(procs: ProcMesh) -> None:
    workers = procs.spawn("workers", StreamingWorker)
    port, _ = Channel[int].open()
    for handle in (procs, workers, port, this_host()):
        assert copy.copy(handle) is handle
        assert copy.deepcopy([handle])[0] is handle
    workers.stop().get(LONG_S)


def test_a_future_cannot_be_an_argument(procs: ProcMesh) -> None:
    workers = procs.spawn("workers", StreamingWorker)
    with pytest.raises(PayloadError, match="a Future stays where it was made; pass its result on"):
        workers.stream.call(workers.look.call())
    workers.stop().get(LONG_S)
