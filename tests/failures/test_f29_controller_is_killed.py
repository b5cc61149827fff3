"""F29: the program is killed; agents on other hosts end their ranks after the grace period and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.failures.machines import LONG_S, family, wait_until
from tests.support.processes import is_alive
from tests.support.timing import Bar

GRACE_S = 1.5
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from tests.failures.machines import Machines, hosts_on
machines = Machines(Path({logs!r}))
mesh = hosts_on(machines, 2, grace_s={grace_s}, is_light=True).spawn_procs({{"gpus": 2}}, device="cpu")
mesh.initialized.get(60)
print(*(agent.pid for agent in machines.agents), flush=True)
cell = mesh.run("import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)")
sys.stdin.readline()
"""


class Program:
    """A program with ranks on two hosts, which run a cell until the program gets a line of input."""

    def __init__(self, logs: Path, grace_s: float) -> None:
        self._before = directories()
        here = str(Path(__file__).parents[2])
        code = textwrap.dedent(PROGRAM).format(here=here, logs=str(logs), grace_s=grace_s)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.agents = [int(pid) for pid in self.process.stdout.readline().split()]
        assert len(self.agents) == 2
        for agent in self.agents:  # an agent, its zygote, two ranks, and a child of each of these
            wait_until(lambda agent=agent: len(family(agent)) == 6, "the cell to run")  # type: ignore[misc]

    def below(self) -> list[psutil.Process]:
        return [process for agent in self.agents for process in family(agent)]

    def left(self) -> set[str]:
        """List its directories that still exist."""
        return directories() - self._before

    def close(self) -> None:
        """End the program and its agents, which would otherwise wait for the end of the grace period."""
        below = self.below()
        self.process.kill()
        self.process.wait()
        for process in below:
            if process.pid in self.agents:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
        wait_until(lambda: not any(map(is_alive, below)), "the agents and their ranks to end")
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def program(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Program]:
    program = Program(tmp_path, getattr(request, "param", GRACE_S))
    yield program
    program.close()


def directories() -> set[str]:
    return {name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("monarch-")}


@pytest.mark.slow
def test_agents_end_their_ranks_after_the_grace_period(program: Program, bar: Bar) -> None:
    below = program.below()
    program.process.send_signal(signal.SIGKILL)
    start = time.monotonic()
    program.process.wait()
    wait_until(lambda: not any(map(is_alive, below)), "all processes to end")
    bar.check_above(time.monotonic() - start, GRACE_S / 2, "the end of the agents")
    bar.check(time.monotonic() - start, 3 * GRACE_S + 3.0, "the end of the agents")
    wait_until(lambda: not program.left(), "its directories to be removed")


@pytest.mark.slow
@pytest.mark.parametrize("program", [6.0], indirect=True)
def test_a_controller_that_stops_for_less_than_the_grace_period_loses_nothing(program: Program) -> None:
    below = program.below()
    program.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    while time.monotonic() < start + 1.5:
        assert all(map(is_alive, below))
        time.sleep(0.01)
    program.process.send_signal(signal.SIGCONT)
    while time.monotonic() < start + 3.0:  # neither end considers the other dead
        assert all(map(is_alive, below))
        time.sleep(0.01)
    assert program.process.poll() is None


def test_a_program_that_ends_leaves_nothing(program: Program) -> None:
    below = program.below()
    assert program.process.stdin is not None
    program.process.stdin.write("\n")
    program.process.stdin.flush()
    assert program.process.wait(LONG_S) == 0
    wait_until(lambda: not any(map(is_alive, below)), "all processes to end")
    wait_until(lambda: not program.left(), "its directories to be removed")
