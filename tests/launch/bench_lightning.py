"""The fake Lightning cloud for the conformance tests of launchers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.launch.lightning import LightningLauncher
from tests.launch.bench import Bench
from tests.launch.lightnings import Cloud, hang_up, lightning_cloud


class LightningBench(Bench):
    """Hosts come up when there are machines."""

    waits_for = "^Lightning: waiting for a machine: no capacity in this region$"

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    def make(self, hosts: int, python: str = "") -> LightningLauncher:
        return LightningLauncher(machine="CPU", python=python, poll_s=0.2)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        there, self._cloud.capacity = self._cloud.capacity, 0
        try:
            yield
        finally:
            self._cloud.add_machines(there)

    def left(self) -> list[str]:
        return self._cloud.names()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            yield
        finally:
            hang_up()


@contextlib.contextmanager
def bench(directory: Path) -> Iterator[LightningBench]:
    if sys.version_info < (3, 11):
        pytest.skip("lightning_sdk needs Python 3.11")
    with lightning_cloud(directory) as cloud:
        yield LightningBench(cloud)
