"""``get_or_spawn_controller``: a name has one actor in the whole job, and a new one after that has ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    endpoint,
    get_or_spawn_controller,
)
from tests.support.actors import Worker
from tests.support.waiting import LONG_S

PROCS = {"r": 3}

NAMES = ("shared", "busy", "idle", "first", "second", "fragile", "a failure", "a stop")


class AskingWorker(Worker):
    """Gets actors by their names: another one in its constructor, and itself later."""

    def __init__(self, start: int = 0, *, fail: bool = False, ask: str = "") -> None:
        if fail:
            raise LookupError("nothing to count")
        super().__init__(start)
        self.other = get_or_spawn_controller(ask, AskingWorker, 100).get(LONG_S) if ask else None

    @endpoint
    def find_myself(self, name: str) -> bool:
        return isinstance(get_or_spawn_controller(name, AskingWorker).get(LONG_S), object)

    @endpoint
    def add_to_other(self) -> int:
        return int(self.other.add.call_one().get(LONG_S))  # type: ignore[union-attr]


class Client(Actor):
    """Gets the counter from a rank."""

    @endpoint
    def add(self, name: str) -> int:
        return get_or_spawn_controller(name, Worker, 0).get(LONG_S).add.call_one().get(LONG_S)


@pytest.fixture(scope="module", autouse=True)
def controller(procs: ProcMesh) -> None:
    """Start the threads that the first actor needs, so that no test seems to leave them behind."""
    get_or_spawn_controller("first of all", Worker).get(LONG_S).stop().get(LONG_S)


@pytest.fixture(autouse=True)
def ended(controller: None) -> Iterator[None]:
    """End the actors of a test."""
    yield
    for name in NAMES:
        get_or_spawn_controller(name=name, Class=Worker).get(LONG_S).stop().get(LONG_S)


def test_ranks_and_threads_that_ask_at_once_get_the_same_actor(procs: ProcMesh) -> None:
    client = procs.spawn("client", Client)
    asked = [client.add.call("shared") for _ in range(3)]
    found: list[int] = []

    def ask() -> None:
        found.append(get_or_spawn_controller("shared", Worker).get(LONG_S).add.call_one().get(LONG_S))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    counted = [value for one in asked for value in one.get(LONG_S).values()]
    assert sorted(found + counted) == list(range(1, 15))
    assert get_or_spawn_controller("shared", Worker).get(LONG_S).pid.call_one().get(LONG_S) == os.getpid()


def test_a_busy_actor_is_found_and_others_can_be_spawned(procs: ProcMesh, tmp_path: Path) -> None:
    busy = get_or_spawn_controller("busy", Worker, 7).get(LONG_S)
    waits = busy.wait_for.call_one(str(tmp_path / "go"))
    again = get_or_spawn_controller("busy", Worker).get(LONG_S)
    assert get_or_spawn_controller("idle", Worker, 1).get(LONG_S).add.call_one().get(LONG_S) == 2
    assert not waits.done()
    (tmp_path / "go").touch()
    assert again.add.call_one().get(LONG_S) == 8


def test_an_actor_can_get_others_in_its_init_and_itself_later(procs: ProcMesh) -> None:
    first = get_or_spawn_controller("first", AskingWorker, ask="second").get(LONG_S)
    assert first.add_to_other.call_one().get(LONG_S) == 101
    assert get_or_spawn_controller("second", AskingWorker).get(LONG_S).add.call_one().get(LONG_S) == 102
    assert first.find_myself.call_one("first").get(LONG_S)


def test_the_call_raises_the_error_of_the_constructor_and_the_next_call_spawns_a_new_actor(procs: ProcMesh) -> None:
    for _ in range(2):
        with pytest.raises(ActorError, match=r"spawning fragile failed(.|\n)*nothing to count"):
            get_or_spawn_controller("fragile", AskingWorker, fail=True).get(LONG_S)
    assert get_or_spawn_controller("fragile", Worker, 3).get(LONG_S).add.call_one().get(LONG_S) == 4


@pytest.mark.parametrize("end", ["a failure", "a stop"])
def test_a_new_actor_takes_the_name_of_one_that_has_ended(
    procs: ProcMesh, end: str, capfd: pytest.CaptureFixture[str]
) -> None:
    mortal: Any = get_or_spawn_controller(end, Worker, 5).get(LONG_S)
    assert mortal.add.call_one().get(LONG_S) == 6
    if end == "a stop":
        mortal.stop().get(LONG_S)
    else:
        mortal.fail.broadcast()
    with pytest.raises(SupervisionError):
        mortal.add.call_one().get(LONG_S)
    assert get_or_spawn_controller(end, Worker, 50).get(LONG_S).add.call_one().get(LONG_S) == 51
    client = procs.slice(r=0).spawn("client", Client)
    assert client.add.call_one(end).get(LONG_S) == 52


def test_misuse_raises_at_once(procs: ProcMesh) -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        get_or_spawn_controller("bad", Worker, 1, 2)
    with pytest.raises(ValueError, match="is not an Actor"):
        get_or_spawn_controller("bad", dict)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="name must be a str"):
        get_or_spawn_controller(3, Worker)  # type: ignore[arg-type]
