"""Replacement of ranks that die, with real processes: state, actors, their order, and restarts by policy."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ProcMesh,
    SupervisionError,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from monarch_kernel.errors import ActorError
from monarch_kernel.runtime.controller.session import current_session
from tests.support.processes import is_gone, kill_ranks, wait_gone
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_for_files, wait_until


class RestoringCounter(Actor):
    """Counts its calls; after a restart it takes the count of the others."""

    def __init__(self, begin: int = 0) -> None:
        self.n = begin
        self.restored_by = -1

    def __restore__(self, peers: Any) -> None:
        self.restored_by = 0 if peers is None else len(peers)
        if peers is not None:
            self.n = max(peers.count.call().get().values())

    @endpoint
    def count(self) -> int:
        return self.n

    @endpoint
    def add(self) -> tuple[int, int]:
        self.n += 1
        return self.n, self.restored_by

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def die(self) -> None:
        os._exit(17)

    @endpoint
    def fail(self) -> None:
        raise ValueError("on purpose")

    @endpoint
    def place(self) -> int:
        return current_rank().rank


class AsyncRestoringCounter(Actor):
    def __init__(self) -> None:
        self.n = 0

    async def __restore__(self, peers: Any) -> None:
        self.n = await peers.count.choose()

    @endpoint
    async def count(self) -> int:
        return self.n

    @endpoint
    async def add(self) -> int:
        self.n += 1
        return self.n


class Parent(Actor):
    """Spawns actors from a rank, and goes on when they fail."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def __supervise__(self, failure: Any) -> bool:
        self.failures.append(str(failure))
        return True

    @endpoint
    def failed(self) -> list[str]:
        return self.failures

    @endpoint
    def heal(self, procs: Any) -> Any:
        return procs.heal().get()

    @endpoint
    def spawn(self, procs: Any) -> Any:
        self.children = procs.spawn("children", RestoringCounter, 100)
        self.children.add.call().get()
        return self.children

    @endpoint
    def add(self) -> list[int]:
        return [n for n, _ in self.children.add.call().get().values()]


class Careless(Parent):
    """Fails with the actors that it has spawned."""

    def __supervise__(self, failure: Any) -> bool:
        return False


class Brittle(Actor):
    """Fails in the constructor if a file exists."""

    def __init__(self, path: str) -> None:
        if os.path.exists(path):
            raise RuntimeError("no second time")

    @endpoint
    def ping(self) -> int:
        return os.getpid()


