"""Tables of what is lent are opened as long as they are needed, and are told from whatever else has their numbers."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from monarch_kernel.data.leases import Table, TableOf


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table()
    yield table
    table._map.close()
    os.close(table._fd)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_table_is_closed_when_nobody_needs_it(table: Table) -> None:
    before = descriptors()
    of = TableOf(table.lent)
    with of.held(table.lend()) as is_lent:
        assert is_lent
    assert descriptors() == before + 2
    del of
    assert descriptors() == before


def test_what_is_no_table_is_not_taken_for_one(table: Table) -> None:
    with socket.socket() as other, open(__file__) as text:
        gc.collect()
        before = descriptors()
        for fd in (other.fileno(), text.fileno(), 100_000):
            with pytest.raises(ProcessLookupError, match="has ended"):
                TableOf(table.lent._replace(fd=fd))
        with pytest.raises(ProcessLookupError, match="has ended"):
            TableOf(table.lent._replace(cookie=bytes(16)))
        assert descriptors() == before


def test_there_may_be_thousands_of_descriptors(table: Table) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2000)), hard))
    try:
        with contextlib.ExitStack() as opened:
            for _ in range(1100):
                opened.callback(os.close, os.dup(0))
            of = TableOf(table.lent)
            assert of.is_alive
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
