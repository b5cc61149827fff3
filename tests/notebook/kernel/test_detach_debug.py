"""Ranks that have stopped in the debugger when their kernel ends: the next kernel learns of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebook.kernel.conftest import START_S, Notebook
from tests.notebook.kernel.test_debug import send
from tests.notebook.kernel.test_detach import UP, kernel, kill, place
from tests.support.waiting import wait_until

__all__ = ["kernel", "place"]

pytestmark = pytest.mark.timeout(120)

STOPS = "%%remote t --background\nx = rank * 10\nif rank == 1:\n    breakpoint()\nx + 1"


@pytest.mark.slow
def test_a_breakpoint_survives_the_kernel(place: Path, kernel: Callable[[], Notebook]) -> None:
    first = kernel()
    first.ok(UP, START_S)
    cell = send(first, STOPS)
    cell.wait_for(lambda cell: "t[1] stopped at breakpoint" in cell.stdout)
    debug = send(first, "%mesh debug")  # between two commands, so that another prompt is open
    debug.prompt()
    assert debug.type("p x") == "10\n"
    kill(first)

    second = kernel()
    attach = send(second, "%mesh attach t")
    attach.wait_for(lambda cell: "t[1] stopped at breakpoint: cell [2], line 4; %mesh debug t[1] opens" in cell.stdout)
    assert attach.stdout.count("stopped at breakpoint") == 1
    assert attach.stdout.startswith("t: attached")
    debug = send(second, "%mesh debug")
    assert debug.prompt() == "[1] (Pdb) "
    debug.type("p x + 1")
    debug.wait_for(lambda cell: "11\n" in cell.stdout)
    debug.type("c")
    attach.wait_for(lambda cell: "[1] 11" in cell.plain)
    assert second.ok("%remote t rank").plain == "[0] 0\n[1] 1"
    second.ok("%mesh down t")


@pytest.mark.slow
def test_a_post_mortem_of_an_earlier_kernel_leaves_no_prompt(place: Path, kernel: Callable[[], Notebook]) -> None:
    first = kernel()
    first.ok(UP, START_S)
    assert first.run("%%remote t[1]\nx = 5\n1 / 0").ename == "RemoteError"
    debug = send(first, "%mesh debug")
    debug.prompt()
    kill(first)

    second = kernel()
    wait_until((place / "t" / "detached").exists, "the agent to notice it")
    attach = second.ok("%mesh attach t")
    assert "stopped" not in attach.stdout
    debug = send(second, "%mesh debug")  # the ranks keep the error
    assert debug.prompt() == "[1] (Pdb) "
    debug.type("q")
    assert second.ok("%remote t[1] x").plain == "[1] 5"
    second.ok("%mesh down t")
