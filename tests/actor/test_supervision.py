"""Owners and what they have spawned, with real processes: deaths are known at once, nothing outlives its owner, waits go on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import monarch_kernel.actor
from monarch_kernel.actor import Actor, MeshFailure, ProcMesh, SupervisionError, endpoint, shutdown_context, this_host
from tests.waiting import undisturbed_s, wait_until

LONG_S = 60.0
KNOWN_WITHIN_S = 0.1


class Worker(Actor):
    """Works, or does not."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def spawn(self, procs: Any) -> Any:
        return procs.spawn("below", Worker)


class Owner(Actor):
    """Owns workers; handles what it is told as it was made to."""

    def __init__(self, handles: bool = True, ends: str = "") -> None:
        self.handles = handles
        self.ends = ends
        self.told: list[tuple[float, str, tuple[int, ...], str]] = []

    @endpoint
    def spawn(self, procs: Any) -> Any:
        self.workers = procs.spawn("workers", Worker)
        self.workers.pid.call().get()
        return self.workers

    @endpoint
    def all(self) -> list[tuple[float, str, tuple[int, ...], str]]:
        return self.told

    @endpoint
    def wait_for(self, other: Any, seconds: float) -> tuple[str, list[float]]:
        """Wait for another; gives its answer, and how long before that this was told of failures."""
        before = len(self.told)
        answer = other.sleep.call_one(seconds).get()
        return answer, [time.monotonic() - told[0] for told in self.told[before:]]

    @endpoint
    def wait_and_swallow(self, other: Any) -> str:
        try:
            other.sleep.call_one(LONG_S).get()
        except BaseException as error:  # what no user should do
            return type(error).__name__
        return "nothing"

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append((time.monotonic(), failure.mesh_name, failure.crashed_ranks, failure.signal))
        if self.handles:
            self.workers.slice(gpus=1).pid.call_one().get()  # it may ask others meanwhile
        return self.handles

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.ends:
            Path(self.ends).write_text(f"{type(error).__name__}: {error}")


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
    async def wait_for(self, other: Any) -> str:
        return str(await other.sleep.call_one(LONG_S))

    async def __supervise__(self, failure: MeshFailure) -> bool:
        return self.handles


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    mesh = this_host().spawn_procs({"gpus": 1}, device="cpu")
    mesh.initialized.get(LONG_S)
    mesh.stop(grace_s=0).get()
    yield
    shutdown_context().get()
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def whole(session: None) -> Iterator[ProcMesh]:
    """Four processes, which a test may end."""
    mesh = this_host().spawn_procs({"gpus": 4}, device="cpu")
    yield mesh
    mesh.stop(grace_s=0).get()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[MeshFailure]:
    found: list[MeshFailure] = []
    monkeypatch.setattr(monarch_kernel.actor, "unhandled_fault_hook", found.append)
    return found


def part(procs: ProcMesh, *ranks: int) -> Any:
    return procs.slice(gpus=slice(ranks[0], ranks[-1] + 1)) if len(ranks) > 1 else procs.slice(gpus=ranks[0])


def test_the_death_of_a_process_is_known_to_owner_and_program_at_once(whole: Any, faults: list[MeshFailure]) -> None:
    owner: Any = part(whole, 0).spawn("owner", Owner)
    workers = owner.spawn.call_one(part(whole, 1, 2, 3)).get(LONG_S)
    others: Any = part(whole, 3).spawn("others", Worker)
    others.pid.call_one().get(LONG_S)
    heard: list[float] = []
    taking = []
    for _ in range(3):  # the quickest counts: the machine may be busy with something else
        count = len(owner.all.call_one().get(LONG_S))
        stop = whole._runtime.watch(
            lambda event: heard.append(time.monotonic()) if "Lost" in type(event).__name__ else None
        )
        pid = workers.slice(gpus=2).pid.call_one().get(LONG_S)
        os.kill(pid, signal.SIGKILL)
        killed, killed_undisturbed = time.monotonic(), undisturbed_s()
        wait_until(lambda count=count: len(owner.all.call_one().get(LONG_S)) > count, "the owner to be told")  # type: ignore[misc]
        told = owner.all.call_one().get(LONG_S)[-1]
        assert told[1:] == ("workers", (2,), "SIGKILL")
        wait_until(lambda: heard, "the program to know")
        stop()
        disturbed_s = (time.monotonic() - killed) - (undisturbed_s() - killed_undisturbed)
        taking.append(max(told[0], heard.pop()) - killed - disturbed_s)
        whole.heal().get(LONG_S)
    assert min(taking) < KNOWN_WITHIN_S, taking
    wait_until(lambda: len(faults) == 3, "the hook, for what the program owns")
    assert {(fault.mesh_name, fault.crashed_ranks, fault.signal) for fault in faults} == {("others", (0,), "SIGKILL")}


