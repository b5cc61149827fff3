"""Ranks in this process, and checks that ranks drop tensors, for tests of tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from monarch_kernel.actor import ProcMesh
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


@pytest.fixture
def mesh(ranks: InProcess) -> Iterator[InProcess]:
    """Two ranks in this process, on which new tensors are made; they have no tensors after a test."""
    with activated(ranks.device):
        yield ranks
    gc.collect()
    ranks.stream.free_dropped()
    assert [len(each.tensors) for each in ranks.interpreters.values()] == [0, 0]


@pytest.fixture
def tensors_dropped(procs: ProcMesh) -> Iterator[None]:
    """The ranks drop all tensors of a test after it. What an earlier test has left is the failure of that test only."""
    before = [use.tensors for use in procs.memory().values()]
    yield
    gc.collect()
    left = [use.tensors for use in procs.memory().values()]
    assert [max(0, now - then) for now, then in zip(left, before)] == [0] * len(procs)
