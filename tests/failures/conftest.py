"""Agents that fail. Classes of these tests travel by value: ranks do not have the modules of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from monarch_kernel.actor import shutdown_context
from tests.bed.bed import Bed, why_not
from tests.failures import machines as machines_module
from tests.failures.machines import Machines


@pytest.fixture(scope="session", autouse=True)
def machines_by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(machines_module)
    yield
    cloudpickle.unregister_pickle_by_value(machines_module)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Agents of a module whose tests launch no others; all ends with it."""
    yield from _machines(tmp_path_factory.mktemp("agents"), through_proxies=False)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Agents, with nothing between them and the controller; all ends with the test."""
    yield from _machines(tmp_path, through_proxies=False)


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Machines]:
    """Agents, each of which reaches the controller by a proxy of its own; all ends with the test."""
    yield from _machines(tmp_path, through_proxies=True)


@pytest.fixture
def cabled(tmp_path: Path) -> Iterator[Machines]:
    """Agents, each on a host with a cable of its own, and the test on the controller's host; all ends with the test."""
    if why := why_not():
        pytest.skip(why)
    bed = Bed()
    try:
        with bed.entered():
            yield from _machines(tmp_path, through_proxies=False, bed=bed)
    finally:
        bed.close()


def _machines(directory: Path, *, through_proxies: bool, bed: Bed | None = None) -> Iterator[Machines]:
    """Agents in a session of their own, whose sockets are in the network of the caller.

    Tests count what the session refuses, and lose its hosts for good.
    """
    shutdown_context().get()  # of earlier tests
    machines = Machines(directory, through_proxies=through_proxies, bed=bed)
    try:
        yield machines
    finally:
        shutdown_context().get()
        machines.close(5.0)
