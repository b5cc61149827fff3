"""Real SSH servers on this machine for the conformance tests of launchers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.launch.ssh import SshLauncher
from tests.launch.bench import Bench
from tests.launch.sshds import SshFolder, why_no_sshd

NAMES = ("a", "b", "c", "d")


class SshBench(Bench):
    """Agents connect through tunnels; stopped servers do not answer."""

    waits_for = "^SSH: connecting to a, b$"

    def __init__(self, folder: SshFolder) -> None:
        self._folder = folder

    def make(self, hosts: int, python: str = "") -> SshLauncher:
        config = self._folder.config
        return SshLauncher(
            NAMES, python=python or sys.executable, config=config, tunnel="always", connect_timeout_s=60.0
        )

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        for server in self._folder.servers:
            server.stop()
        try:
            yield
        finally:
            for server in self._folder.servers:
                server.go_on()

    def left(self) -> list[str]:
        connections = [f"connection to {server.name}" for server in self._folder.servers if server.connections()]
        return connections + [str(path) for path in Path(os.environ["TMPDIR"]).glob("monarch-ssh-*")]


@contextlib.contextmanager
def bench(directory: Path) -> Iterator[SshBench]:
    if why_no_sshd():
        pytest.skip(why_no_sshd())
    folder = SshFolder(directory)
    try:
        for name in NAMES:
            folder.add(name)
        yield SshBench(folder)
    finally:
        folder.close()
