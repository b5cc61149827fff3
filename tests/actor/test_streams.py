"""Answers as they come: a wait for the next one can be interrupted, and is told of a circle; and what can't travel says so."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from monarch_kernel.actor import Actor, ActorError, Channel, ProcMesh, context, endpoint, this_host
from monarch_kernel.errors import DeadlockError, PayloadError, RemoteInterrupt

LONG_S = 60.0


class Worker(Actor):
    """Waits, and streams from others."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @endpoint
    def sleep(self, folder: str) -> None:
        try:
            Path(folder, str(context().actor_instance.rank.rank)).touch()
            while True:
                time.sleep(0.001)
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


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    mesh = this_host().spawn_procs({"r": 2}, device="cpu", name="t")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop().get()  # the session is the folder's
    cloudpickle.unregister_pickle_by_value(module)


def wait_for(folder: Path, count: int) -> None:
    deadline = time.monotonic() + LONG_S
    while len(list(folder.iterdir())) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_interrupt_of_a_stream_reaches_all_that_have_not_answered(procs: ProcMesh, tmp_path: Path) -> None:
    workers = procs.spawn("workers", Worker)

    def strike() -> None:
        wait_for(tmp_path, 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=strike).start()
    with pytest.raises(RemoteInterrupt):
        next(workers.sleep.stream(str(tmp_path)))
    assert workers.look.call().get(LONG_S).values() == (["interrupted"], ["interrupted"])
    workers.stop().get(LONG_S)


def test_a_cancel_reaches_those_that_an_endpoint_streams_from(procs: ProcMesh, tmp_path: Path) -> None:
    workers, head = procs.spawn("workers", Worker), procs.slice(r=0).spawn("head", Worker)
    future = head.stream_sleep.call_one(workers, str(tmp_path))
    wait_for(tmp_path, 2)
    future.cancel()
    assert workers.look.call().get(LONG_S).values() == (["interrupted"], ["interrupted"])
    assert head.look.call_one().get(LONG_S) == []
    for mesh in (workers, head):
        mesh.stop().get(LONG_S)


def test_who_streams_from_itself_is_told(procs: ProcMesh) -> None:
    workers = procs.spawn("workers", Worker)
    failed = workers.slice(r=0).stream.call_one(workers).exception(LONG_S)
    assert isinstance(failed, ActorError)
    assert isinstance(failed.exception, DeadlockError)
    assert "workers.look on t[0] (behind workers.stream)" in str(failed)
    workers.stop().get(LONG_S)


def test_a_copy_of_a_handle_is_the_handle(procs: ProcMesh) -> None:
    workers = procs.spawn("workers", Worker)
    port, _ = Channel[int].open()
    for handle in (procs, workers, port, this_host()):
        assert copy.copy(handle) is handle
        assert copy.deepcopy([handle])[0] is handle
    workers.stop().get(LONG_S)


def test_a_future_is_no_argument(procs: ProcMesh) -> None:
    workers = procs.spawn("workers", Worker)
    with pytest.raises(PayloadError, match="a Future stays where it was made; pass its result on"):
        workers.stream.call(workers.look.call())
    workers.stop().get(LONG_S)
