"""Hosts that are agents on this machine, behave as if they were elsewhere, and fail as the test wants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from monarch_kernel.actor import Actor, HostMesh, endpoint
from monarch_kernel.actor.hosts import serve_ranks
from monarch_kernel.controller.session import current_session
from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.local import LocalHost, LocalLauncher
from monarch_kernel.mesh import Extent, Region
from monarch_kernel.wire.config import AgentConfig
from tests.failures.proxy import Proxy

__all__ = ["LONG_S", "Ledger", "Machines", "family", "hosts_on", "is_alive", "wait_until"]

LONG_S = 60.0


class Machines:
    """The local launcher, with a hand on its agents and, if asked for, on the network between them and the controller.

    Attributes:
        agents: in the order in which they were launched.
        meshes: what `hosts_on` has made of them.
        proxies: of each agent, the same way; empty without ``through_proxies``.
        room: how many agents there may be at the same time, as where hosts are named.
    """

    name = "local"

    def __init__(self, directory: Path, *, through_proxies: bool = False) -> None:
        self._launcher = LocalLauncher(directory)
        self._through_proxies = through_proxies
        self.agents: list[LocalHost] = []
        self.meshes: list[HostMesh] = []
        self.proxies: list[Proxy] = []
        self.room = 1000

    def launch(self, configs: Sequence[AgentConfig]) -> Sequence[LocalHost]:
        if len(configs) + sum(agent.poll() is None for agent in self.agents) > self.room:
            raise LaunchError("all hosts are in use")
        found = self._launcher.launch([self._proxied(config) for config in configs])
        self.agents += found
        return found

    def progress(self) -> str:
        return self._launcher.progress()

    def close(self, timeout_s: float) -> None:
        self._launcher.close(timeout_s)
        while self.proxies:
            self.proxies.pop().close()

    def _proxied(self, config: AgentConfig) -> AgentConfig:
        if not self._through_proxies:
            return config
        proxy = Proxy("127.0.0.1", int(config.addresses[0].rpartition(":")[2]))
        self.proxies.append(proxy)
        return msgspec.structs.replace(config, addresses=(f"tcp://127.0.0.1:{proxy.port}",))

    def pid(self, host: int) -> int:
        """Of the agent that was launched as this one, counted from 0."""
        return self.agents[host].pid

    def signal(self, host: int, signum: signal.Signals) -> None:
        """Signal an agent, and nothing else."""
        os.kill(self.pid(host), signum)


class Ledger(Actor):
    """Writes down what it is called with."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    @endpoint
    def take(self, number: int) -> int:
        self.taken.append(number)
        return number

    @endpoint
    def all(self) -> list[int]:
        return self.taken

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ask(self, other: Any, numbers: Sequence[int]) -> list[int]:
        return [other.take.call_one(number).get() for number in numbers]


def hosts_on(machines: Machines, count: int, **options: Any) -> HostMesh:
    """Have so many agents launched; options as for `Session.add_hosts`."""
    session = current_session()
    serve_ranks(session)
    numbers = session.add_hosts(machines, count, **options)
    machines.meshes.append(HostMesh(session.runtime, Region.whole(Extent({"hosts": count})), numbers))
    return machines.meshes[-1]


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; not if nobody has collected its status yet."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = LONG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"in vain waited for: {what}"
        time.sleep(0.005)
