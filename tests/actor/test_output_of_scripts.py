"""The output of ranks in a script: every line arrives, once and in order, in a file and in a pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import LONG_S

LINES = 100_000

SCRIPT = """
from monarch_kernel.actor import Actor, endpoint, this_host
from monarch_kernel.runtime.controller.session import LocalAgents

class Writer(Actor):
    @endpoint
    def write(self, rank, count):
        for number in range(count):
            print("line", number)
        print("the end", rank, end="")

LocalAgents.is_light = True  # the ranks need no torch
procs = this_host().spawn_procs({{"r": 2}}, device="cpu", name="writers")
writers = procs.spawn("writers", Writer)
many = writers.slice(r=0).write.call_one(0, 100_000)
few = writers.slice(r=1).write.call_one(1, 3)
few.get()
many.get()
print("both have answered")
{end}
"""


def expected(rank: int, count: int) -> list[str]:
    return [*(f"writers[{rank}] line {number}" for number in range(count)), f"writers[{rank}] the end {rank}"]


def check(text: str) -> None:
    lines = text.splitlines()
    for rank, count in ((0, LINES), (1, 3)):
        assert [line for line in lines if line.startswith(f"writers[{rank}]")] == expected(rank, count)
    assert "both have answered" in lines
    assert len(lines) == LINES + 3 + 2 + 1


def write(folder: Path, end: str) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(end=end))
    return path


@pytest.mark.parametrize("end", ["procs.stop().get()", pytest.param("", marks=pytest.mark.slow)])
def test_every_line_is_in_a_file(tmp_path: Path, end: str) -> None:
    script = write(tmp_path, end)
    with open(tmp_path / "out", "w") as file:
        run = subprocess.run([sys.executable, script], stdout=file, stderr=subprocess.PIPE, timeout=LONG_S, check=False)
    assert run.returncode == 0, run.stderr.decode()
    check((tmp_path / "out").read_text())


@pytest.mark.slow
def test_every_line_comes_through_a_pipe_to_a_slow_reader(tmp_path: Path) -> None:
    """The reader takes a little at a time, so that the pipe of the script is full nearly always."""
    script = write(tmp_path, "")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        text = b"".join(iter(lambda: run.stdout.read(512), b""))  # type: ignore[union-attr]
        assert run.wait(LONG_S) == 0, run.stderr.read().decode()
    check(text.decode())
