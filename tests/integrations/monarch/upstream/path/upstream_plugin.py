"""A plugin of pytest for tests of others: its limits of time are for busy machines, and it ends what a test leaves."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from upstream_placeholders import LIMIT


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "oss_skip")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.name != "timeout"]
        item.add_marker(pytest.mark.timeout(int(os.environ[LIMIT])))  # the limits of the tests are for idle machines
        if item.get_closest_marker("oss_skip"):
            item.add_marker(pytest.mark.skip("its own mark says so"))


@pytest.fixture(autouse=True)
def _ends_children() -> Iterator[None]:
    """End the process in which a test has run, if it still runs. An isolated test has one, in a separate group."""
    yield
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for pid in (task / "children").read_text().split():
                if b"isolate_in_subprocess" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.killpg(int(pid), signal.SIGKILL)
