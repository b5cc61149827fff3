"""Watching and ending an agent that another process launched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_kernel.launch.local import AdoptedHost
from tests.support.waiting import LONG_S, wait_until

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts processes and waits until they are ready."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", f"import signal, sys\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_an_adopted_host_is_watched_and_released(start: Start, tmp_path: Path) -> None:
    process = start("")
    log = tmp_path / "log"
    host = AdoptedHost(process.pid, os.pidfd_open(process.pid), log)
    assert host.poll() is None
    assert host.log_tail() == ()
    log.write_text("a\nb\n")
    assert host.log_tail() == ("a", "b")
    process.kill()
    how = wait_until(host.poll, "the end")
    assert how == f"the host agent (pid {process.pid}) ended"
    host.release()
    host.release()
    assert host.poll() == how


def test_an_agent_that_had_already_ended(tmp_path: Path) -> None:
    host = AdoptedHost(1, -1, tmp_path / "log")
    assert host.poll() == "the host agent (pid 1) ended"
    host.close(0)


def test_close_terminates_the_agent_and_then_kills_it(start: Start, tmp_path: Path) -> None:
    asked = start("")
    stubborn = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    for process, code in ((asked, -15), (stubborn, -9)):
        host = AdoptedHost(process.pid, os.pidfd_open(process.pid), tmp_path / "log")
        host.close(0.01)
        assert process.wait(LONG_S) == code
        host.close(0.01)  # a second call has no effect
