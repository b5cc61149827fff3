"""A real Slurm cluster on this machine for the conformance tests of launchers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.launch.slurm import SlurmLauncher
from tests.launch.bench import Bench
from tests.launch.slurms import SlurmCluster, why_no_slurm


class SlurmBench(Bench):
    """Jobs wait while their partition is down."""

    waits_for = r"^Slurm: PartitionDown \(the partition is down\)"

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster
        self._logs = cluster.path / "logs"

    def make(self, hosts: int, python: str = "") -> SlurmLauncher:
        return SlurmLauncher(python=python, directory=self._logs, ask_s=0.5)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        self._cluster.run("scontrol", "update", "PartitionName=main", "State=DOWN")
        try:
            yield
        finally:
            self._cluster.run("scontrol", "update", "PartitionName=main", "State=UP")

    def left(self) -> list[str]:
        return self._cluster.run("squeue", "--noheader").splitlines()


@contextlib.contextmanager
def bench(directory: Path) -> Iterator[SlurmBench]:
    if why_no_slurm():
        pytest.skip(why_no_slurm())
    cluster = SlurmCluster(directory, ("n1", "n2", "n3", "n4"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.environment.items():
                patch.setenv(name, value)
            yield SlurmBench(cluster)
    finally:
        cluster.close()
