"""What the tests of all launchers need of an engine: hosts to give, and ways to make it stall and to kill a host."""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator

from monarch_kernel.launch.base import Launcher

__all__ = ["Bench"]


class Bench(ABC):
    """An engine that is up, and has three hosts to give at least; see `tests/launch/test_conformance.py`.

    Attributes:
        up_s: after how many seconds hosts that have not come up fail a test.
        lost_s: within how many seconds the death of a host is known; the timing tier asserts it.
        waits_for: what the engine says of hosts while it stalls, as a regular expression; empty where it says nothing.
    """

    up_s = 60.0
    lost_s = 10.0
    waits_for = ""

    @abstractmethod
    def make(self, hosts: int, python: str = "") -> Launcher:
        """Make a launcher that will be asked for as many hosts.

        Args:
            hosts: how many; of an engine whose hosts are named, the first of them. The launcher may be asked for another in
                place of one that died.
            python: interpreter of the hosts; left out, one that works.
        """

    @abstractmethod
    def stalled(self) -> contextlib.AbstractContextManager[None]:
        """Let no host come that is asked for within; what has not come by then comes, or is refused, when it is left."""

    def kill(self, agent_pid: int) -> None:
        """End a host without warning; where a whole machine can be ended, that, not only its agent."""
        os.kill(agent_pid, signal.SIGKILL)

    def left(self) -> list[str]:
        """What of ours there is in the engine: jobs, pods, groups, connections; nothing after a launcher was closed."""
        return []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Between two tests: an engine that has lost a machine gets it back."""
        yield
