"""Hosts that are agents on this machine, behave as if they were remote, and fail when a test wants."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from monarch_kernel.actor import Actor, Future, HostMesh, ProcMesh, ValueMesh, endpoint
from monarch_kernel.actor.host_mesh import serve_ranks
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import LaunchError
from monarch_kernel.launch.base import agent_command
from monarch_kernel.launch.local import LocalHost, LocalLauncher
from monarch_kernel.net.wire.config import AgentConfig
from monarch_kernel.runtime.controller.session import current_session
from tests.bed.bed import Bed, BedHost
from tests.failures.proxy import Proxy
from tests.support.processes import command_of, tree
from tests.support.waiting import wait_until

__all__ = [
    "APART",
    "LONG_S",
    "CallLog",
    "Machines",
    "Stream",
    "can_be_apart",
    "family",
    "host_of",
    "hosts_on",
    "pairs_on",
    "wait_until",
]

LONG_S = 60.0

APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Command prefix that hides all other processes of the machine, as a container or another machine does."""


def can_be_apart() -> bool:
    """Whether `APART` works on this machine."""
    return shutil.which("unshare") is not None and not subprocess.run([*APART, "true"], capture_output=True).returncode


class Machines:
    """A local launcher that gives tests control of its agents and, optionally, of the network to the controller.

    Args:
        directory: directory for the files of agents.
        through_proxies: whether each agent reaches the controller through its own proxy.
        bed: where each agent gets its own host; the caller is on the controller's host.
        within: prefix of the agents' commands, such as ``unshare``.

    Attributes:
        agents: the agents, in the order of their launch.
        meshes: the host meshes that `hosts_on` made.
        proxies: the proxy of each agent, in the same order; empty without ``through_proxies``.
        bed: as given.
        hosts: the bed's host of each agent, in the same order; empty without a bed.
        room: how many agents may run at the same time, as for a launcher with named hosts.
    """

    name = "local"

    def __init__(
        self, directory: Path, *, through_proxies: bool = False, bed: Bed | None = None, within: Sequence[str] = ()
    ) -> None:
        self._directory = directory
        self._launchers: list[LocalLauncher] = []
        self._through_proxies = through_proxies
        self.bed = bed
        self._within = within
        self.hosts: list[BedHost] = []
        self.agents: list[LocalHost] = []
        self.meshes: list[HostMesh] = []
        self.proxies: list[Proxy] = []
        self.room = 1000

    def launch(self, configs: Sequence[AgentConfig]) -> Sequence[LocalHost]:
        if len(configs) + sum(agent.poll() is None for agent in self.agents) > self.room:
            raise LaunchError("all hosts are in use")
        found = [self._launch(self._proxied(config)) for config in configs]
        self.agents += found
        return found

    def progress(self) -> str:
        return ""

    def close(self, timeout_s: float) -> None:
        while self._launchers:
            self._launchers.pop().close(timeout_s)
        while self.proxies:
            self.proxies.pop().close()

    def _launch(self, config: AgentConfig) -> LocalHost:
        command = (*self._within, *agent_command())
        if self.bed is not None:
            self.hosts.append(self.bed.add())
            command = self.hosts[-1].command(command)
        self._launchers.append(LocalLauncher(self._directory, command))
        (found,) = self._launchers[-1].launch([config])
        return found

    def _proxied(self, config: AgentConfig) -> AgentConfig:
        if not self._through_proxies:
            return config
        proxy = Proxy("127.0.0.1", int(config.addresses[0].rpartition(":")[2]))
        self.proxies.append(proxy)
        return msgspec.structs.replace(config, addresses=(f"tcp://127.0.0.1:{proxy.port}",))

    def pid(self, host: int) -> int:
        """Give the pid of an agent, by the order of launch, from 0."""
        return self.agents[host].pid

    def await_up(self, mesh: ProcMesh) -> None:
        """Wait until all ranks of a mesh are up; a failure says what the ranks, their hosts and the processes there do."""
        if mesh.initialized.wait(LONG_S):
            mesh.initialized.get()
            return
        lines = [f"after {LONG_S:g} s ranks are not up"]
        lines += [f"[{rank.rank}] {rank.state}, pid {rank.pid}, on {rank.host}" for rank in mesh.view().ranks]
        for agent in self.agents:
            lines += [f"agent {agent.pid}: {agent.poll() or 'runs'}", *(f"  | {line}" for line in agent.log_tail())]
            lines += [f"  {_described(process)}" for process in tree(agent.pid)]
        raise AssertionError("\n".join(lines))

    def signal(self, host: int, signum: signal.Signals) -> None:
        """Signal an agent, but no other process of its host."""
        os.kill(self.pid(host), signum)


