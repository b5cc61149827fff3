"""When `stop().get()` of a mesh returns, its processes have ended, and its actors have cleaned up."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ProcMesh,
    SupervisionError,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from tests.support.actors import Worker
from tests.support.ports import free_ports
from tests.support.waiting import LONG_S, wait_until

ENDLESS_S = 3600.0


class Holder(Worker):
    """Holds a port; its cleanup takes until a file exists."""

    def __init__(self, folder: str, port: int) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", port))
        self.socket.listen()

    def __cleanup__(self, error: BaseException | None) -> None:
        (self.folder / f"cleans {os.getpid()}").touch()
        wait_until((self.folder / "go on").exists, "the test")
        (self.folder / f"clean {os.getpid()}").touch()


class Deaf(Worker):
    """Ignores requests to end."""

    @endpoint
    def close_ears(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def __cleanup__(self, error: BaseException | None) -> None:
        threading.Event().wait()


class Parent(Actor):
    """Owns processes."""

    @endpoint
    def start(self) -> Any:
        self.procs = this_host().spawn_procs({"r": 2}, device="cpu")
        return self.procs


def is_there(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def spawn_procs(ranks: int = 2) -> ProcMesh:
    return this_host().spawn_procs({"r": ranks}, device="cpu")


def stop(mesh: Any, how: str, grace_s: float) -> Any:
    return (this_host() if how == "hosts" else mesh).stop(grace_s=grace_s)


@pytest.fixture(scope="module", autouse=True)
def controller(session: None, by_value: None) -> None:
    """Start the threads that the first actor needs, so that no test seems to leave them behind."""
    get_or_spawn_controller("first of all", Worker).get(LONG_S).stop().get(LONG_S)


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.mark.parametrize("how", ["processes", "hosts", "slice"])
def test_a_stop_waits_until_processes_are_gone_and_actors_have_cleaned_up(how: str, tmp_path: Path, port: int) -> None:
    mesh = spawn_procs()
    part = mesh.slice(r=1)
    pid = part.spawn("holder", Holder, str(tmp_path), port).pid.call_one().get(LONG_S)
    ending = stop(part if how == "slice" else mesh, how, ENDLESS_S)
    wait_until((tmp_path / f"cleans {pid}").exists, "the cleanup")
    assert not ending.done()
    again = stop(mesh, how, ENDLESS_S)
    (tmp_path / "go on").touch()
    assert ending.get(LONG_S) is None
    assert not is_there(pid)
    assert (tmp_path / f"clean {pid}").exists()
    after = spawn_procs(1)
    next_one = after.spawn("holder", Holder, str(tmp_path), port)  # the port is free
    next_one.initialized.get(LONG_S)
    assert again.get(LONG_S) is None
    after.stop().get(LONG_S)
    mesh.stop(grace_s=0).get(LONG_S)


def test_ranks_that_exceed_their_grace_or_are_dead_do_not_delay_a_stop() -> None:
    mesh = spawn_procs(3)
    deaf = mesh.spawn("deaf", Deaf)
    pids = deaf.pid.call().get(LONG_S).values()
    os.kill(pids[0], signal.SIGKILL)
    deaf.slice(r=1).close_ears.call_one().get(LONG_S)
    assert mesh.stop(grace_s=0.2).get(LONG_S) is None
    assert not any(map(is_there, pids))
    assert mesh.stop().get(LONG_S) is None
    assert set(mesh.deaths()) == {0, 1, 2}


def test_processes_that_are_stopped_before_they_are_up_are_gone() -> None:
    mesh = spawn_procs()
    mesh.stop().get(LONG_S)
    with pytest.raises(SupervisionError):
        mesh.initialized.get(LONG_S)


def test_a_stopped_actor_has_ended_its_processes(procs: ProcMesh) -> None:
    parent: Any = procs.slice(r=0).spawn("parent", Parent)
    pids = parent.start.call_one().get(LONG_S).spawn("workers", Worker).pid.call().get(LONG_S).values()
    parent.stop().get(LONG_S)
    assert not any(map(is_there, pids))


def test_a_rank_waits_for_the_processes_that_it_stops(procs: ProcMesh) -> None:
    mesh = spawn_procs()
    pids = mesh.spawn("workers", Worker).pid.call().get(LONG_S).values()
    procs.slice(r=0).map(lambda other: other.stop().get(), [mesh]).get(LONG_S)
    assert not any(map(is_there, pids))


def test_the_programs_own_process_cannot_be_stopped() -> None:
    with pytest.raises(ValueError, match="the program's own process can't be stopped"):
        this_proc().stop()
