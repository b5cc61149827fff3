"""What scripts for PyTorch Monarch rely on, besides what the other modules test."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import monarch_kernel.actor as api
from monarch_kernel.actor import (
    Actor,
    ActorError,
    Channel,
    ProcMesh,
    SupervisionError,
    context,
    endpoint,
    this_host,
    this_proc,
)
from monarch_kernel.errors import MeshFailure, PayloadError
from monarch_kernel.rdma import RDMABuffer
from monarch_kernel.runtime.worker import actor_server
from tests.support.actors import Worker
from tests.support.waiting import LONG_S, wait_until


class Leaving(BaseException):
    """No Exception."""


class Unready:
    """Its state raises."""

    def __getstate__(self) -> dict[str, Any]:
        raise LookupError("no state yet")


class Fragile(Actor):
    """Fails in the ways that matter."""

    def __init__(self, broken: bool = False) -> None:
        if broken:
            raise ValueError("broken")

    @endpoint
    def leave(self) -> None:
        raise Leaving("gone")

    @endpoint
    def own_host(self) -> bool:
        return context().actor_instance.proc.host_mesh.extent == this_host().extent

    @endpoint
    def take(self, value: object) -> object:
        return value


def doubled(method: Any) -> Any:
    """Decorate a method without `functools.wraps`."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return 2 * method(self, *args, **kwargs)

    return wrapper


class Decorated(Actor):
    """Its endpoints are functions of other names."""

    @endpoint
    @doubled
    def first(self, value: int) -> int:
        return value

    @endpoint
    @doubled
    def second(self, value: int) -> int:
        raise ValueError(f"no {value}")

    third = endpoint(lambda self, value: value + 1)
    fourth = third


class AsyncFragile(Actor):
    """The same on an event loop."""

    @endpoint
    async def leave(self) -> None:
        raise Leaving("gone")


class Endless(Actor):
    """Its constructor waits for a file that does not come, until the test ends."""

    def __init__(self, gate: str) -> None:
        try:
            while not os.path.exists(gate):
                threading.Event().wait(0.01)
        except KeyboardInterrupt:
            while not os.path.exists(gate):  # it does not end even then
                threading.Event().wait(0.01)

    @endpoint
    def value(self) -> int:
        return 1