class CallLog(Actor):
    """Records the numbers that it is called with."""

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


class Stream:
    """Numbered calls to every rank of a mesh, made without waiting for answers, and their results."""

    def __init__(self, mesh: ProcMesh) -> None:
        self.call_logs = mesh.spawn("call_logs", CallLog)
        self.futures: list[Future[ValueMesh[int]]] = []
        self.call_logs.all.call().get(LONG_S)

    def flow(self, seconds: float) -> None:
        """Make calls for a while, but at least 25."""
        until, least = time.monotonic() + seconds, len(self.futures) + 25
        while time.monotonic() < until or len(self.futures) < least:
            self.futures.append(self.call_logs.take.call(len(self.futures)))
            self.futures[max(0, len(self.futures) - 200)].wait(0.002)

    def check(self, at_least: int = 100) -> None:
        """Check that no call or answer is missing, doubled or out of order."""
        last = -1
        for number, future in enumerate(self.futures):
            assert set(future.get(LONG_S).values()) == {number}
            last = number
        assert last >= at_least
        for taken in self.call_logs.all.call().get(LONG_S).values():
            assert taken == list(range(last + 1))


def hosts_on(machines: Machines, count: int, **options: Any) -> HostMesh:
    """Launch this many agents; the options are those of `Session.add_hosts`."""
    session = current_session()
    serve_ranks(session)
    numbers = session.add_hosts(machines, count, **options)
    machines.meshes.append(HostMesh(session.runtime, Region.whole(Extent({"hosts": count})), numbers))
    return machines.meshes[-1]


def pairs_on(machines: Machines, count: int, lost_after_s: float) -> ProcMesh:
    """Launch this many agents, with two ranks on each."""
    mesh = hosts_on(machines, count, lost_after_s=lost_after_s, is_light=True).spawn_procs({"gpus": 2}, device="cpu")
    machines.await_up(mesh)
    return mesh


def host_of(machines: Machines, mesh: ProcMesh, host: int) -> int:
    """Find the agent that has the two ranks of a host of the mesh now."""
    ranks = {mesh.view().ranks[2 * host].pid, mesh.view().ranks[2 * host + 1].pid}
    return next(i for i in range(len(machines.agents)) if ranks <= {each.pid for each in family(machines.pid(i))})


def _described(process: psutil.Process) -> str:
    """Say in what a process waits, as far as the kernel tells."""
    try:
        waits = Path(f"/proc/{process.pid}/wchan").read_text(encoding="ascii")
        command = " ".join(command_of(process))[-60:]
        return f"{process.pid} child of {process.ppid()}: {process.status()} in {waits}: {command}"
    except (OSError, psutil.NoSuchProcess):
        return f"{process.pid} has ended"


def family(pid: int) -> list[psutil.Process]:
    """List a process and its lasting descendants, without the short-lived processes that fork ranks."""
    return [each for each in tree(pid) if not _is_helper(each)]


def _is_helper(process: psutil.Process) -> bool:
    """Whether a process is a short-lived child of a zygote.

    The zygote is the oldest child of an agent with that word in its command line; ranks are children of the agent.
    """
    try:
        parent = process.parent()
        agent = parent.parent() if parent is not None else None
        if agent is None or "zygote" not in parent.cmdline():
            return False
        siblings = agent.children()
    except psutil.NoSuchProcess:  # it was short-lived
        return True
    called = [each for each in siblings if "zygote" in command_of(each)]
    return parent == min(called, key=lambda each: (each.create_time(), each.pid), default=parent)
