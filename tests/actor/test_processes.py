"""Where processes come from and go: bootstrap, hosts that are up or stopped, methods that are no endpoints."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    as_endpoint,
    endpoint,
    send,
    this_host,
)
from monarch_kernel.errors import PayloadError

LONG_S = 60.0


class Worker(Actor):
    """Does as it is told."""

    def __init__(self) -> None:
        self.born_with = os.environ.get("PREPARED", "nothing")
        self.value = 0

    @endpoint
    def born(self) -> str:
        return self.born_with

    @endpoint
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def double(self, amount: int = 1) -> int:
        """Not marked."""
        self.value += 2 * amount
        return self.value


class AsyncWorker(Actor):
    """The same, asynchronous."""

    @endpoint
    async def born(self) -> str:
        return ""

    async def later(self, amount: int) -> int:
        await asyncio.sleep(0)
        return amount

    def now(self, amount: int) -> int:
        return amount


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop().get()  # the session is the folder's
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def spawn(procs: ProcMesh) -> Iterator[Callable[..., ProcMesh]]:
    """Two processes with a bootstrap, ended after the test."""
    meshes = []

    def up(bootstrap: Any) -> ProcMesh:
        meshes.append(this_host().spawn_procs({"r": 2}, bootstrap=bootstrap, device="cpu"))
        return meshes[-1]

    yield up
    for mesh in meshes:
        mesh.stop(grace_s=0).get(LONG_S)


# -- bootstrap


def test_bootstrap_runs_before_any_actor_however_long_it_takes(spawn: Callable[..., ProcMesh], tmp_path: Any) -> None:
    go, begun = str(tmp_path / "go"), str(tmp_path / "begun")

    def prepare() -> None:
        open(f"{begun}-{os.getpid()}", "w").close()
        while not os.path.exists(go):
            time.sleep(0.001)
        os.environ["PREPARED"] = "well"

    mesh = spawn(prepare)
    workers = mesh.spawn("workers", Worker)
    born = workers.born.call()
    up = mesh.initialized
    deadline = time.monotonic() + LONG_S
    while len(os.listdir(tmp_path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    mesh.doing().get(LONG_S)  # the ranks have received all that was sent before
    for waits in (up, born):
        with pytest.raises(TimeoutError):
            waits.get(0.2)
    open(go, "w").close()
    assert up.get(LONG_S) is True
    assert born.get(LONG_S).values() == ("well", "well")
    assert mesh.run("import os; os.environ['PREPARED']").get(LONG_S).values() == ("well", "well")


def test_bootstrap_may_be_async(spawn: Callable[..., ProcMesh]) -> None:
    async def prepare() -> None:
        await asyncio.sleep(0)
        os.environ["PREPARED"] = "slowly"

    assert spawn(prepare).spawn("workers", Worker).born.call().get(LONG_S).values() == ("slowly", "slowly")


def test_who_takes_the_place_of_a_dead_process_runs_it_too(spawn: Callable[..., ProcMesh]) -> None:
    def prepare() -> None:
        os.environ["PREPARED"] = f"by {os.getpid()}"

    mesh = spawn(prepare)
    workers = mesh.spawn("workers", Worker)
    pids = mesh.run("import os; os.getpid()").get(LONG_S).values()
    os.kill(pids[1], signal.SIGKILL)
    deadline = time.monotonic() + LONG_S
    while not mesh.deaths():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert mesh.heal().get(LONG_S) == (1,)
    now = mesh.run("import os; os.getpid()").get(LONG_S).values()
    assert now[0] == pids[0]
    assert now[1] != pids[1]
    assert workers.born.call().get(LONG_S).values() == tuple(f"by {pid}" for pid in now)


@pytest.mark.parametrize("error", [ValueError("no weights"), SystemExit(3)])
def test_a_bootstrap_that_fails_is_told_by_the_mesh_and_by_each_spawn(
    spawn: Callable[..., ProcMesh], error: BaseException
) -> None:
    def prepare() -> None:
        raise error

    mesh = spawn(prepare)
    name = type(error).__name__
    with pytest.raises(SupervisionError, match=f"{name}.*raised by the bootstrap"):
        mesh.initialized.get(LONG_S)
    for _ in range(2):
        workers: Any = mesh.spawn("workers", Worker)
        with pytest.raises(ActorError, match=f"{name}.*raised by the bootstrap"):
            workers.initialized.get(LONG_S)
        with pytest.raises(SupervisionError, match=f"{name}.*raised by the bootstrap"):
            workers.born.call().get(LONG_S)
    assert mesh.run("1").get(LONG_S).values() == (1, 1)  # the processes can be looked into


def test_a_bootstrap_that_cannot_run_is_refused_at_once(procs: ProcMesh) -> None:
    def takes(one: int) -> None: ...

    large = bytes(1 << 20)
    for bad, error, match in (
        (3, TypeError, "must be a function, not a int"),
        (takes, TypeError, r"takes\(\) is called without arguments"),
        (lambda: len(large), PayloadError, "too large to travel"),
    ):
        with pytest.raises(error, match=match):
            this_host().spawn_procs({"r": 1}, bootstrap=bad)  # type: ignore[arg-type]


# -- hosts


def test_hosts_say_when_they_are_up_and_stop_their_processes_alone(procs: ProcMesh) -> None:
    hosts = this_host()
    assert hosts.initialized.get(LONG_S) is True
    theirs = hosts.spawn_procs({"r": 2}, device="cpu")
    worker = theirs.spawn("worker", Worker)
    theirs.initialized.get(LONG_S)
    before = procs.run("import os; os.getpid()").get(LONG_S).values()
    hosts.stop("over and out", grace_s=0).get(LONG_S)
    for mesh in (theirs, procs):
        with pytest.raises(SupervisionError, match="over and out"):
            mesh.initialized.get(LONG_S)
    with pytest.raises(SupervisionError, match="over and out"):
        worker.add.call(1).get(LONG_S)
    again = this_host().spawn_procs({"r": 2}, device="cpu")
    assert hosts.initialized.get(LONG_S) is True
    assert not set(again.run("import os; os.getpid()").get(LONG_S).values()) & set(before)
    again.stop(grace_s=0).get(LONG_S)


# -- methods that are no endpoints, and calls without an adverb


@pytest.fixture(scope="module")
def other(procs: ProcMesh) -> ProcMesh:
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    mesh.initialized.get(LONG_S)
    return mesh


def test_a_plain_method_can_be_called_as_an_endpoint(other: ProcMesh) -> None:
    workers = other.spawn("workers", Worker)
    double = as_endpoint(workers.double)
    assert double.call(3).get(LONG_S).values() == (6, 6)
    assert as_endpoint(workers.slice(r=1).double).call_one().get(LONG_S) == 8
    double.broadcast(1)
    assert workers.add.call(1).get(LONG_S).values() == (9, 11)
    with pytest.raises(TypeError, match="too many positional arguments"):
        double.call(1, 2)
    with pytest.raises(TypeError, match=r"workers\.double is no endpoint.*as_endpoint\(workers\.double\)\.call"):
        workers.double(3)
    with pytest.raises(TypeError, match="takes a method of a mesh of actors, not a builtin_function"):
        as_endpoint(len)
    assert as_endpoint(workers.add) is workers.add  # type: ignore[arg-type, call-overload, comparison-overlap]


def test_a_plain_method_of_an_async_actor_may_be_either(other: ProcMesh) -> None:
    workers = other.slice(r=0).spawn("workers", AsyncWorker)
    assert as_endpoint(workers.later).call_one(3).get(LONG_S) == 3
    assert as_endpoint(workers.now).call_one(4).get(LONG_S) == 4


def test_send_reaches_all_or_one_and_waits_for_nothing(other: ProcMesh) -> None:
    workers = other.spawn("workers", Worker)
    send(workers.add, (5,), {})
    send(workers.add, (), {"amount": 5}, selection="all")
    assert workers.add.call(0).get(LONG_S).values() == (10, 10)
    send(workers.add, (7,), {}, selection="choose")
    assert sorted(workers.add.call(0).get(LONG_S).values()) == [10, 17]
    with pytest.raises(TypeError, match="missing a required argument"):
        send(workers.add, (), {})
    with pytest.raises(ValueError, match="'all' or 'choose'"):
        send(workers.add, (1,), {}, selection="some")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes an endpoint"):
        send(len, (1,), {})  # type: ignore[arg-type]
