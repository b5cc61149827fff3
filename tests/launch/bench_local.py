"""This machine for the conformance tests of launchers: agents that act as remote hosts, and can be stalled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from monarch_kernel.launch.local import LocalLauncher
from tests.launch.bench import Bench

SLOW_PYTHON = """#!/bin/sh
while test -e {stall}; do sleep 0.05; done
exec {python} "$@"
"""


class LocalBench(Bench):
    """Interpreters wait as long as a file exists."""

    def __init__(self, directory: Path) -> None:
        self._stall = directory / "stall"
        self._python = directory / "python"
        self._python.write_text(SLOW_PYTHON.format(stall=self._stall, python=sys.executable))
        self._python.chmod(0o700)

    def make(self, hosts: int, python: str = "") -> LocalLauncher:
        return LocalLauncher(python=python or str(self._python))

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        self._stall.touch()
        try:
            yield
        finally:
            self._stall.unlink()


@contextlib.contextmanager
def bench(directory: Path) -> Iterator[LocalBench]:
    yield LocalBench(directory)