class Trace:
    """Leaves a file when it is collected."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __del__(self) -> None:
        Path(self.file).write_text(COLLECTED)


COLLECTED = "collected"


class Keeper(Actor):
    """Keeps objects in itself, in its class, in a variable of its module, and in ``__main__``."""

    shared: Trace

    def __init__(self, directory: str) -> None:
        global KEPT
        pid = os.getpid()
        self.kept = Trace(f"{directory}/actor-{pid}")
        type(self).shared = Trace(f"{directory}/class-{pid}")
        KEPT = Trace(f"{directory}/module-{pid}")
        vars(sys.modules["__main__"])["kept"] = Trace(f"{directory}/main-{pid}")

    @endpoint
    def pid(self) -> int:
        return os.getpid()


KEPT: Trace | None = None


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    """Collect the failures that no owner has handled."""
    found: list[MeshFailure] = []
    monkeypatch.setattr(api, "unhandled_fault_hook", found.append)
    return found


@pytest.mark.parametrize("kind", [Fragile, AsyncFragile])
def test_an_error_that_is_no_exception_is_a_supervision_error(procs: ProcMesh, faults: Any, kind: Any) -> None:
    leaver = procs.slice(r=0).spawn("leaver", kind)
    for call in (leaver.leave.call_one, leaver.leave.choose, leaver.leave.call):
        with pytest.raises(SupervisionError, match=r"Leaving: gone") as caught:
            call().get(LONG_S)
        assert isinstance(caught.value, RuntimeError)
        leaver = procs.slice(r=0).spawn("leaver", kind)
    error = leaver.leave.call_one().exception(LONG_S)
    assert isinstance(error, ActorError)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


def test_a_bootstrap_that_raises_is_an_actor_error(procs: ProcMesh) -> None:
    def boot() -> None:
        raise ValueError("no weights")

    mesh = this_host().spawn_procs({"r": 1}, bootstrap=boot, device="cpu")
    error = mesh.initialized.exception(LONG_S)
    mesh.stop(grace_s=0).get(LONG_S)
    assert (type(error).__name__, isinstance(error, ActorError)) == ("ActorError", True)
    assert isinstance(error, SupervisionError)


def test_the_hook_is_called_for_each_rank(procs: ProcMesh, faults: list[MeshFailure]) -> None:
    for _ in range(3):
        procs.spawn("fragile", Fragile, True)
        wait_until(lambda: len(faults) == 2, "a call for each rank")
        assert sorted(failure.crashed_ranks for failure in faults) == [(0,), (1,)]
        assert all("ValueError: broken" in str(failure) for failure in faults)
        faults.clear()


def test_what_the_state_of_an_argument_raises_comes_as_it_is(procs: ProcMesh) -> None:
    fragile: Any = procs.spawn("fragile", Fragile)
    port, _ = Channel.open()
    for send in (
        lambda: fragile.take.call(Unready()),
        lambda: fragile.take.broadcast([1, Unready()]),
        lambda: procs.spawn("fragile", Fragile, Unready()),  # type: ignore[arg-type]
        lambda: port.send({"a": Unready()}),
    ):
        with pytest.raises(LookupError) as caught:
            send()
        assert caught.value.args == ("no state yet",)
        assert "can't be pickled" in "".join(caught.value.__notes__)
    with pytest.raises(PayloadError):
        fragile.take.call(threading.Lock())
    assert fragile.take.call(5).get(LONG_S).values() == (5, 5)


def test_handles_can_be_pickled_in_the_program(procs: ProcMesh) -> None:
    worker: Any = procs.spawn("worker", Worker)
    worker.add.call(5).get(LONG_S)
    for dumps in (pickle.dumps, cloudpickle.dumps):
        again, mesh, part = pickle.loads(dumps((worker, procs, worker.slice(r=1))))
        assert again.add.call(0).get(LONG_S) == worker.add.call(0).get(LONG_S)
        assert part.add.call_one(0).get(LONG_S) == 5
        assert mesh.spawn("other", Worker).add.call(2).get(LONG_S).values() == (2, 2)
    hosts = pickle.loads(pickle.dumps(this_host()))
    assert hosts.extent == this_host().extent


def test_endpoints_have_the_names_of_the_class_not_of_the_functions(procs: ProcMesh) -> None:
    decorated: Any = procs.slice(r=0).spawn("decorated", Decorated)
    assert decorated.first.call_one(2).get(LONG_S) == 4
    assert decorated.third.call_one(2).get(LONG_S) == decorated.fourth.call_one(2).get(LONG_S) == 3
    with pytest.raises(ActorError, match=r"decorated\.second\(\) failed"):
        decorated.second.call_one(2).get(LONG_S)
    with pytest.raises(TypeError, match=r"third\(value\): missing"):
        decorated.third.call_one()


def test_the_program_and_ranks_know_their_process_and_machine(procs: ProcMesh) -> None:
    program = context().actor_instance
    assert (program.proc.extent, program.proc_mesh.extent) == ({}, {})
    fragile: Any = program.proc.spawn("fragile", Fragile)
    assert fragile.take.call_one(1).get(LONG_S) == 1
    fragile.stop().get(LONG_S)
    elsewhere: Any = procs.spawn("elsewhere", Fragile)
    assert program.proc.host_mesh.extent == {}
    assert set(elsewhere.own_host.call().get(LONG_S).values()) == {True}
    back = elsewhere.take.call(program).get(LONG_S).item(r=0)
    assert back == program
    assert back.proc is None  # a copy may be in another process


def test_an_actor_whose_constructor_does_not_end_can_be_stopped(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(actor_server, "MAKING_S", 0.1)
    endless: Any = this_proc().spawn("endless", Endless, str(tmp_path / "gate"))
    try:
        waits = endless.value.call_one()
        endless.stop().get(LONG_S)
        with pytest.raises(SupervisionError, match="stopped by client"):
            endless.value.call_one().get(LONG_S)
    finally:
        (tmp_path / "gate").touch()
    assert isinstance(waits.exception(LONG_S), SupervisionError)


def test_objects_of_actors_classes_and_modules_are_collected_when_the_processes_stop(
    procs: ProcMesh, tmp_path: Path
) -> None:
    mesh = this_host().spawn_procs({"r": 2}, device="cpu")
    pids = mesh.spawn("keeper", Keeper, str(tmp_path)).pid.call().get(LONG_S).values()
    mesh.stop().get(LONG_S)
    assert set(os.listdir(tmp_path)) == {
        f"{kind}-{pid}" for kind in ("actor", "class", "module", "main") for pid in pids
    }


def test_bytes_may_be_read_into_more_memory_and_written_from_less() -> None:
    memory = torch.arange(16, dtype=torch.uint8)
    buffer = RDMABuffer(memory)
    into = torch.zeros(32, dtype=torch.uint8)
    buffer.read_into(into).get(LONG_S)
    assert into.tolist() == [*range(16), *[0] * 16]
    floats = torch.zeros(8)
    buffer.read_into(floats).get(LONG_S)
    assert bytes(floats.view(torch.uint8).tolist()) == bytes([*range(16), *[0] * 16])
    buffer.write_from(bytearray([9] * 4)).get(LONG_S)
    assert memory.tolist() == [9] * 4 + [*range(4, 16)]
    with pytest.raises(ValueError, match="20 bytes, the buffer has 16"):
        buffer.write_from(bytearray(20))
    with pytest.raises(ValueError, match="the larger one must be contiguous"):
        buffer.read_into(torch.zeros(64, dtype=torch.uint8)[::2])
