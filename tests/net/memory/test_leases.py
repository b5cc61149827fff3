"""Tables of lent memory stay open while they are needed, and are not confused with other files of the same number."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.net.memory.leases import Table, TableOf
from tests.support.descriptors import open_descriptors


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table()
    yield table
    table._map.close()
    os.close(table._fd)


def test_a_table_is_closed_when_it_is_no_longer_needed(table: Table) -> None:
    before = open_descriptors()
    of = TableOf(table.lent)
    with of.held(table.lend()) as is_lent:
        assert is_lent
    assert len(open_descriptors() - before) == 2
    del of
    assert not open_descriptors() - before


def test_other_files_are_not_mistaken_for_a_table(table: Table) -> None:
    with socket.socket() as other, open(__file__) as text:
        before = open_descriptors()
        for fd in (other.fileno(), text.fileno(), 100_000):
            with pytest.raises(ProcessLookupError, match="has ended"):
                TableOf(table.lent._replace(fd=fd))
        with pytest.raises(ProcessLookupError, match="has ended"):
            TableOf(table.lent._replace(cookie=bytes(16)))
        assert not open_descriptors() - before


OF_ONE_THAT_ENDED = """
import os
from monarch_kernel.net.memory.leases import Lent, Table, TableOf
from tests.support.processes import drop_root, has_ended
from tests.support.waiting import wait_until

drop_root()
r, w = os.pipe()
owner = os.fork()
if not owner:
    lent = Table().lent
    os.write(w, lent.cookie + lent.machine.encode())
    os._exit(0)
told = os.read(r, 1000)
wait_until(lambda: has_ended(owner), "the end of the owner")  # it is not reaped yet
try:
    TableOf(Lent(told[16:].decode(), owner, 3, told[:16]))
except OSError as error:
    print(type(error).__name__)
"""


def test_the_table_of_a_process_that_is_ending_is_reported_as_gone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OF_ONE_THAT_ENDED], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.stdout == "ProcessLookupError\n", done.stderr


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
