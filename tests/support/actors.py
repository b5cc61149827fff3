"""Actors that several modules of tests share; the fixture ``by_value`` lets them travel to ranks by value.

An actor with a behaviour that only one module needs is defined there, under a name that says what it does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from monarch_kernel.actor import Actor, context, current_rank, endpoint
from tests.support.waiting import wait_until

__all__ = ["Counter", "Worker", "host_agent", "main_thread_waits_for_a_future"]


class Counter(Actor):
    """Counts.

    Args:
        start: the value to count from.
    """

    def __init__(self, start: int = 0) -> None:
        self.count = start

    @endpoint
    def add(self, amount: int = 1, *, times: int = 1) -> int:
        """Count on, and give the new value."""
        self.count += amount * times
        return self.count

    @endpoint
    def value(self) -> int:
        return self.count


class Worker(Counter):
    """Counts, says where it is, waits, fails and dies, each on demand."""

    @endpoint
    def rank(self) -> int:
        """Flat rank in the mesh as spawned."""
        return context().actor_instance.rank.rank

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait_for(self, path: str) -> int:
        """Wait until a file exists; gives the rank among those that got the message."""
        wait_until(Path(path).exists, path)
        return current_rank().rank

    @endpoint
    def wait_by_rank(self, folder: str) -> int:
        """Wait until the file exists that has the rank for its name."""
        rank = context().actor_instance.rank.rank
        wait_until(Path(folder, str(rank)).exists, f"{folder}/{rank}")
        return rank

    @endpoint
    def sleep(self, folder: str) -> None:
        """Create a file that has the rank for its name, then sleep until an interrupt."""
        Path(folder, str(context().actor_instance.rank.rank)).touch()
        while True:
            time.sleep(0.001)

    @endpoint
    def fail(self, text: str = "no good", *ranks: int) -> int:
        """Fail on these ranks, or on all if there are none; the others give their rank."""
        rank = context().actor_instance.rank.rank
        if not ranks or rank in ranks:
            raise ValueError(text)
        return rank

    @endpoint
    def die(self, code: int = 17) -> None:
        """End the process."""
        os._exit(code)

    @endpoint
    def spawn_below(self, procs: Any, name: str = "below") -> Any:
        """Spawn another worker, which this one owns."""
        return procs.spawn(name, Worker)


def main_thread_waits_for_a_future() -> bool:
    """Whether the main thread is inside the transport, as it is while it waits for an answer."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not frame.f_code.co_filename.endswith("net/transport/driver.py"):
        frame = frame.f_back
    return frame is not None


def host_agent() -> int:
    """The pid of the host agent of this rank.

    A rank that has just started may still have another parent: the process that forked it, which ends.
    """

    def agent() -> int:
        parent = os.getppid()
        with suppress(OSError):  # it has ended, and this process has another parent
            return parent if b"agent" in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0") else 0
        return 0

    return wait_until(agent, "the host agent to be the parent of this process")
