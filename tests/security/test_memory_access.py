"""Which processes a rank and the program allow to access their memory, where Yama restricts that."""

from __future__ import annotations

import os
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.net.memory import process_memory
from monarch_kernel.net.memory.exports import ExportTable
from monarch_kernel.net.memory.layout import memory_of
from tests.support.waiting import LONG_S

LEND = """
import os, torch
from monarch_kernel.net.memory import process_memory
from monarch_kernel.rdma import RDMABuffer
from monarch_kernel.runtime.rpc.handles import PROCESS
allowed = []
PROCESS.client.exports._table, process_memory.allow = None, allowed.append
buffer = RDMABuffer(torch.arange(4.0))
allowed, os.getppid()
"""


def test_a_rank_allows_its_host_agent_and_so_the_other_ranks(procs: ProcMesh) -> None:
    agents = set()
    for allowed, parent in procs.run(LEND).get(LONG_S).values():
        assert allowed == [parent]
        agents.add(parent)
    assert len(agents) == 1
    (agent,) = agents
    with open(f"/proc/{agent}/cmdline", "rb") as file:
        assert b"agent" in file.read()


def test_the_program_allows_its_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[int] = []
    monkeypatch.setattr(process_memory, "allow", allowed.append)
    ExportTable(0).lend(memory_of(bytearray(8)))
    assert allowed == [os.getpid()]


def test_the_permission_names_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Libc:
        @staticmethod
        def prctl(*args: Any) -> int:
            calls.append(args)
            return 0

    monkeypatch.setattr(process_memory, "_libc", Libc)
    process_memory.allow(1234)
    ((option, pid, *_),) = calls
    assert (option, pid.value) == (0x59616D61, 1234)  # PR_SET_PTRACER; PR_SET_PTRACER_ANY is the largest number
