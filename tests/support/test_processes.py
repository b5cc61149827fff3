"""The helpers for processes distinguish running processes, zombies, and processes that are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import psutil
import pytest

from tests.support.processes import (
    assert_gone,
    children,
    command_of,
    descendants,
    has_ended,
    is_alive,
    is_gone,
    marked,
    tree,
    wait_gone,
)
from tests.support.waiting import wait_until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_process_that_runs(sleeper: subprocess.Popen[bytes]) -> None:
    process = psutil.Process(sleeper.pid)
    assert is_alive(process)
    assert not has_ended(sleeper.pid)
    assert not is_gone(sleeper.pid)
    assert children(os.getpid())[sleeper.pid] == b"sleep\x001000\x00"
    assert sleeper.pid in descendants(os.getpid())
    assert tree(sleeper.pid) == [process]
    assert command_of(process) == ["sleep", "1000"]


def test_a_zombie_has_ended_but_is_not_gone(sleeper: subprocess.Popen[bytes]) -> None:
    process = psutil.Process(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
    assert_gone([process])
    assert not is_alive(process)
    assert has_ended(sleeper.pid)
    assert not is_gone(sleeper.pid)
    assert children(os.getpid())[sleeper.pid] == b""
    assert command_of(process) == []


def test_a_process_that_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    process = psutil.Process(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    wait_gone(sleeper.pid)
    assert_gone([process])
    assert not is_alive(process)
    assert has_ended(sleeper.pid)
    assert is_gone(sleeper.pid)
    assert sleeper.pid not in children(os.getpid())
    assert (children(sleeper.pid), descendants(sleeper.pid), tree(sleeper.pid)) == ({}, [], [])
    assert command_of(process) == []


def test_a_thread_does_not_count_as_a_process() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert thread.native_id is not None
    assert os.path.exists(f"/proc/{thread.native_id}")
    assert is_gone(thread.native_id)
    over.set()
    thread.join()


def test_a_mark_is_inherited() -> None:
    mark = f"SOME_MARK={uuid.uuid4().hex}"
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    name, _, value = mark.partition("=")
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, name: value}) as process:
        wait_until(lambda: len(marked(mark)) == 2, "the process and its child")
        assert marked(mark) == {process.pid, *descendants(process.pid)}
        assert marked(mark[:-1]) == set()
        process.communicate(b"\n")
    assert marked(mark) == set()


def test_processes_and_threads_may_end_while_they_are_listed() -> None:
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            subprocess.run(["true"], check=True)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        children(os.getpid())
        descendants(os.getpid())
        for process in tree(os.getpid()):
            is_alive(process)
            command_of(process)
    over.set()
    for thread in threads:
        thread.join()
