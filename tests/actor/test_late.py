"""A long wait shows once which ranks have not answered, and what they are doing."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ProcMesh, current_rank, endpoint, this_proc
from monarch_kernel.runtime.rpc import waits
from tests.support.waiting import LONG_S, wait_for_files, wait_until

PROCS = {"r": 3}


class Slow(Actor):
    """Answers when a file exists; on some ranks at once."""

    @endpoint
    def load(self, path: str, *ranks: int) -> int:
        if not ranks or current_rank().rank in ranks:
            start_of(path, current_rank().rank).touch()
            wait_for(path)
        return current_rank().rank

    @endpoint
    def ask(self, other: Any, path: str) -> Any:
        """Wait for an actor that answers only after the warning about a long wait."""
        answer = other.load.call(path)
        wait_until_started(path, 0)  # rank in its slice
        return answer.get(warn_after_s=0.3).values()


class AsyncSlow(Actor):
    """The same on an event loop."""

    @endpoint
    async def load(self, path: str) -> None:
        start_of(path, current_rank().rank).touch()
        while not Path(path).exists():
            await asyncio.sleep(0.01)


def start_of(path: str | Path, rank: int) -> Path:
    """Return the file that shows that a rank waits for ``path``."""
    return Path(f"{path}-{rank}")


def wait_until_started(path: str | Path, *ranks: int) -> None:
    """Wait until these ranks wait for ``path``; a warning that comes earlier would show what they do before that."""
    files = [start_of(path, rank) for rank in ranks]
    wait_for_files(files[0].parent, *(file.name for file in files))


def wait_for(path: str) -> None:
    """Wait for a file in a loop of this module; the tests search for its line."""
    deadline = time.monotonic() + LONG_S
    while not Path(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Shown(list[str]):
    """Collects the warnings about waits on stderr; the first one also creates the file that an actor waits for.

    Other text is output of ranks, possibly of the previous test.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, text: str) -> None:
        if "no answer for" in text:
            self.append(text)
            self.path.touch()

    def flush(self) -> None: ...


@contextlib.contextmanager
def showing(path: Path) -> Iterator[Shown]:
    with contextlib.redirect_stderr(Shown(path)) as shown:  # type: ignore[type-var]
        yield shown


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """The file that an actor waits for."""
    return tmp_path / "go"


def test_the_warning_names_the_ranks_that_have_not_answered_and_their_lines(procs: ProcMesh, go: Path) -> None:
    slow = procs.spawn("slow", Slow)
    slow.load.call("/").get(LONG_S)
    answers = slow.load.call(str(go), 1, 2)
    wait_until_started(go, 1, 2)
    with showing(go) as shown:
        assert answers.get(LONG_S, warn_after_s=0.3).values() == (0, 1, 2)
    (text,) = shown  # once
    head, *lines = text.splitlines()
    assert re.fullmatch(r"slow\.load: no answer for [\d.]+ s from \[1-2\] of 3", head)
    # The ranks wait in a loop, and may be at different lines of it.
    assert [line.split()[0] for line in lines] in (["[1-2]"], ["[1]", "[2]"], ["[2]", "[1]"])
    for line in lines:
        assert "test_late.py, line " in line
        assert "in wait_for" in line


def test_the_warning_says_which_call_is_queued(procs: ProcMesh, go: Path) -> None:
    slow = procs.spawn("slow", Slow)
    slow.load.call("/").get(LONG_S)
    first = slow.load.call(str(go), 1)
    wait_until_started(go, 1)
    queued = slow.slice(r=slice(1, 2))  # the other ranks may answer late, too
    with showing(go) as shown:
        assert queued.load.call_one("/").get(LONG_S, warn_after_s=0.3) == 0
    first.get(LONG_S)
    head, line = shown[0].splitlines()
    assert head.endswith(" s from [0]")
    assert line.startswith("  [0] waits its turn: the actor is at ")


def test_the_warning_of_a_call_of_one_actor_names_its_rank(procs: ProcMesh, go: Path) -> None:
    slow: Any = procs.spawn("slow", Slow)
    future = slow.load.choose(str(go))
    wait_until_started(go, future.rank)
    with showing(go) as shown:
        assert future.get(LONG_S, warn_after_s=0.3) == future.rank
    assert f"s from [{future.rank}]\n" in shown[0]


def test_the_warning_shows_where_endpoints_await(procs: ProcMesh, go: Path) -> None:
    slow = procs.spawn("slow", AsyncSlow)
    answers = slow.load.call(str(go))
    wait_until_started(go, 0, 1, 2)
    with showing(go) as shown:
        answers.get(LONG_S, warn_after_s=0.3)
    assert "[0-2] " in shown[0]
    assert "await asyncio.sleep(0.01)" in shown[0]


def test_an_await_shows_the_warning_too(procs: ProcMesh, go: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_kernel.runtime.rpc.future.WARN_AFTER_S", 0.3)
    slow = procs.spawn("slow", Slow)

    async def wait() -> Any:
        answers = slow.load.call(str(go))
        wait_until_started(go, 0, 1, 2)
        return (await answers).values()

    with showing(go) as shown:
        assert asyncio.run(asyncio.wait_for(wait(), LONG_S)) == (0, 1, 2)
    assert "from [0-2] of 3" in shown[0]


def test_the_warning_includes_actors_of_the_controller(procs: ProcMesh, go: Path) -> None:
    here = this_proc().spawn("here", Slow)
    try:
        answers = here.load.call(str(go))
        wait_until_started(go, 0)
        with showing(go) as shown:
            answers.get(LONG_S, warn_after_s=0.3)
    finally:
        here.stop().get(LONG_S)
    assert "here.load: no answer for" in shown[0]
    assert "in wait_for" in shown[0]


def test_a_waiting_rank_shows_the_warning_as_its_output(
    procs: ProcMesh, capfd: pytest.CaptureFixture[str], go: Path
) -> None:
    slow = procs.slice(r=1).spawn("slow", Slow)
    asking = procs.slice(r=0).spawn("client", Slow).ask.call_one(slow, str(go))
    text = ""

    def is_shown() -> bool:
        nonlocal text
        text += "".join(capfd.readouterr())
        return "in wait_for" in text

    wait_until(is_shown, "what the rank waits for in its output")
    go.touch()
    assert asking.get(LONG_S) == (0,)
    assert "slow.load: no answer for" in text


def test_the_warning_names_a_process_that_does_not_respond(procs: ProcMesh, go: Path) -> None:
    holds_the_gil = f"ctypes.PyDLL(None).system(b'touch {go}-%d; until test -e {go}; do sleep 0.01; done' % rank)"
    answers = procs.run(f"import ctypes; {holds_the_gil}")
    wait_until_started(go, 0, 1, 2)
    with showing(go) as shown:
        answers.get(LONG_S, warn_after_s=0.3)
    assert "[0-2] did not answer what it does" in shown[0]


def test_fast_calls_and_calls_without_a_warning_show_nothing(procs: ProcMesh, go: Path) -> None:
    slow = procs.spawn("slow", Slow)
    with showing(go) as shown:
        slow.load.call("/").get(LONG_S, warn_after_s=0.3)
        with pytest.raises(TimeoutError):
            slow.load.call(str(go)).get(0.6, warn_after_s=None)
        go.touch()
        assert slow.load.call("/").get(LONG_S).values() == (0, 1, 2)
    assert not shown
    assert waits.WARN_AFTER_S == 60.0
