"""A Ray cluster of five nodes, for the tests of all launchers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from monarch_kernel.launch.ray import RayLauncher
from tests.launch.bench import Bench
from tests.launch.rays import RayCluster, raylet_of

NODES = 5  # the one that is killed does not come back


class RayBench(Bench):
    """Hosts come when somebody else has given the nodes back."""

    up_s = 60.0
    waits_for = "^Ray: 2 hosts with 1 CPU: that is free on 0 of [45] nodes$"

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._dead = 0

    def make(self, hosts: int, python: str = "") -> RayLauncher:
        return RayLauncher(address=self._cluster.address, python=python)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        self._cluster.hold(NODES - self._dead)
        try:
            yield
        finally:
            self._cluster.hold(0)

    def kill(self, agent_pid: int) -> None:
        self._cluster.power_off(raylet_of(agent_pid))
        self._dead += 1

    def left(self) -> list[str]:
        return self._cluster.left()


@contextlib.contextmanager
def bench(directory: Path) -> Iterator[RayBench]:
    # Ray's sockets lie in its directory, and their paths must be short.
    cluster = RayCluster(Path(os.environ["TMPDIR"]), [{"num_cpus": 1}] * NODES)
    try:
        yield RayBench(cluster)
    finally:
        cluster.close()
