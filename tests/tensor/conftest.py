"""Ranks in this process, for tests of tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_kernel.tensor.on_mesh import activated
from tests.tensor.in_process import InProcess


@pytest.fixture
def ranks() -> InProcess:
    """Two ranks in this process."""
    return InProcess(2)


@pytest.fixture
def one() -> InProcess:
    """One rank in this process."""
    return InProcess(1)


@pytest.fixture
def active(one: InProcess) -> Iterator[InProcess]:
    """One rank in this process, on which new tensors are made."""
    with activated(one.device):
        yield one
