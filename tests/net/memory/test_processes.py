"""A descriptor of a process that may have ended, and how a process looks while it ends."""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Iterator

import pytest

from monarch_kernel.net.memory.processes import is_ending, open_pidfd
from tests.support.processes import has_ended
from tests.support.waiting import wait_until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_a_descriptor_signals_the_end_of_its_process(sleeper: subprocess.Popen[bytes]) -> None:
    fd = open_pidfd(sleeper.pid)
    try:
        assert not select.select([fd], [], [], 0)[0]
        assert not is_ending(sleeper.pid)
        sleeper.kill()
        assert select.select([fd], [], [], 60)[0]
        assert is_ending(sleeper.pid), "a zombie has no memory"
        sleeper.wait()
        assert is_ending(sleeper.pid)
    finally:
        os.close(fd)
    with pytest.raises(ProcessLookupError):
        open_pidfd(sleeper.pid)


def test_a_zombie_has_a_descriptor(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    wait_until(lambda: has_ended(sleeper.pid), "its end")
    os.close(open_pidfd(sleeper.pid))


def test_a_pid_that_belongs_to_a_thread_is_not_a_process() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        with pytest.raises(ProcessLookupError):
            open_pidfd(thread.native_id)
    finally:
        over.set()
        thread.join()
    for pid in (0, -1):
        with pytest.raises(ProcessLookupError):
            open_pidfd(pid)
