"""The fake Kubernetes cluster for the conformance tests of launchers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from monarch_kernel.launch.kubernetes import KubernetesLauncher
from tests.launch.bench import Bench
from tests.launch.cluster import Cluster, Image


class KubernetesBench(Bench):
    """Hosts come up when their image has been pulled."""

    waits_for = "^Kubernetes: pulling the image$"

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._kubeconfig = cluster.kubeconfig()
        self._image = cluster.images["monarch:1"] = Image({"python3": (sys.executable, "...")})

    def make(self, hosts: int, python: str = "") -> KubernetesLauncher:
        return KubernetesLauncher(image="monarch:1", kubeconfig=self._kubeconfig, python=python)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        self._image.is_there.clear()
        try:
            yield
        finally:
            self._image.is_there.set()

    def left(self) -> list[str]:
        return self._cluster.names("pods") + self._cluster.names("secrets")


@contextlib.contextmanager
def bench(directory: Path) -> Iterator[KubernetesBench]:
    cluster = Cluster(directory)
    try:
        yield KubernetesBench(cluster)
    finally:
        cluster.close()
