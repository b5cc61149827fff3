"""One Ray cluster for all launcher tests that need one; the first of them starts it."""

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
    """The shared cluster with all its nodes: it has replaced nodes that earlier tests killed."""
    return rays.shared()