class Hasty(Actor):
    async def __restore__(self, peers: Any) -> None:
        pass

    @endpoint
    def ping(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def serving(session: None, by_value: None) -> None:
    """Start to serve requests of ranks, so that no test seems to leave the threads for this behind."""
    mesh = this_host().spawn_procs({"r": 1}, device="cpu")
    parent: Any = mesh.spawn("parent", Parent)
    parent.heal.call_one(mesh).get(LONG_S)
    mesh.stop(grace_s=0).get(LONG_S)


@pytest.fixture
def procs(serving: None) -> Iterator[ProcMesh]:
    """Three processes, which a test may end."""
    mesh = this_host().spawn_procs({"r": 3}, device="cpu")
    yield mesh
    mesh.stop(grace_s=0).get()


@pytest.fixture
def make(serving: None) -> Iterator[Callable[..., ProcMesh]]:
    """Spawns processes for one test."""
    made: list[ProcMesh] = []

    def spawn(n: int = 2, **options: Any) -> ProcMesh:
        made.append(this_host().spawn_procs({"r": n}, device="cpu", **options))
        return made[-1]

    yield spawn
    for mesh in made:
        mesh.stop(grace_s=0).get()


# -- actors


def test_a_replaced_actor_takes_its_state_from_the_others(procs: ProcMesh) -> None:
    counter: Any = procs.spawn("counter", RestoringCounter, 5)
    slow: Any = procs.spawn("async", AsyncRestoringCounter)
    assert counter.add.call().get(LONG_S).values() == ((6, -1), (6, -1), (6, -1))
    assert slow.add.call().get(LONG_S).values() == (1, 1, 1)
    for times in (1, 2):
        kill_ranks(procs, 1)
        assert procs.heal().get(LONG_S) == (1,)
        assert counter.add.call().get(LONG_S).values() == ((6 + times, -1), (6 + times, 2), (6 + times, -1))
        assert slow.add.call().get(LONG_S).values() == (1 + times,) * 3
    assert procs.incarnations() == (0, 2, 0)


def test_several_ranks_are_replaced_at_once(procs: ProcMesh) -> None:
    counter: Any = procs.spawn("counter", RestoringCounter, 5)
    counter.add.call().get(LONG_S)
    kill_ranks(procs, 0, 2)
    assert procs.heal().get(LONG_S) == (0, 2)
    assert counter.add.call().get(LONG_S).values() == ((7, 1), (7, -1), (7, 1))
    kill_ranks(procs, 0, 1, 2)
    assert procs.heal().get(LONG_S) == (0, 1, 2)
    assert counter.add.call().get(LONG_S).values() == ((6, 0), (6, 0), (6, 0)), "nobody is left to ask"


def test_handles_and_their_slices_stay_valid(procs: ProcMesh) -> None:
    part: Any = procs.slice(r=slice(1, 3)).spawn("part", RestoringCounter)
    one = part.slice(r=0)
    assert part.slice(r=slice(0, 2)).place.call().get(LONG_S).values() == (0, 1)
    before = part.pid.call().get(LONG_S).values()
    kill_ranks(procs, 1)
    procs.heal().get(LONG_S)
    assert one.pid.call_one().get(LONG_S) != before[0]
    assert part.place.call().get(LONG_S).values() == (0, 1)
    assert part.slice(r=1).pid.call_one().get(LONG_S) == before[1]


def test_calls_made_before_the_process_is_up_wait_for_it_and_its_actor(procs: ProcMesh) -> None:
    counter: Any = procs.spawn("counter", RestoringCounter)
    counter.add.call().get(LONG_S)
    kill_ranks(procs, 2)
    healed = procs.heal()
    futures = [counter.slice(r=2).add.call_one() for _ in range(20)]
    last = counter.slice(r=2).count.call_one()
    counts = [future.get(LONG_S)[0] for future in futures]
    assert counts == list(range(2, 22)), "in order, after it has taken its state from the others"
    assert last.get(LONG_S) == 21
    assert healed.get(LONG_S) == (2,)


def test_actors_that_a_rank_has_spawned_are_made_again(procs: ProcMesh) -> None:
    parent: Any = procs.slice(r=0).spawn("parent", Parent)
    children = parent.spawn.call_one(procs.slice(r=slice(1, 3))).get(LONG_S)
    kill_ranks(procs, 2)
    procs.heal().get(LONG_S)
    one, two = parent.add.call_one().get(LONG_S)
    assert (one, two - one) in ((102, 0), (102, 1)), "its state is that of the other, before or after this call"
    (failure,) = parent.failed.call_one().get(LONG_S)
    assert "children[1] failed" in failure
    assert [by for _, by in children.add.call().get(LONG_S).values()] == [-1, 1]


def test_an_owner_can_heal_the_mesh_after_a_failure_and_learns_of_the_next_one(procs: ProcMesh) -> None:
    parent: Any = procs.slice(r=0).spawn("parent", Parent)
    others = procs.slice(r=slice(1, 3))
    parent.spawn.call_one(others).get(LONG_S)
    for times in (1, 2):
        kill_ranks(procs, 2)
        assert parent.heal.call_one(others).get(LONG_S) == (2,)
        parent.add.call_one().get(LONG_S)
        assert len(parent.failed.call_one().get(LONG_S)) == times


def test_actors_of_a_failed_owner_are_not_made_again(procs: ProcMesh) -> None:
    careless: Any = procs.slice(r=0).spawn("careless", Careless)
    children = careless.spawn.call_one(procs.slice(r=slice(1, 3))).get(LONG_S)
    kill_ranks(procs, 2)
    wait_until(lambda: careless.failed.call_one().exception(LONG_S), "the end of the owner")
    procs.heal().get(LONG_S)
    with pytest.raises(SupervisionError, match=r"\[1\] ActorStopped"):
        children.add.call().get(LONG_S)


def test_an_actor_that_died_before_its_rank_is_made_again_with_it(procs: ProcMesh) -> None:
    counter: Any = procs.spawn("counter", RestoringCounter)
    counter.add.call().get(LONG_S)
    counter.slice(r=1).fail.broadcast()
    with pytest.raises(SupervisionError, match="on purpose"):
        counter.slice(r=1).add.call_one().get(LONG_S)
    kill_ranks(procs, 0)
    procs.heal().get(LONG_S)
    assert counter.slice(r=0).add.call_one().get(LONG_S) == (2, 1), "one is left to ask"
    assert procs.slice(r=1).restart(grace_s=0).get(LONG_S) == (1,)
    assert counter.slice(r=1).add.call_one().get(LONG_S) == (3, 2)


def test_stopped_actors_are_not_made_again(procs: ProcMesh) -> None:
    stopped: Any = procs.spawn("stopped", RestoringCounter)
    half: Any = procs.spawn("half", RestoringCounter)
    half.add.call().get(LONG_S)
    stopped.stop("no longer needed").get(LONG_S)
    half.slice(r=0).stop().get(LONG_S)
    kill_ranks(procs, 0, 1)
    procs.heal().get(LONG_S)
    for gone in (stopped.slice(r=0), half.slice(r=0)):
        with pytest.raises(SupervisionError, match="not on this rank"):
            gone.count.call_one().get(LONG_S)
    assert half.slice(r=1).count.call_one().get(LONG_S) == 1


def test_an_actor_that_cannot_be_made_again_is_an_error_and_the_mesh_lives(procs: ProcMesh, tmp_path: Any) -> None:
    path = tmp_path / "made"
    brittle: Any = procs.spawn("brittle", Brittle, str(path))
    counter: Any = procs.spawn("counter", RestoringCounter)
    hasty: Any = procs.spawn("hasty", Hasty)
    assert brittle.initialized.get(LONG_S)
    path.touch()
    kill_ranks(procs, 1)
    with pytest.raises(ActorError, match=r"brittle.__init__, hasty.__init__ failed") as caught:
        procs.heal().get(LONG_S)
    assert caught.value.ranks == (1,)
    assert "Hasty.__restore__ is async" in str(caught.value) or "no second time" in str(caught.value)
    with pytest.raises(SupervisionError, match="no second time"):
        brittle.slice(r=1).ping.call_one().get(LONG_S)
    assert isinstance(brittle.slice(r=0).ping.call_one().get(LONG_S), int)
    assert counter.add.call().get(LONG_S).values()[1] == (1, 2)
    assert hasty.slice(r=2).ping.call_one().get(LONG_S)
    hasty.stop().get(LONG_S)
    path.unlink()
    assert procs.slice(r=1).restart(grace_s=0).get(LONG_S) == (1,)
    assert isinstance(brittle.slice(r=1).ping.call_one().get(LONG_S), int), "it is tried again"


def test_a_spawn_on_a_mesh_with_a_dead_rank_fails_and_names_it(procs: ProcMesh, bar: Bar) -> None:
    procs.initialized.get(LONG_S)
    kill_ranks(procs, 1)
    with bar.below(0.5, "the error"):
        failed: Any = procs.spawn("late", RestoringCounter)
        with pytest.raises(SupervisionError, match="spawning late failed") as caught:
            failed.initialized.get(LONG_S)
    assert caught.value.ranks == (1,)
    procs.heal().get(LONG_S)
    again: Any = procs.spawn("late", RestoringCounter)
    assert again.add.call().get(LONG_S).values() == ((1, -1),) * 3


# -- the mesh


def test_a_failed_heal_can_be_repeated(procs: ProcMesh) -> None:
    counter: Any = procs.spawn("counter", RestoringCounter)
    counter.add.call().get(LONG_S)
    kill_ranks(procs, 1)
    first = procs.heal()
    wait_until(lambda: procs.incarnations()[1] == 1 and procs.view().ranks[1].pid, "the new process")
    kill_ranks(procs, 1)
    if (error := first.exception(LONG_S)) is not None:  # the rank may have been up for a moment
        assert isinstance(error, SupervisionError)
        assert error.ranks == (1,)
    assert procs.heal().get(LONG_S) == (1,)
    assert counter.add.call().get(LONG_S).values()[1] == (2, 2)
    assert procs.incarnations() == (0, 2, 0)


def test_an_actor_whose_constructor_failed_is_not_made_again(procs: ProcMesh, tmp_path: Any) -> None:
    path = tmp_path / "made"
    path.touch()
    brittle: Any = procs.spawn("brittle", Brittle, str(path))
    with pytest.raises(ActorError, match="no second time"):
        brittle.initialized.get(LONG_S)
    assert procs.slice(r=1).restart(grace_s=0).get(LONG_S) == (1,)
    with pytest.raises(SupervisionError, match="not on this rank"):
        brittle.slice(r=1).ping.call_one().get(LONG_S)


def test_the_programs_own_process_is_not_restarted(session: None) -> None:
    with pytest.raises(ValueError, match="the program's own process"):
        this_proc().restart()
    assert this_proc().heal().get(LONG_S) == ()


def test_two_heals_at_the_same_time_start_one_process(procs: ProcMesh) -> None:
    procs.initialized.get(LONG_S)
    kill_ranks(procs, 0)
    healed = [procs.heal(), procs.heal()]
    assert [future.get(LONG_S) for future in healed] == [(0,), ()]
    assert procs.view().ranks[0].state == "idle"
    assert procs.incarnations() == (1, 0, 0)


def test_a_heal_of_healthy_ranks_has_no_effect(procs: ProcMesh) -> None:
    procs.initialized.get(LONG_S)
    assert procs.heal().get(LONG_S) == ()
    assert procs.incarnations() == (0, 0, 0)


def test_a_slice_can_be_healed_alone(procs: ProcMesh) -> None:
    procs.initialized.get(LONG_S)
    kill_ranks(procs, 0, 2)
    assert procs.slice(r=slice(0, 2)).heal().get(LONG_S) == (0,)
    assert set(procs.deaths()) == {2}


def test_a_stopped_mesh_cannot_be_healed(make: Callable[..., ProcMesh]) -> None:
    mesh = make(1)
    mesh.initialized.get(LONG_S)
    mesh.stop("it is done", grace_s=0).get(LONG_S)
    with pytest.raises(SupervisionError, match="it is done"):
        mesh.heal()
    dead = make(1)
    dead.initialized.get(LONG_S)
    kill_ranks(dead, 0)
    dead.stop(grace_s=0).get(LONG_S)
    with pytest.raises(SupervisionError, match="it was stopped"):
        dead.heal()


def test_living_ranks_are_restarted(procs: ProcMesh) -> None:
    counter: Any = procs.spawn("counter", RestoringCounter)
    before = counter.pid.call().get(LONG_S).values()
    counter.add.call().get(LONG_S)
    pending = counter.slice(r=0).pid.call_one()
    assert procs.slice(r=0).restart().get(LONG_S) == (0,)
    assert pending.exception(LONG_S) is None or "ended to be restarted" in str(pending.exception(LONG_S))
    after = counter.pid.call().get(LONG_S).values()
    assert [a == b for a, b in zip(before, after)] == [False, True, True]
    assert counter.count.call().get(LONG_S).values() == (1, 1, 1)
    wait_gone(before[0])


# -- automatic restarts


def test_a_rank_restarts_automatically_and_no_later_call_fails(make: Callable[..., ProcMesh]) -> None:
    mesh = make(3, restart="rank")
    counter: Any = mesh.spawn("counter", RestoringCounter)
    before = counter.pid.call().get(LONG_S).values()
    counter.add.call().get(LONG_S)
    with pytest.raises(SupervisionError, match="exit code 17; .*a new process replaces it"):
        counter.slice(r=1).die.call_one().get(LONG_S)
    assert [by for _, by in counter.add.call().get(LONG_S).values()] == [-1, 2, -1]
    after = counter.pid.call().get(LONG_S).values()
    assert [a == b for a, b in zip(before, after)] == [True, False, True]


def test_an_automatic_restart_is_not_a_failure_for_owners(make: Callable[..., ProcMesh], faults: list[Any]) -> None:
    mesh = make(3, restart="rank", max_restarts=1)
    parent: Any = mesh.slice(r=0).spawn("parent", Parent)
    children = parent.spawn.call_one(mesh.slice(r=slice(1, 3))).get(LONG_S)
    mine: Any = mesh.spawn("mine", RestoringCounter)
    mine.add.call().get(LONG_S)
    before = mine.pid.call().get(LONG_S).values()
    os.kill(before[2], signal.SIGKILL)
    wait_until(lambda: mesh.incarnations() == (0, 0, 1), "the restart")
    assert mine.pid.call().get(LONG_S).values()[2] != before[2]
    assert [by for _, by in children.add.call().get(LONG_S).values()] == [-1, 1]
    assert parent.failed.call_one().get(LONG_S) == []
    assert faults == []
    kill_ranks(mesh, 2)
    wait_until(lambda: parent.failed.call_one().get(LONG_S), "the failure, which nothing else follows")
    wait_until(lambda: faults, "the same for what the program has spawned")
    assert "it is not restarted, because it was restarted 1 time" in str(faults[0])


def test_an_actor_that_a_restart_cannot_make_again_is_a_failure(
    make: Callable[..., ProcMesh], faults: list[Any], tmp_path: Any
) -> None:
    mesh = make(2, restart="rank")
    path = tmp_path / "made"
    brittle: Any = mesh.spawn("brittle", Brittle, str(path))
    pids = brittle.ping.call().get(LONG_S).values()
    path.touch()
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: faults, "the failure")
    assert "brittle[1] failed" in str(faults[0])
    assert "no second time" in str(faults[0])


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the failures that no owner has handled."""
    found: list[Any] = []
    monkeypatch.setattr("monarch_kernel.actor.unhandled_fault_hook", found.append)
    return found


def test_a_rank_that_dies_too_often_is_not_restarted(make: Callable[..., ProcMesh]) -> None:
    mesh = make(2, restart="rank", max_restarts=2, backoff_s=0.05)
    counter: Any = mesh.spawn("counter", RestoringCounter)
    counter.add.call().get(LONG_S)
    for _ in range(2):
        with pytest.raises(SupervisionError, match="a new process replaces it"):
            counter.slice(r=1).die.call_one().get(LONG_S)
        wait_until(lambda: not mesh.deaths(), "the restart")
    with pytest.raises(SupervisionError, match="it is not restarted, because it was restarted 2 times within 300 s"):
        counter.slice(r=1).die.call_one().get(LONG_S)
    assert set(mesh.deaths()) == {1}
    assert mesh.heal().get(LONG_S) == (1,), "by hand it is done nevertheless"


def test_a_whole_mesh_is_restarted(make: Callable[..., ProcMesh]) -> None:
    mesh = make(2, restart="mesh")
    counter: Any = mesh.spawn("counter", RestoringCounter, 3)
    before = counter.pid.call().get(LONG_S).values()
    counter.add.call().get(LONG_S)
    with pytest.raises(SupervisionError, match="the mesh is restarted"):
        counter.slice(r=0).die.call_one().get(LONG_S)
    assert counter.add.call().get(LONG_S).values() == ((4, 0), (4, 0))
    assert not set(before) & set(counter.pid.call().get(LONG_S).values())


def test_a_stopped_mesh_is_not_restarted(make: Callable[..., ProcMesh]) -> None:
    mesh = make(2, restart="rank")
    mesh.initialized.get(LONG_S)
    pids = [rank.pid for rank in mesh.view().ranks]
    mesh.stop(grace_s=0).get(LONG_S)
    wait_gone(*pids)
    assert mesh.incarnations() == (0, 0)


# -- many times


@pytest.mark.parametrize("cycles", [12])
def test_kill_and_heal_at_random_moments_of_a_stream_of_calls(make: Callable[..., ProcMesh], cycles: int) -> None:
    """Each call ends with a result or an error that names the rank. The other ranks lose no call, and run no call twice."""
    mesh = make(4)
    counter: Any = mesh.spawn("counter", RestoringCounter)
    counter.add.call().get(LONG_S)
    dice = random.Random(7)
    sent = [1, 1, 1, 1]
    is_over = threading.Event()
    errors: list[tuple[int, BaseException]] = []

    def stream() -> None:
        while not is_over.is_set():
            rank = dice.randrange(4)
            future = counter.slice(r=rank).add.call_one()
            error = future.exception(LONG_S)
            if error is None:
                sent[rank] += 1
            else:
                errors.append((rank, error))

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        for _ in range(cycles):
            time.sleep(random.uniform(0, 0.02))  # kill the rank at a random moment, not after an event
            kill_ranks(mesh, 2)
            assert mesh.heal().get(LONG_S) == (2,)
    finally:
        is_over.set()
        thread.join()
    for rank, error in errors:
        assert isinstance(error, SupervisionError), error
        assert rank == 2, "only calls of the one that is killed fail"
        assert "killed by SIGKILL" in str(error)
    counts = counter.count.call().get(LONG_S).values()
    assert [counts[rank] for rank in (0, 1, 3)] == [sent[rank] for rank in (0, 1, 3)]
    assert mesh.incarnations() == (0, 0, cycles, 0)


# -- a separate session: last, because it ends the session that modules share


@pytest.mark.slow
def test_ranks_whose_host_agent_died_go_to_a_new_one(by_value: None, own_session: None) -> None:
    procs = this_host().spawn_procs({"r": 2}, device="cpu")
    counter: Any = procs.spawn("counter", RestoringCounter)
    counter.add.call().get(LONG_S)
    agent = current_session().runtime.host_pool.agent_pid(current_session().local_host())
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: len(procs.deaths()) == 2, "the loss of all ranks")
    assert procs.heal().get(LONG_S) == (0, 1)
    assert counter.add.call().get(LONG_S).values() == ((1, 0), (1, 0))


HOLDS_OUT = """
import os, signal, time
def hold_out(*_):
    open(os.path.join({folder!r}, "told"), "w").close()
    while not os.path.exists(os.path.join({folder!r}, "go")): time.sleep(0.01)
    os._exit(0)
if rank: signal.signal(signal.SIGTERM, hold_out)
rank
"""


@pytest.mark.slow
def test_ranks_go_to_a_new_agent_if_theirs_was_asked_to_end(by_value: None, own_session: None, tmp_path: Path) -> None:
    """The agent waits for a rank that saves its work, and must not start others meanwhile."""
    procs = this_host().spawn_procs({"r": 2}, device="cpu")
    counter: Any = procs.spawn("counter", RestoringCounter)
    assert procs.run(HOLDS_OUT.format(folder=str(tmp_path))).get(LONG_S).values() == (0, 1)
    agent = current_session().runtime.host_pool.agent_pid(current_session().local_host())
    os.kill(agent, signal.SIGTERM)
    wait_for_files(tmp_path, "told")
    wait_until(lambda: list(procs.deaths()) == [0], "the loss of the other rank")
    healed = procs.heal()
    assert not healed.wait(0.5)
    (tmp_path / "go").touch()
    assert healed.get(LONG_S) == (0, 1)
    assert is_gone(agent)
    assert counter.add.call().get(LONG_S).values() == ((1, 0), (1, 0))
