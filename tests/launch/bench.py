"""The interface of an engine in the conformance tests of launchers: it has hosts, can stall, and can kill a host."""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator

from monarch_kernel.launch.base import Launcher

__all__ = ["Bench"]


class Bench(ABC):
    """A running engine with at least three free hosts; see `tests/launch/test_conformance.py`.

    Attributes:
        up_s: how long hosts may take to come up before a test fails, in seconds.
        lost_s: how long the death of a host may go unnoticed, in seconds; the timing tier asserts it.
        waits_for: regular expression for what the engine says about hosts while it stalls; empty if it says nothing.
    """

    up_s = 60.0
    lost_s = 10.0
    waits_for = ""

    @abstractmethod
    def make(self, hosts: int, python: str = "") -> Launcher:
        """Create a launcher for a number of hosts.

        Args:
            hosts: how many; an engine with named hosts uses the first ones. The test may ask the launcher for another host to
                replace one that died.
            python: interpreter of the hosts; by default one that works.
        """

    @abstractmethod
    def stalled(self) -> contextlib.AbstractContextManager[None]:
        """Hold back all requested hosts inside the context; after it, they come up or are refused."""

    def kill(self, agent_pid: int) -> None:
        """Kill a host without warning: the whole machine if the engine allows that, else only its agent."""
        os.kill(agent_pid, signal.SIGKILL)

    def left(self) -> list[str]:
        """Return the launcher's objects in the engine (jobs, pods, groups, connections); must be empty after `close`."""
        return []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Wrap a test; restore the machines that it killed."""
        yield
