"""Actors that several test modules share; the fixture ``by_value`` sends them to ranks by value.

An actor that only one module needs is defined there, under a name that says what it does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
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
        """Increase the count, and give the new value."""
        self.count += amount * times
        return self.count

    @endpoint
    def value(self) -> int:
        return self.count


class Worker(Counter):
    """Counts, reports its rank and pid, waits, fails or dies on request."""

    @endpoint
    def rank(self) -> int:
        """The flat rank in the mesh as spawned."""
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
        """Wait until the file exists that is named after the rank."""
        rank = context().actor_instance.rank.rank
        wait_until(Path(folder, str(rank)).exists, f"{folder}/{rank}")
        return rank

    @endpoint
    def sleep(self, folder: str) -> None:
        """Create a file that is named after the rank, then sleep until an interrupt."""
        Path(folder, str(context().actor_instance.rank.rank)).touch()
        while True:
            time.sleep(0.001)

    @endpoint
    def fail(self, text: str = "no good", *ranks: int) -> int:
        """Fail on these ranks, or on all if none are named; the other ranks give their number."""
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
    """Whether the main thread waits for an answer inside the transport."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not frame.f_code.co_filename.endswith("net/transport/driver.py"):
        frame = frame.f_back
    return frame is not None


def host_agent() -> int:
    """The pid of the host agent of this rank, of which ranks are children."""
    return os.getppid()
