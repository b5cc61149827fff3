"""One Ray cluster for all tests of launchers that need one, started by the first of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch import rays


@pytest.fixture(scope="package", autouse=True)
def ray_clusters_end() -> Iterator[None]:
    yield
    rays.end_shared()


@pytest.fixture(scope="module")
def ray_cluster() -> rays.RayCluster:
    """The cluster that modules share, with all its nodes: in place of a node that a test has killed there is another."""
    return rays.shared()
