"""Traffic counters: bytes between processes are counted exactly, whichever process copies them, and so are current rates."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from monarch_kernel.actor import Actor, ProcMesh, SupervisionError, endpoint, this_host
from monarch_kernel.base.events import ThroughputEvent
from monarch_kernel.features.traffic.table import Traffic
from monarch_kernel.net.memory import paths
from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.rdma import Buffer
from monarch_kernel.runtime.buffers.local_paths import ProcessPath
from monarch_kernel.runtime.controller.session import current_session
from tests.support.waiting import LONG_S, wait_until

PROCS = {"gpus": 2}

MIB = 1 << 20


class Porter(Actor):
    """Lends memory, and copies memory of others."""

    @endpoint
    def lend(self, nbytes: int) -> Buffer:
        self.kept = torch.ones(nbytes, dtype=torch.uint8)
        return Buffer(self.kept)

    @endpoint
    def read(self, buffer: Buffer, times: int = 1) -> None:
        into = torch.empty(buffer.nbytes, dtype=torch.uint8)
        for _ in range(times):
            buffer.read_into(into).get()

    @endpoint
    def write(self, buffer: Buffer) -> None:
        buffer.write_from(torch.zeros(buffer.nbytes, dtype=torch.uint8)).get()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def ask(self, other: Any, nbytes: int) -> int:
        value = other.echo.call_one(torch.zeros(nbytes, dtype=torch.uint8)).get()
        return int(value.nbytes)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def porters(procs: ProcMesh) -> tuple[Any, Any]:
    porters = procs.spawn("porters", Porter)
    return porters.slice(gpus=0), porters.slice(gpus=1)


def figures(traffic: Traffic) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(str(row.source), str(row.target), row.path): (row.nbytes, row.operations) for row in traffic.rows}


def test_each_path_and_direction_is_counted_to_the_byte(procs: ProcMesh, porters: tuple[Any, Any]) -> None:
    one, other = porters
    buffer = one.lend.call_one(3 * MIB).get(LONG_S)
    before = procs.traffic()
    other.read.call_one(buffer, 4).get(LONG_S)
    other.write.call_one(buffer[:1000]).get(LONG_S)
    one.read.call_one(buffer).get(LONG_S)
    buffer[:10].read_into(bytearray(10)).get(LONG_S)
    assert figures(procs.traffic() - before) == {
        ("t[0]", "t[1]", "memory"): (12 * MIB, 4),
        ("t[1]", "t[0]", "memory"): (1000, 1),
        ("t[0]", "t[0]", "process"): (3 * MIB, 1),
        ("t[0]", "program", "memory"): (10, 1),
    }
    first = next(row for row in procs.traffic().rows if str(row.target) == "t[1]" and row.path == "memory")
    assert first.bytes_per_s == first.nbytes / first.seconds > 0


def test_values_of_calls_are_counted_where_they_are_sent(procs: ProcMesh, porters: tuple[Any, Any]) -> None:
    one, other = porters
    before = procs.traffic()
    one.echo.call_one(torch.zeros(2 * MIB, dtype=torch.uint8)).get(LONG_S)
    one.echo.call_one(torch.zeros(10_000, dtype=torch.uint8)).get(LONG_S)
    one.ask.call_one(other, MIB).get(LONG_S)
    one.echo.call_one("small").get(LONG_S)
    shared = "shared memory"
    found = figures(procs.traffic() - before)
    assert found.pop(("program", "t[0]", "socket")) == (10_000, 1)
    assert found.pop(("t[0]", "program", "socket")) == (10_000, 1)
    assert found == {
        ("program", "t[0]", shared): (2 * MIB, 1),
        ("t[0]", "program", shared): (2 * MIB, 1),
        ("t[0]", "t[1]", shared): (MIB, 1),
        ("t[1]", "t[0]", shared): (MIB, 1),
    }


def test_a_broadcast_is_counted_for_each_receiver(procs: ProcMesh) -> None:
    before = procs.traffic()
    procs["x"] = torch.zeros(2 * MIB, dtype=torch.uint8)
    procs["x"]
    found = figures(procs.traffic() - before)
    pairs = (("program", "t[0]"), ("program", "t[1]"), ("t[0]", "program"), ("t[1]", "program"))
    assert {key[:2]: count for key, count in found.items()} == dict.fromkeys(pairs, (2 * MIB, 1))


def test_pieces_of_lent_memory_in_messages_are_not_counted_as_values(procs: ProcMesh, porters: tuple[Any, Any]) -> None:
    buffer = porters[0].lend.call_one(5 * MIB).get(LONG_S)
    path, into = current_session().runtime.paths["messages"], bytearray(5 * MIB)
    before = procs.traffic()
    path.carry(buffer._handle, memory_of(into), is_write=False)
    assert into == b"\x01" * len(into)
    path.carry(buffer._handle, memory_of(into), is_write=True)
    assert (procs.traffic() - before).rows == ()  # the code that selects the data path counts them, once


def test_a_slice_of_a_mesh_shows_only_its_traffic(procs: ProcMesh, porters: tuple[Any, Any]) -> None:
    one, other = porters
    part = procs.slice(gpus=1)
    before = part.traffic()
    assert before.name == "t[1]"
    buffer = one.lend.call_one(5000).get(LONG_S)
    one.read.call_one(buffer).get(LONG_S)
    buffer.read_into(bytearray(5000)).get(LONG_S)
    assert (part.traffic() - before).rows == ()
    other.read.call_one(buffer).get(LONG_S)
    lent = other.lend.call_one(70).get(LONG_S)
    one.read.call_one(lent).get(LONG_S)  # a rank outside of this slice counts it
    assert figures(part.traffic() - before) == {
        ("t[0]", "t[1]", "memory"): (5000, 1),
        ("t[1]", "t[0]", "memory"): (70, 1),
    }


def test_rates_rise_during_transfers_and_fall_after_them(procs: ProcMesh, porters: tuple[Any, Any]) -> None:
    one, other = porters
    buffer = one.lend.call_one(paths.SLAB_NBYTES * 2 + 5).get(LONG_S)
    events: list[ThroughputEvent] = []

    def note(event: object) -> None:
        if isinstance(event, ThroughputEvent) and event.mesh == "t":
            events.append(event)

    def is_over() -> bool:
        return not any(rank.in_bytes_per_s or rank.out_bytes_per_s for rank in procs.view().ranks)

    wait_until(is_over, "the end of earlier traffic")
    forget = current_session().runtime.watch(note)
    try:
        before = procs.traffic()
        others = other.read.call_one(buffer, 1)
        under_way = []

        def is_fast() -> bool:
            nonlocal others, under_way
            under_way = [rank.in_bytes_per_s for rank in procs.view().ranks]
            if others.wait(0.05):
                others = other.read.call_one(buffer, 1)
            return any(event.ranks[1][-1][0] for event in events if 1 in event.ranks)

        wait_until(is_fast, "a rate")
        assert others.get(LONG_S) is None
        wait_until(is_over, "the end of the traffic")
        wait_until(lambda: events[-1].ranks[1][-1] == (0, 0), "an event with that")
        counted = (procs.traffic() - before).nbytes
        assert counted % buffer.nbytes == 0
        history = events[-1].ranks[1]
        assert len(history) == 60
        assert len(under_way) == 2
        count = len(events)
        procs.traffic()
        assert len(events) == count  # a request for the table is not traffic
    finally:
        forget()


def test_a_transfer_is_counted_while_it_is_in_progress(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessPath, "slab_nbytes", MIB)
    meters = current_session().runtime.meters
    seen: list[tuple[int, int]] = []
    count = meters.count

    def watched(*args: Any, **kwargs: Any) -> None:
        count(*args, **kwargs)
        seen.append((args[3], kwargs["operations"]))

    monkeypatch.setattr(meters, "count", watched)
    into = bytearray(10 * MIB)
    buffer = Buffer(bytearray(b"x") * len(into))
    buffer.read_into(into).get(LONG_S)
    assert into == b"x" * len(into)
    assert seen == [(MIB, 0)] * 9 + [(MIB, 1)]


def test_the_row_of_a_killed_rank_stays(porters: tuple[Any, Any]) -> None:
    one, _ = porters
    dies = this_host().spawn_procs({"gpus": 1}, name="dies", device="cpu")
    porter = dies.spawn("porter", Porter)
    pid = porter.pid.call_one().get(LONG_S)
    buffer = one.lend.call_one(4321).get(LONG_S)
    porter.read.call_one(buffer).get(LONG_S)
    assert figures(dies.traffic()) == {("t[0]", "dies[0]", "memory"): (4321, 1)}
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        porter.pid.call_one().get(LONG_S)
    traffic = dies.traffic()
    assert figures(traffic) == {("t[0]", "dies[0] (dead)", "memory"): (4321, 1)}
    assert traffic.rows[0].is_last_known
    assert "last known" in str(traffic)
    dies.stop().get(LONG_S)


def test_a_rank_that_does_not_answer_does_not_delay_the_table(procs: ProcMesh, porters: tuple[Any, Any]) -> None:
    one, other = porters
    buffer = one.lend.call_one(99).get(LONG_S)
    before = procs.traffic()
    other.read.call_one(buffer).get(LONG_S)
    pid = other.pid.call_one().get(LONG_S)
    wait_until(lambda: (procs.traffic() - before).nbytes == 99, "the program to know")
    os.kill(pid, signal.SIGSTOP)
    try:
        traffic = procs.traffic(timeout_s=0.05)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert any(row.is_last_known for row in traffic.rows)
    assert figures(procs.traffic() - before) == {("t[0]", "t[1]", "memory"): (99, 1)}
