"""The shared Ray cluster for the conformance tests of launchers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from monarch_kernel.launch.ray import RayLauncher
from tests.launch.bench import Bench
from tests.launch.rays import RayCluster, raylet_of, shared


class RayBench(Bench):
    """Hosts come up when another driver has given the nodes back."""

    up_s = 100.0
    waits_for = r"^Ray: 2 hosts with 1 CPU \(free on 0 of 4 nodes\)$"

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    def make(self, hosts: int, python: str = "") -> RayLauncher:
        return RayLauncher(address=self._cluster.address, python=python)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        self._cluster.repair()
        self._cluster.hold(len(self._cluster.raylets))
        try:
            yield
        finally:
            self._cluster.hold(0)

    def kill(self, agent_pid: int) -> None:
        self._cluster.power_off(raylet_of(agent_pid))

    def left(self) -> list[str]:
        return self._cluster.left()


@contextlib.contextmanager
def bench(directory: Path) -> Iterator[RayBench]:
    yield RayBench(shared())
