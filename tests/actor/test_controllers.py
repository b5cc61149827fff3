"""The one actor of a name in the whole job: whoever asks gets the same, and another if it has ended."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from monarch_kernel.actor import (
    Actor,
    ActorError,
    ProcMesh,
    SupervisionError,
    endpoint,
    get_or_spawn_controller,
    this_host,
)

LONG_S = 60.0


class Counter(Actor):
    """Counts, and can be kept busy."""

    def __init__(self, start: int = 0, *, fail: bool = False, ask: str = "") -> None:
        if fail:
            raise LookupError("nothing to count")
        self.value = start
        self.other = get_or_spawn_controller(ask, Counter, 100).get(LONG_S) if ask else None

    @endpoint
    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    @endpoint
    def where(self) -> int:
        return os.getpid()

    @endpoint
    def wait(self, path: str) -> None:
        deadline = time.monotonic() + LONG_S
        while not Path(path).exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    @endpoint
    def find_myself(self, name: str) -> bool:
        return isinstance(get_or_spawn_controller(name, Counter).get(LONG_S), object)

    @endpoint
    def add_to_other(self) -> int:
        return int(self.other.add.call_one().get(LONG_S))  # type: ignore[attr-defined]

    @endpoint
    def fail(self) -> None:
        raise ValueError("no good")


class Asker(Actor):
    """Asks for the counter from a rank."""

    @endpoint
    def add(self, name: str) -> int:
        return get_or_spawn_controller(name, Counter, 0).get(LONG_S).add.call_one().get(LONG_S)


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    mesh = this_host().spawn_procs({"r": 3}, device="cpu")
    mesh.initialized.get(LONG_S)
    get_or_spawn_controller("first of all", Counter).get(LONG_S).stop().get(LONG_S)
    yield mesh
    mesh.stop().get()  # the session is the folder's
    cloudpickle.unregister_pickle_by_value(module)


NAMES = ("shared", "busy", "idle", "first", "second", "fragile", "a failure", "a stop")


@pytest.fixture(autouse=True)
def ended(procs: ProcMesh) -> Iterator[None]:
    """What a test has asked for ends with it."""
    yield
    for name in NAMES:
        get_or_spawn_controller(name, Counter).get(LONG_S).stop().get(LONG_S)


def test_all_who_ask_at_once_get_the_same(procs: ProcMesh) -> None:
    asker = procs.spawn("asker", Asker)
    asked = [asker.add.call("shared") for _ in range(3)]
    found: list[int] = []

    def ask() -> None:
        found.append(get_or_spawn_controller("shared", Counter).get(LONG_S).add.call_one().get(LONG_S))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    counted = [value for one in asked for value in one.get(LONG_S).values()]
    assert sorted(found + counted) == list(range(1, 15))
    assert get_or_spawn_controller("shared", Counter).get(LONG_S).where.call_one().get(LONG_S) == os.getpid()


def test_one_that_is_busy_is_found_and_others_are_made(procs: ProcMesh, tmp_path: Path) -> None:
    busy = get_or_spawn_controller("busy", Counter, 7).get(LONG_S)
    waits = busy.wait.call_one(str(tmp_path / "go"))
    again = get_or_spawn_controller("busy", Counter).get(LONG_S)
    assert get_or_spawn_controller("idle", Counter, 1).get(LONG_S).add.call_one().get(LONG_S) == 2
    assert not waits.done()
    (tmp_path / "go").touch()
    assert again.add.call_one().get(LONG_S) == 8


def test_one_may_ask_for_itself_and_for_others_while_it_is_made(procs: ProcMesh) -> None:
    first = get_or_spawn_controller("first", Counter, ask="second").get(LONG_S)
    assert first.add_to_other.call_one().get(LONG_S) == 101
    assert get_or_spawn_controller("second", Counter).get(LONG_S).add.call_one().get(LONG_S) == 102
    assert first.find_myself.call_one("first").get(LONG_S)


def test_a_constructor_that_fails_is_told_and_the_next_call_makes_another(procs: ProcMesh) -> None:
    for _ in range(2):
        with pytest.raises(ActorError, match=r"spawning fragile failed(.|\n)*nothing to count"):
            get_or_spawn_controller("fragile", Counter, fail=True).get(LONG_S)
    assert get_or_spawn_controller("fragile", Counter, 3).get(LONG_S).add.call_one().get(LONG_S) == 4


@pytest.mark.parametrize("end", ["a failure", "a stop"])
def test_one_that_has_ended_is_made_anew(procs: ProcMesh, end: str, capfd: pytest.CaptureFixture[str]) -> None:
    mortal: Any = get_or_spawn_controller(end, Counter, 5).get(LONG_S)
    assert mortal.add.call_one().get(LONG_S) == 6
    if end == "a stop":
        mortal.stop().get(LONG_S)
    else:
        mortal.fail.broadcast()
    with pytest.raises(SupervisionError):
        mortal.add.call_one().get(LONG_S)
    assert get_or_spawn_controller(end, Counter, 50).get(LONG_S).add.call_one().get(LONG_S) == 51
    asker = procs.slice(r=0).spawn("asker", Asker)
    assert asker.add.call_one(end).get(LONG_S) == 52


def test_what_cannot_be_made_is_refused_at_once(procs: ProcMesh) -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        get_or_spawn_controller("bad", Counter, 1, 2)
    with pytest.raises(ValueError, match="is no Actor"):
        get_or_spawn_controller("bad", dict)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="name must be a str"):
        get_or_spawn_controller(3, Counter)  # type: ignore[arg-type]
