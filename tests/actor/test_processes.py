"""Processes: their location, their bootstrap, hosts that are up or stopped, and plain methods as endpoints."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    HostMesh,
    ProcMesh,
    SupervisionError,
    as_endpoint,
    endpoint,
    send,
    this_host,
    this_proc,
)
from monarch_kernel.actor.host_mesh import view_of
from monarch_kernel.errors import PayloadError
from tests.support.actors import Worker
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until


class PreparedWorker(Worker):
    """Records in the constructor how the bootstrap has prepared its process."""

    def __init__(self) -> None:
        super().__init__()
        self.made_with = os.environ.get("PREPARED", "nothing")

    @endpoint
    def prepared(self) -> str:
        return self.made_with

    def double(self, amount: int = 1) -> int:
        """Not marked as an endpoint."""
        self.count += 2 * amount
        return self.count

    async def later(self, amount: int) -> int:
        """A coroutine function in an actor whose endpoints are sync."""
        return amount


class AsyncAdder(Actor):
    """Has sync and async methods that are not marked as endpoints."""

    @endpoint
    async def marked(self) -> str:
        return ""

    async def later(self, amount: int) -> int:
        await asyncio.sleep(0)
        return amount

    def now(self, amount: int) -> int:
        return amount


@pytest.fixture
def spawn(procs: ProcMesh) -> Iterator[Callable[..., ProcMesh]]:
    """Spawn two processes with a bootstrap, and end them after the test."""
    meshes = []

    def up(bootstrap: Any) -> ProcMesh:
        meshes.append(this_host().spawn_procs({"r": 2}, bootstrap=bootstrap, device="cpu"))
        return meshes[-1]

    yield up
    for mesh in meshes:
        mesh.stop(grace_s=0).get(LONG_S)


# -- the location of processes


def test_this_host_is_one_host_without_axes(procs: ProcMesh) -> None:
    hosts = this_host()
    assert isinstance(hosts, HostMesh)
    assert (dict(hosts.extent), hosts.size(), len(hosts)) == ({}, 1, 1)


def test_this_proc_is_the_process_of_the_caller_without_axes(procs: ProcMesh) -> None:
    here = this_proc()
    assert isinstance(here, ProcMesh)
    assert (dict(here.extent), len(here)) == ({}, 1)


class Child(Actor):
    def __init__(self) -> None:
        self.parent_at_first = os.getppid()

    @endpoint
    def parents(self) -> tuple[int, int]:
        return self.parent_at_first, os.getppid()


def test_the_host_agent_is_the_parent_of_a_process_before_any_actor_runs_there(procs: ProcMesh) -> None:
    """A process is forked by one that forks others after it; the first actors would see that one."""
    mesh = this_host().spawn_procs({"r": 8}, device="cpu")
    found = mesh.spawn("children", Child).parents.call().get(LONG_S).values()
    agent = procs.spawn("here", Child).parents.call().get(LONG_S).values()[0][1]
    assert {pid for pair in found for pid in pair} == {agent}
    mesh.stop(grace_s=0).get(LONG_S)


def test_spawn_procs_gives_the_axes_of_hosts_then_those_per_host_in_order() -> None:
    hosts = this_host().flatten("hosts")
    mesh = hosts.spawn_procs(per_host={"tp": 1, "dp": 2}, name="ordered", env={"SPEC_X": "7"}, device="cpu")
    assert list(mesh.extent.items()) == [("hosts", 1), ("tp", 1), ("dp", 2)]
    assert mesh.name == "ordered"
    assert mesh.run("import os; os.environ['SPEC_X']").get(LONG_S).values() == ("7", "7")
    with pytest.raises(ValueError, match="hosts"):
        hosts.spawn_procs(per_host={"hosts": 2}, device="cpu")
    mesh.stop(grace_s=0).get(LONG_S)


def test_processes_here_have_the_environment_of_now_and_their_replacements_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look = "import os; [os.environ.get(name) for name in ('SPEC_SET', 'SPEC_OVER', 'HOME', 'LOCAL_RANK')]"
    monkeypatch.setenv("SPEC_SET", "early")
    monkeypatch.setenv("SPEC_OVER", "of the program")
    monkeypatch.setenv("LOCAL_RANK", "77")
    monkeypatch.delenv("HOME")
    mesh = this_host().spawn_procs({"r": 2}, env={"SPEC_OVER": "of the mesh"}, device="cpu")
    expected = ["early", "of the mesh", None, None]
    assert mesh.run(look).get(LONG_S).values() == (expected, expected)
    monkeypatch.setenv("SPEC_SET", "late")
    monkeypatch.delenv("SPEC_OVER")
    os.kill(mesh.run("import os; os.getpid()").get(LONG_S).values()[1], signal.SIGKILL)
    wait_until(mesh.deaths, "the death to be known")
    assert mesh.heal().get(LONG_S) == (1,)
    assert mesh.run(look).get(LONG_S).values() == (expected, expected)
    mesh.stop(grace_s=0).get(LONG_S)


def test_spawn_procs_spawn_and_calls_return_before_the_processes_are_up(
    spawn: Callable[..., ProcMesh], tmp_path: Path, bar: Bar
) -> None:
    with bar.below(0.25, "spawning and calling"):
        mesh = spawn(lambda: wait_until((tmp_path / "go").exists, "the test"))
        workers = mesh.spawn("workers", Worker)
        future = workers.rank.call()
    assert not future.done()
    (tmp_path / "go").touch()
    assert future.get(LONG_S).values() == (0, 1)
    assert mesh.initialized.get(LONG_S) is True
    assert workers.initialized.get(LONG_S) is True  # type: ignore[attr-defined]


# -- fresh processes

FRESH = "import os, sys; 'torch' in sys.modules, os.environ.get('CUDA_VISIBLE_DEVICES'), os.getpid()"


def test_variables_that_torch_reads_at_its_import_have_their_effect(procs: ProcMesh) -> None:
    env = {"PYTHONHASHSEED": "7", "CUDA_VISIBLE_DEVICES": "94,95"}
    mesh = this_host().spawn_procs({"r": 1}, env=env)
    try:
        has_torch, visible, pid = mesh.run(FRESH).get(LONG_S).item(r=0)
        assert (has_torch, visible) == (False, "94,95")  # there are no such GPUs, and the user has named them
        hashed = mesh.run("hash('seeded')").get(LONG_S).item(r=0)
        os.kill(pid, signal.SIGKILL)
        wait_until(mesh.deaths, "the death to be known")
        assert mesh.heal().get(LONG_S) == (0,)
        assert mesh.run("hash('seeded')").get(LONG_S).item(r=0) == hashed
    finally:
        mesh.stop(grace_s=0).get(LONG_S)


def test_processes_can_see_all_gpus_that_the_user_has_named(procs: ProcMesh) -> None:
    mesh = this_host().spawn_procs({"r": 2}, env={"CUDA_VISIBLE_DEVICES": "4,5"}, device="visible")
    try:
        assert [seen for _, seen, _ in mesh.run(FRESH).get(LONG_S).values()] == ["4,5", "4,5"]
    finally:
        mesh.stop(grace_s=0).get(LONG_S)


# -- bootstrap


def test_bootstrap_runs_before_any_actor_however_long_it_takes(spawn: Callable[..., ProcMesh], tmp_path: Path) -> None:
    def prepare() -> None:
        (tmp_path / f"runs-{os.getpid()}").touch()
        wait_until((tmp_path / "go").exists, "the test")
        os.environ["PREPARED"] = "well"

    mesh = spawn(prepare)
    workers = mesh.spawn("workers", PreparedWorker)
    prepared = workers.prepared.call()
    up = mesh.initialized
    wait_until(lambda: len(os.listdir(tmp_path)) == 2, "both bootstraps")
    mesh.doing().get(LONG_S)  # the ranks have received all earlier messages
    for waits in (up, prepared):
        with pytest.raises(TimeoutError):
            waits.get(0.2)
    (tmp_path / "go").touch()
    assert up.get(LONG_S) is True
    assert prepared.get(LONG_S).values() == ("well", "well")
    assert mesh.run("import os; os.environ['PREPARED']").get(LONG_S).values() == ("well", "well")


def test_bootstrap_can_be_async(spawn: Callable[..., ProcMesh]) -> None:
    async def prepare() -> None:
        await asyncio.sleep(0)
        os.environ["PREPARED"] = "slowly"

    assert spawn(prepare).spawn("workers", PreparedWorker).prepared.call().get(LONG_S).values() == ("slowly", "slowly")


def test_the_process_that_replaces_a_dead_one_runs_the_bootstrap_too(spawn: Callable[..., ProcMesh]) -> None:
    def prepare() -> None:
        os.environ["PREPARED"] = f"by {os.getpid()}"

    mesh = spawn(prepare)
    workers = mesh.spawn("workers", PreparedWorker)
    pids = mesh.run("import os; os.getpid()").get(LONG_S).values()
    os.kill(pids[1], signal.SIGKILL)
    wait_until(mesh.deaths, "the death to be known")
    assert mesh.heal().get(LONG_S) == (1,)
    now = mesh.run("import os; os.getpid()").get(LONG_S).values()
    assert now[0] == pids[0]
    assert now[1] != pids[1]
    assert workers.prepared.call().get(LONG_S).values() == tuple(f"by {pid}" for pid in now)


@pytest.mark.parametrize("is_async", [False, True])
def test_bootstrap_can_call_an_actor_that_it_spawns_here(spawn: Callable[..., ProcMesh], is_async: bool) -> None:
    def call() -> None:
        adder: Any = this_proc().spawn("adder", Worker)
        os.environ["PREPARED"] = f"with {adder.add.call_one(3).get(LONG_S)}"

    async def call_async() -> None:
        adder: Any = this_proc().spawn("adder", Worker)
        os.environ["PREPARED"] = f"with {await adder.add.call_one(3)}"

    workers: Any = spawn(call_async if is_async else call).spawn("workers", PreparedWorker)
    assert workers.prepared.call().get(LONG_S).values() == ("with 3", "with 3")


@pytest.mark.parametrize("error", [ValueError("no weights"), SystemExit(3)])
def test_the_mesh_and_each_spawn_raise_the_error_of_the_bootstrap(
    spawn: Callable[..., ProcMesh], error: BaseException
) -> None:
    def prepare() -> None:
        raise error

    mesh = spawn(prepare)
    name = type(error).__name__
    with pytest.raises(SupervisionError, match=f"{name}.*raised by the bootstrap"):
        mesh.initialized.get(LONG_S)
    for _ in range(2):
        workers: Any = mesh.spawn("workers", PreparedWorker)
        with pytest.raises(ActorError, match=f"{name}.*raised by the bootstrap"):
            workers.initialized.get(LONG_S)
        with pytest.raises(SupervisionError, match=f"{name}.*raised by the bootstrap"):
            workers.prepared.call().get(LONG_S)
    assert mesh.run("1").get(LONG_S).values() == (1, 1)  # the processes still run cells


def test_spawn_procs_refuses_a_bootstrap_that_cannot_run(procs: ProcMesh) -> None:
    def takes(one: int) -> None: ...

    large = bytes(1 << 20)
    for bad, error, match in (
        (3, TypeError, "must be a function, not a int"),
        (takes, TypeError, r"takes\(\) is called without arguments"),
        (lambda: len(large), PayloadError, "too large to send"),
    ):
        with pytest.raises(error, match=match):
            this_host().spawn_procs({"r": 1}, bootstrap=bad)  # type: ignore[arg-type]


# -- hosts


def test_a_stop_of_one_view_of_hosts_leaves_the_processes_of_the_other(procs: ProcMesh) -> None:
    one, other = view_of(this_host()), view_of(this_host())
    theirs, others = (hosts.spawn_procs({"r": 1}, device="cpu") for hosts in (pickle.loads(pickle.dumps(one)), other))
    assert one.initialized.get(LONG_S) is theirs.initialized.get(LONG_S) is others.initialized.get(LONG_S) is True
    one.stop("over and out", grace_s=0).get(LONG_S)
    with pytest.raises(SupervisionError, match="over and out"):
        theirs.initialized.get(LONG_S)
    for mesh in (others, procs):
        assert set(mesh.run("'here'").get(LONG_S).values()) == {"here"}
    other.slice().stop(grace_s=0).get(LONG_S)
    with pytest.raises(SupervisionError):
        others.initialized.get(LONG_S)
    assert set(procs.run("'here'").get(LONG_S).values()) == {"here"}


def test_hosts_say_when_they_are_up_and_stop_their_processes_but_not_the_agent(procs: ProcMesh) -> None:
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


def test_a_call_after_a_stop_holds_the_reason_of_the_stop(spawn: Callable[..., ProcMesh]) -> None:
    mesh = spawn(None)
    worker: Any = mesh.spawn("worker", Worker)
    worker.initialized.get(LONG_S)
    mesh.stop("out of budget").get(LONG_S)
    with pytest.raises(SupervisionError, match="out of budget"):
        worker.add.call().get(LONG_S)


# -- plain methods as endpoints, and `send`


@pytest.fixture(scope="module")
def other(procs: ProcMesh) -> Iterator[ProcMesh]:
    """Processes that start after the end of those of ``procs``."""
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


def test_a_plain_method_can_be_called_as_an_endpoint(other: ProcMesh) -> None:
    workers = other.spawn("workers", PreparedWorker)
    double = as_endpoint(workers.double)
    assert double.call(3).get(LONG_S).values() == (6, 6)
    assert as_endpoint(workers.slice(r=1).double).call_one().get(LONG_S) == 8
    double.broadcast(1)
    assert workers.add.call(1).get(LONG_S).values() == (9, 11)
    with pytest.raises(TypeError, match="too many positional arguments"):
        double.call(1, 2)
    with pytest.raises(TypeError, match=r"workers\.double is not an endpoint.*as_endpoint\(workers\.double\)\.call"):
        workers.double(3)
    with pytest.raises(TypeError, match="takes a method of a mesh of actors, not a builtin_function"):
        as_endpoint(len)
    with pytest.raises(ActorError, match="TypeError: later is an async def method") as caught:
        as_endpoint(workers.later).call(1).get(LONG_S)
    assert isinstance(caught.value.exception, TypeError)
    assert workers.add.call(0).get(LONG_S).values() == (9, 11)
    assert as_endpoint(workers.add) is workers.add  # type: ignore[arg-type, call-overload, comparison-overlap]


def test_a_plain_method_of_an_async_actor_can_be_sync_or_async(other: ProcMesh) -> None:
    workers = other.slice(r=0).spawn("adder", AsyncAdder)
    assert as_endpoint(workers.later).call_one(3).get(LONG_S) == 3
    assert as_endpoint(workers.now).call_one(4).get(LONG_S) == 4


def test_send_reaches_all_actors_or_one_and_does_not_wait(other: ProcMesh) -> None:
    workers = other.spawn("workers", PreparedWorker)
    send(workers.add, (5,), {})
    send(workers.add, (), {"amount": 5}, selection="all")
    assert workers.add.call(0).get(LONG_S).values() == (10, 10)
    send(workers.add, (7,), {}, selection="choose")
    assert sorted(workers.add.call(0).get(LONG_S).values()) == [10, 17]
    with pytest.raises(TypeError, match="missing a required argument"):
        send(workers.wait_for, (), {})
    with pytest.raises(ValueError, match="'all' or 'choose'"):
        send(workers.add, (1,), {}, selection="some")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes an endpoint"):
        send(len, (1,), {})  # type: ignore[arg-type]
