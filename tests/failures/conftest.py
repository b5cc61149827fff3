"""Fixtures with agents that fail. Classes of these tests travel by value, since ranks cannot import the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from monarch_kernel.actor import shutdown_context
from tests.bed.bed import Bed, why_not
from tests.failures import machines as machines_module
from tests.failures.cells import Cells
from tests.failures.machines import Machines


@pytest.fixture(scope="session", autouse=True)
def machines_by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(machines_module)
    yield
    cloudpickle.unregister_pickle_by_value(machines_module)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Agents for a module whose tests launch no others; they end with the module."""
    yield from _machines(tmp_path_factory.mktemp("agents"), through_proxies=False)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Agents with a direct connection to the controller; they end with the test."""
    yield from _machines(tmp_path, through_proxies=False)


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Machines]:
    """Agents that each reach the controller through their own proxy; they end with the test."""
    yield from _machines(tmp_path, through_proxies=True)


@pytest.fixture
def cabled(tmp_path: Path) -> Iterator[Machines]:
    """Agents on separate hosts with a cable each, and the test on the controller's host; all ends with the test."""
    if why := why_not():
        pytest.skip(why)
    bed = Bed()
    try:
        with bed.entered():
            yield from _machines(tmp_path, through_proxies=False, bed=bed)
    finally:
        bed.close()


@pytest.fixture(scope="module")
def cells(session: None, request: pytest.FixtureRequest) -> Iterator[Cells]:
    """A mesh ``t`` that the tests of a module share: ``N`` ranks, or two; it has a process group."""
    cells = Cells(getattr(request.module, "N", 2))
    yield cells
    cells.close()


def _machines(directory: Path, *, through_proxies: bool, bed: Bed | None = None) -> Iterator[Machines]:
    """Agents in a separate session, with sockets in the network of the caller.

    It is separate because tests count the connections that the session refuses, and lose its hosts for good.
    """
    shutdown_context().get()  # the session of earlier tests
    machines = Machines(directory, through_proxies=through_proxies, bed=bed)
    try:
        yield machines
    finally:
        shutdown_context().get()
        machines.close(5.0)
