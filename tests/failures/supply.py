"""Sources of hosts for a campaign, and the ways to harm these hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import psutil

from monarch_kernel.actor import HostMesh
from monarch_kernel.actor.host_mesh import serve_ranks
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.launch.ray import RayLauncher
from monarch_kernel.runtime.controller.session import current_session
from tests.failures.machines import Machines, hosts_on
from tests.failures.proxy import Proxy
from tests.launch.rays import RayCluster, raylet_of

__all__ = ["LocalSupply", "RaySupply", "Supply"]


class Supply(Protocol):
    """Hosts whose agents are processes of this machine."""

    hosts: HostMesh
    has_links: bool
    """Whether the connection of a host to the controller can be cut."""
    has_nodes: bool
    """Whether a host is a node of a cluster, which can die with all its processes."""

    def agent(self, place: int) -> psutil.Process:
        """The agent that is in a place of the mesh now."""
        ...

    def link(self, place: int) -> Proxy:
        """The connection between the agent in a place and the controller."""
        ...

    def kill_node(self, place: int) -> None:
        """Kill the node of a host, and add another one."""
        ...

    def close(self) -> None:
        """End what the session does not end."""
        ...


def agent_in(hosts: HostMesh, place: int) -> psutil.Process:
    """The agent that is in a place of a mesh now."""
    number = hosts._numbers[place]
    return psutil.Process(current_session().runtime._state.hosts[number].pid)


class LocalSupply:
    """Agents of this machine, each of which reaches the controller through its own proxy."""

    has_links = True
    has_nodes = False

    def __init__(self, directory: Path, count: int, **options: Any) -> None:
        self._machines = Machines(directory, through_proxies=True)
        self.hosts = hosts_on(self._machines, count, is_light=True, **options)

    def agent(self, place: int) -> psutil.Process:
        return agent_in(self.hosts, place)

    def link(self, place: int) -> Proxy:
        pid = self.agent(place).pid
        index = max(i for i, agent in enumerate(self._machines.agents) if agent.pid == pid)
        return self._machines.proxies[index]

    def kill_node(self, place: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._machines.close(5.0)


class RaySupply:
    """Nodes of a Ray cluster on this machine, one more than there are hosts."""

    has_links = False
    has_nodes = True

    def __init__(self, directory: Path, count: int, **options: Any) -> None:
        self._cluster = RayCluster(directory, [{"num_cpus": 1}] * (count + 1))
        session = current_session()
        serve_ranks(session)
        launcher = RayLauncher(address=self._cluster.address)
        numbers = session.add_hosts(launcher, count, is_light=True, **options)
        self.hosts = HostMesh(session.runtime, Region.whole(Extent({"hosts": count})), numbers)

    def agent(self, place: int) -> psutil.Process:
        return agent_in(self.hosts, place)

    def link(self, place: int) -> Proxy:
        raise NotImplementedError

    def kill_node(self, place: int) -> None:
        self._cluster.power_off(raylet_of(self.agent(place).pid))
        self._cluster.add(num_cpus=1)

    def close(self) -> None:
        self._cluster.close()
