"""Several ranks that die together or one after another, and stops while some ranks are dead."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ProcMesh, SupervisionError, endpoint, this_host
from tests.support.processes import kill_ranks
from tests.support.waiting import LONG_S, wait_for_files, wait_until

pytestmark = pytest.mark.usefixtures("by_value")


class Guest(Actor):
    """Writes to a file in its cleanup; its constructor waits until a file is gone."""

    def __init__(self, gate: str = "", ends: str = "") -> None:
        self.ends = ends
        wait_until(lambda: not gate or not os.path.exists(gate), "the end of the gate")

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.ends:
            with open(self.ends, "a") as file:
                file.write(f"{os.getpid()}\n")


class Host(Actor):
    """Spawns guests, and ignores their failures."""

    @endpoint
    def spawn(self, procs: Any, *args: Any) -> Any:
        self.guests = procs.spawn("guests", Guest, *args)
        return self.guests

    @endpoint
    def release(self) -> None:
        self.guests.stop().get(LONG_S)

    def __supervise__(self, failure: Any) -> bool:
        return True


class Heir(Actor):
    """Calls all surviving actors, which answer when a file is gone."""

    def __init__(self, gate: str) -> None:
        self.gate = gate
        self.asked: list[int] = []

    def __restore__(self, peers: Any) -> None:
        self.asked.append(0 if peers is None else len(peers))
        if peers is not None:
            peers.ask.call().get(LONG_S)

    @endpoint
    def ask(self) -> None:
        Path(f"{self.gate}.asked").touch()
        wait_until(lambda: not os.path.exists(self.gate), "the end of the gate")

    @endpoint
    def found(self) -> list[int]:
        return self.asked


class AsyncHeir(Actor):
    """The same, asynchronous."""

    def __init__(self, gate: str) -> None:
        self.gate = gate
        self.asked: list[int] = []

    async def __restore__(self, peers: Any) -> None:
        self.asked.append(0 if peers is None else len(peers))
        if peers is not None:
            await peers.ask.call()

    @endpoint
    async def ask(self) -> None:
        Path(f"{self.gate}.asked").touch()
        while os.path.exists(self.gate):
            await asyncio.sleep(0.005)

    @endpoint
    async def found(self) -> list[int]:
        return self.asked


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    """Three processes, which a test may end."""
    mesh = this_host().spawn_procs({"r": 3}, device="cpu")
    mesh.initialized.get(LONG_S)
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


def test_a_rank_that_dies_while_another_is_replaced_is_replaced_too(procs: ProcMesh, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    guest = procs.spawn("guest", Guest, str(gate))
    guest.pid.call().get(LONG_S)
    kill_ranks(procs, 1)
    gate.touch()
    healed = procs.heal()
    wait_until(lambda: procs.view().ranks[1].state == "running", "the new process")
    kill_ranks(procs, 0, 2)
    gate.unlink()
    assert healed.get(LONG_S) == (0, 1, 2)
    assert procs.deaths() == {}
    assert len(guest.pid.call().get(LONG_S)) == 3


@pytest.mark.parametrize("kind", [Heir, AsyncHeir])
def test_an_actor_restores_itself_from_the_others_when_the_one_it_calls_dies(
    procs: ProcMesh, tmp_path: Path, kind: type[Any]
) -> None:
    gate = tmp_path / "gate"
    heirs = procs.spawn("heirs", kind, str(gate))
    heirs.found.call().get(LONG_S)
    kill_ranks(procs, 1)
    gate.touch()
    healed = procs.heal()
    wait_for_files(tmp_path, "gate.asked")
    kill_ranks(procs, 2)
    gate.unlink()
    assert healed.get(LONG_S) == (1, 2)
    assert heirs.slice(r=1).found.call_one().get(LONG_S) == [2, 1]


def test_a_call_that_arrives_before_the_spawn_waits_for_it(procs: ProcMesh, tmp_path: Path) -> None:
    """Ranks learn of each other in any order: here the rank that spawns learns of the others last."""
    procs.slice(r=0).run(
        "import threading\nfrom monarch_kernel.runtime.worker.client import WorkerClient\nheard = WorkerClient.handle_status\n"
        "def late(self, news):\n    threading.Timer(0.5, self._driver.submit, [lambda: heard(self, news)]).start()\n"
        "WorkerClient.handle_status = late"
    ).get(LONG_S)
    host: Any = procs.slice(r=0).spawn("host", Host)
    guest: Any = host.spawn.call_one(procs, "", str(tmp_path / "ends")).get(LONG_S)
    assert len(guest.pid.call().get(LONG_S)) == 3


@pytest.mark.parametrize("by", ["the program", "an actor"])
def test_a_stop_reaches_living_actors_of_a_mesh_with_dead_ranks(procs: ProcMesh, tmp_path: Path, by: str) -> None:
    ends = tmp_path / "ends"
    host: Any = procs.slice(r=0).spawn("host", Host)
    guest: Any = (
        procs.spawn("guest", Guest, "", str(ends))
        if by == "the program"
        else host.spawn.call_one(procs, "", str(ends)).get(LONG_S)
    )
    pids = guest.pid.call().get(LONG_S).values()
    kill_ranks(procs, 1)
    if by == "the program":
        guest.stop().get(LONG_S)
    else:
        host.release.call_one().get(LONG_S)
    assert sorted(map(int, ends.read_text().split())) == sorted((pids[0], pids[2]))
    assert procs.heal().get(LONG_S) == (1,)
    with pytest.raises(SupervisionError) as caught:
        guest.pid.call().get(LONG_S)
    assert caught.value.ranks == (0, 1, 2)
