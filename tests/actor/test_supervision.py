"""Owners and spawned actors, with real processes: an owner gets each failure, and no spawned actor outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch_kernel.actor
from monarch_kernel.actor import Actor, MeshFailure, ProcMesh, SupervisionError, endpoint, this_host
from monarch_kernel.runtime.controller.session import current_session
from tests.support.actors import Worker
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_for_files, wait_until

pytestmark = pytest.mark.usefixtures("by_value")

KNOWN_WITHIN_S = 0.1


class Owner(Actor):
    """Owns workers; handles their failures or not.

    Args:
        handles: its verdict on a failure.
        folder: where it creates ``notified`` after a failure, and ``ended`` with the reason when it ends.
    """

    def __init__(self, handles: bool = True, folder: str = "") -> None:
        self.handles = handles
        self.folder = folder
        self.failures: list[tuple[float, str, tuple[int, ...], str]] = []

    @endpoint
    def spawn(self, procs: Any) -> Any:
        self.workers = procs.spawn("workers", Worker)
        self.workers.pid.call().get()
        return self.workers

    @endpoint
    def all(self) -> list[tuple[float, str, tuple[int, ...], str]]:
        return self.failures

    @endpoint
    def wait_for(self, other: Any, path: str) -> tuple[int, int]:
        """Wait for another actor, and return its answer and the number of failures that this actor has got by then."""
        return other.wait_for.call_one(path).get(), len(self.failures)

    @endpoint
    def wait_and_swallow(self, other: Any, path: str) -> str:
        try:
            other.wait_for.call_one(path).get()
        except BaseException as error:  # bad practice of a user
            return type(error).__name__
        return "nothing"

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append((time.monotonic(), failure.mesh_name, failure.crashed_ranks, failure.signal))
        if self.handles:
            self.workers.slice(gpus=1).pid.call_one().get()  # it may call other actors meanwhile
        if self.folder:
            Path(self.folder, "notified").touch()
        return self.handles

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.folder:
            Path(self.folder, "ending").write_text(f"{type(error).__name__}: {error}")
            Path(self.folder, "ending").rename(Path(self.folder, "ended"))


class AsyncOwner(Actor):
    """The same, asynchronous."""

    def __init__(self, handles: bool) -> None:
        self.handles = handles

    @endpoint
    async def spawn(self, procs: Any) -> Any:
        self.workers = procs.spawn("workers", Worker)
        await self.workers.pid.call()
        return self.workers

    @endpoint
    async def wait_for(self, other: Any, path: str) -> int:
        return int(await other.wait_for.call_one(path))

    async def __supervise__(self, failure: MeshFailure) -> bool:
        return self.handles


@pytest.fixture
def whole() -> Iterator[ProcMesh]:
    """Four processes, which a test may end."""
    mesh = this_host().spawn_procs({"gpus": 4}, device="cpu")
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    found: list[MeshFailure] = []
    monkeypatch.setattr(monarch_kernel.actor, "unhandled_fault_hook", found.append)
    return found


def part(procs: ProcMesh, *ranks: int) -> Any:
    return procs.slice(gpus=slice(ranks[0], ranks[-1] + 1)) if len(ranks) > 1 else procs.slice(gpus=ranks[0])


def test_owner_and_program_get_the_death_of_a_process(whole: Any, faults: list[MeshFailure], bar: Bar) -> None:
    owner: Any = part(whole, 0).spawn("owner", Owner)
    workers = owner.spawn.call_one(part(whole, 1, 2, 3)).get(LONG_S)
    others: Any = part(whole, 3).spawn("others", Worker)
    others.pid.call_one().get(LONG_S)
    taking = []
    times = 3 if bar.is_asserted else 1  # the fastest one counts
    for time_ in range(times):
        heard: list[float] = []
        stop = current_session().runtime.watch(
            lambda event, heard=heard: heard.append(time.monotonic()) if "Lost" in type(event).__name__ else None
        )
        pid = workers.slice(gpus=2).pid.call_one().get(LONG_S)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda time_=time_: len(owner.all.call_one().get(LONG_S)) > time_, "the owner to know")  # type: ignore[misc]
        failure = owner.all.call_one().get(LONG_S)[-1]
        assert failure[1:] == ("workers", (2,), "SIGKILL")
        wait_until(lambda heard=heard: heard, "the program to know")  # type: ignore[misc]
        stop()
        taking.append(max(failure[0], heard[0]) - killed)
        whole.heal().get(LONG_S)
    bar.check(min(taking), KNOWN_WITHIN_S, "the news of the death")
    wait_until(lambda: len(faults) == times, "the hook, for what the program owns")
    assert {(fault.mesh_name, fault.crashed_ranks, fault.signal) for fault in faults} == {("others", (0,), "SIGKILL")}


def test_the_program_gets_the_failures_of_all_ranks_that_fail_together(whole: Any, faults: list[MeshFailure]) -> None:
    workers: Any = whole.spawn("workers", Worker)
    workers.pid.call().get(LONG_S)
    workers.fail.broadcast("all of us")
    wait_until(lambda: sum(len(fault.crashed_ranks) for fault in faults) == 4, "the failures of all")
    assert sorted(rank for fault in faults for rank in fault.crashed_ranks) == [0, 1, 2, 3]
    assert "ValueError: all of us" in str(faults[0])


def test_a_wait_goes_on_after_a_failure_that_was_handled(whole: Any, faults: list[MeshFailure], tmp_path: Path) -> None:
    owner: Any = part(whole, 0).spawn("owner", Owner, True, str(tmp_path))
    workers = owner.spawn.call_one(part(whole, 1, 2)).get(LONG_S)
    third: Any = part(whole, 3).spawn("third", Worker)
    waiting = owner.wait_for.call_one(third, str(tmp_path / "go"))
    workers.slice(gpus=0).fail.broadcast("while it waits")
    wait_for_files(tmp_path, "notified")  # not after the answer
    assert not waiting.done()
    (tmp_path / "go").touch()
    assert waiting.get(LONG_S) == (0, 1)
    assert not faults


@pytest.mark.parametrize("kind", [Owner, AsyncOwner])
def test_a_wait_ends_with_the_actor_that_does_not_handle_a_failure(
    whole: Any, faults: list[MeshFailure], kind: Any, tmp_path: Path, bar: Bar
) -> None:
    owner: Any = part(whole, 0).spawn("owner", kind, False)
    workers = owner.spawn.call_one(part(whole, 1, 2)).get(LONG_S)
    third: Any = part(whole, 3).spawn("third", Worker)
    waiting, its_wait = owner.wait_for.call_one(third, str(tmp_path / "go")), third.pid.call_one()
    with bar.below(1.4, "the end of the wait"):
        workers.slice(gpus=0).fail.broadcast("no good")
        with pytest.raises(SupervisionError, match="did not handle the failure of workers"):
            waiting.get(LONG_S)
    (tmp_path / "go").touch()
    its_wait.get(LONG_S)
    wait_until(lambda: faults, "the hook")
    assert faults[0].mesh_name == "owner"
    assert faults[0].root_cause.mesh_name == "workers"


def test_an_endpoint_that_swallows_its_end_does_not_keep_the_actor(
    whole: Any, faults: list[MeshFailure], tmp_path: Path
) -> None:
    owner: Any = part(whole, 0).spawn("owner", Owner, False, str(tmp_path))
    workers = owner.spawn.call_one(part(whole, 1, 2)).get(LONG_S)
    third: Any = part(whole, 3).spawn("third", Worker)
    waiting = owner.wait_and_swallow.call_one(third, str(tmp_path / "go"))
    workers.slice(gpus=0).fail.broadcast("no good")
    waiting.exception(LONG_S)
    with pytest.raises(SupervisionError, match="did not handle"):
        owner.all.call_one().get(LONG_S)
    wait_for_files(tmp_path, "ended")
    assert (
        (tmp_path / "ended")
        .read_text()
        .startswith("SupervisionError: actor 'owner' did not handle the failure of workers[0]")
    )


def test_actors_that_a_dead_process_had_spawned_elsewhere_end(whole: Any, faults: list[MeshFailure]) -> None:
    owner: Any = part(whole, 0).spawn("owner", Owner)
    workers = owner.spawn.call_one(part(whole, 1, 2)).get(LONG_S)
    below = workers.slice(gpus=0).spawn_below.call_one(part(whole, 3)).get(LONG_S)
    below.pid.call_one().get(LONG_S)
    os.kill(whole.view().ranks[0].pid, signal.SIGKILL)
    for actors in (workers, below):
        wait_until(lambda actors=actors: actors.pid.call().exception(LONG_S) is not None, "them to end")  # type: ignore[misc]
        with pytest.raises(SupervisionError, match="its owner|of its owner is gone"):
            actors.pid.call().get(LONG_S)
    wait_until(lambda: faults, "the hook")
    assert [fault.mesh_name for fault in faults] == ["owner"]


class Busy(Actor):
    """Works forever, while no caller waits; creates a file when it starts, and another one when it ends."""

    @endpoint
    def work(self, path: str) -> None:
        Path(f"{path}-began").touch()
        while True:
            sum(range(1000))

    def __cleanup__(self, error: BaseException | None) -> None:
        Path(os.environ["BUSY"] + "-ended").write_text(repr(error))


class AsyncBusy(Busy):
    """The same on an event loop."""

    @endpoint
    async def work(self, path: str) -> None:  # type: ignore[override]
        Path(f"{path}-began").touch()
        while True:
            await asyncio.sleep(0.001)


class OwnerOfBusy(Actor):
    """Owns an actor that works forever."""

    @endpoint
    def spawn(self, procs: Any, kind: type[Actor], path: str) -> None:
        procs.spawn("busy", kind).work.broadcast(path)


@pytest.mark.parametrize("kind", [Busy, AsyncBusy])
def test_an_orphan_that_works_forever_is_interrupted(whole: Any, kind: type[Actor], tmp_path: Path) -> None:
    path = str(tmp_path / "busy")
    part(whole, 1).run(f"import os; os.environ['BUSY'] = {path!r}").get(LONG_S)
    owner: Any = part(whole, 0).spawn("owner", OwnerOfBusy)
    owner.spawn.call_one(part(whole, 1), kind, path).get(LONG_S)
    wait_until(Path(f"{path}-began").exists, "it to begin")
    os.kill(whole.view().ranks[0].pid, signal.SIGKILL)
    wait_until(Path(f"{path}-ended").exists, "it to end")


def test_a_mesh_with_a_dead_rank_is_stopped_where_it_lives(whole: Any, faults: list[MeshFailure]) -> None:
    workers: Any = whole.spawn("workers", Worker)
    pids = workers.pid.call().get(LONG_S).values()
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: faults, "the hook")
    workers.stop("enough").get(LONG_S)
    with pytest.raises(SupervisionError, match="enough"):
        workers.slice(gpus=0).pid.call_one().get(LONG_S)


def test_a_rank_that_was_healed_fails_again(whole: Any, faults: list[MeshFailure]) -> None:
    workers: Any = whole.spawn("workers", Worker)
    for count in (1, 2):
        os.kill(workers.slice(gpus=2).pid.call_one().get(LONG_S), signal.SIGKILL)
        wait_until(lambda count=count: len(faults) == count, "the hook")  # type: ignore[misc]
        whole.heal().get(LONG_S)
    assert [fault.crashed_ranks for fault in faults] == [(2,), (2,)]
    assert faults[1].mesh is workers


def test_the_program_owns_the_actors_that_a_cell_spawns(whole: Any, faults: list[MeshFailure]) -> None:
    part(whole, 0)["Worker"] = Worker
    code = "this_proc().spawn('of a cell', Worker).fail.broadcast('from a cell')"
    part(whole, 0).run(f"from monarch_kernel.actor import this_proc\n{code}\nNone").get(LONG_S)
    wait_until(lambda: faults, "the hook")
    assert (faults[0].mesh_name, faults[0].mesh) == ("of a cell", None)
    assert "ValueError: from a cell" in str(faults[0])