def test_ranks_that_fail_together_are_told_as_one(whole: Any, faults: list[MeshFailure]) -> None:
    workers: Any = whole.spawn("workers", Worker)
    workers.pid.call().get(LONG_S)
    workers.fail.broadcast("all of us")
    wait_until(lambda: sum(len(fault.crashed_ranks) for fault in faults) == 4, "all to be told")
    assert sorted(rank for fault in faults for rank in fault.crashed_ranks) == [0, 1, 2, 3]
    assert "ValueError: all of us" in str(faults[0])


def test_a_wait_goes_on_after_a_failure_that_was_handled(whole: Any, faults: list[MeshFailure]) -> None:
    owner: Any = part(whole, 0).spawn("owner", Owner)
    workers = owner.spawn.call_one(part(whole, 1, 2)).get(LONG_S)
    third: Any = part(whole, 3).spawn("third", Worker)
    waiting = owner.wait_for.call_one(third, 2.0)
    third_is_busy = third.pid.call_one()
    workers.slice(gpus=0).fail.broadcast("while it waits")
    answer, (told_before_s,) = waiting.get(LONG_S)
    assert answer == "slept"
    assert told_before_s > 0.5, "not when the answer came"
    third_is_busy.get(LONG_S)
    assert not faults


@pytest.mark.parametrize("kind", [Owner, AsyncOwner])
def test_a_wait_ends_with_the_actor_that_does_not_handle_a_failure(
    whole: Any, faults: list[MeshFailure], kind: Any
) -> None:
    owner: Any = part(whole, 0).spawn("owner", kind, False)
    workers = owner.spawn.call_one(part(whole, 1, 2)).get(LONG_S)
    third: Any = part(whole, 3).spawn("third", Worker)
    waiting = owner.wait_for.call_one(third, LONG_S) if kind is Owner else owner.wait_for.call_one(third)
    begun = undisturbed_s()
    workers.slice(gpus=0).fail.broadcast("no good")
    with pytest.raises(SupervisionError, match="did not handle the failure of workers"):
        waiting.get(LONG_S)
    assert undisturbed_s() - begun < 1.4
    wait_until(lambda: faults, "the hook")
    assert faults[0].mesh_name == "owner"
    assert faults[0].root_cause.mesh_name == "workers"


def test_an_endpoint_that_swallows_its_end_does_not_keep_the_actor(
    whole: Any, faults: list[MeshFailure], tmp_path: Path
) -> None:
    ends = tmp_path / "ends"
    owner: Any = part(whole, 0).spawn("owner", Owner, False, str(ends))
    workers = owner.spawn.call_one(part(whole, 1, 2)).get(LONG_S)
    third: Any = part(whole, 3).spawn("third", Worker)
    waiting = owner.wait_and_swallow.call_one(third)
    workers.slice(gpus=0).fail.broadcast("no good")
    waiting.exception(LONG_S)
    with pytest.raises(SupervisionError, match="did not handle"):
        owner.all.call_one().get(LONG_S)
    wait_until(lambda: ends.exists() and ends.read_text(), "the cleanup")
    assert ends.read_text().startswith("SupervisionError: actor 'owner' did not handle the failure of workers[0]")


def test_what_a_dead_process_had_spawned_elsewhere_ends(whole: Any, faults: list[MeshFailure]) -> None:
    owner: Any = part(whole, 0).spawn("owner", Owner)
    workers = owner.spawn.call_one(part(whole, 1, 2)).get(LONG_S)
    below = workers.slice(gpus=0).spawn.call_one(part(whole, 3)).get(LONG_S)
    below.pid.call_one().get(LONG_S)
    os.kill(whole.view().ranks[0].pid, signal.SIGKILL)
    for actors in (workers, below):
        wait_until(lambda actors=actors: actors.pid.call().exception(LONG_S) is not None, "them to end")  # type: ignore[misc]
        with pytest.raises(SupervisionError, match="its owner|of its owner is gone"):
            actors.pid.call().get(LONG_S)
    wait_until(lambda: faults, "the hook")
    assert [fault.mesh_name for fault in faults] == ["owner"]


class Busy(Actor):
    """Works for ever, with nobody who waits for it; says in a file that it began, and in another one how it ended."""

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
    """Owns them."""

    @endpoint
    def spawn(self, procs: Any, kind: type[Actor], path: str) -> None:
        procs.spawn("busy", kind).work.broadcast(path)


@pytest.mark.parametrize("kind", [Busy, AsyncBusy])
def test_an_orphan_that_works_for_ever_is_interrupted(whole: Any, kind: type[Actor], tmp_path: Path) -> None:
    path = str(tmp_path / "busy")
    part(whole, 1).run(f"import os; os.environ['BUSY'] = {path!r}").get()
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


def test_what_a_cell_has_spawned_is_the_programs(whole: Any, faults: list[MeshFailure]) -> None:
    part(whole, 0)["Worker"] = Worker
    code = "this_proc().spawn('of a cell', Worker).fail.broadcast('from a cell')"
    part(whole, 0).run(f"from monarch_kernel.actor import this_proc\n{code}\nNone").get(LONG_S)
    wait_until(lambda: faults, "the hook")
    assert (faults[0].mesh_name, faults[0].mesh) == ("of a cell", None)
    assert "ValueError: from a cell" in str(faults[0])
