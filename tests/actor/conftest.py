"""One session for all modules: each has meshes of its own, which come up soon where an agent is there already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_kernel.actor import shutdown_context


@pytest.fixture(scope="package", autouse=True)
def session_ends() -> Iterator[None]:
    yield
    shutdown_context().get()
