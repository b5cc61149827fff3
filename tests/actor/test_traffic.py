"""What goes between processes is counted exactly, whoever carries it, and how fast it goes is told while it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from monarch_kernel.actor import Actor, ProcMesh, SupervisionError, endpoint, this_host
from monarch_kernel.data import roads
from monarch_kernel.data.memory import memory_of
from monarch_kernel.data.near import ProcessRoad
from monarch_kernel.events import ThroughputEvent
from monarch_kernel.rdma import Buffer
from monarch_kernel.traffic import Traffic
from tests.waiting import wait_until

DEADLINE_S = 60.0
MIB = 1 << 20


class Porter(Actor):
    """Has memory, and carries some."""

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
def ranks() -> Iterator[ProcMesh]:
    procs = this_host().spawn_procs({"gpus": 2}, name="t")
    procs.initialized.get(DEADLINE_S)
    yield procs
    procs.stop().get(DEADLINE_S)


@pytest.fixture(scope="module")
def porters(ranks: ProcMesh) -> tuple[Any, Any]:
    porters = ranks.spawn("porters", Porter)
    return porters.slice(gpus=0), porters.slice(gpus=1)


def figures(traffic: Traffic) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(str(row.source), str(row.target), row.road): (row.nbytes, row.operations) for row in traffic.rows}


def test_each_road_and_direction_is_counted_to_the_byte(ranks: ProcMesh, porters: tuple[Any, Any]) -> None:
    one, other = porters
    buffer = one.lend.call_one(3 * MIB).get(DEADLINE_S)
    before = ranks.traffic()
    other.read.call_one(buffer, 4).get(DEADLINE_S)
    other.write.call_one(buffer[:1000]).get(DEADLINE_S)
    one.read.call_one(buffer).get(DEADLINE_S)
    buffer[:10].read_into(bytearray(10)).get(DEADLINE_S)
    assert figures(ranks.traffic() - before) == {
        ("t[0]", "t[1]", "memory"): (12 * MIB, 4),
        ("t[1]", "t[0]", "memory"): (1000, 1),
        ("t[0]", "t[0]", "process"): (3 * MIB, 1),
        ("t[0]", "program", "memory"): (10, 1),
    }
    first = next(row for row in ranks.traffic().rows if str(row.target) == "t[1]" and row.road == "memory")
    assert first.bytes_per_s == first.nbytes / first.seconds > 0


def test_values_of_calls_are_counted_where_they_are_sent(ranks: ProcMesh, porters: tuple[Any, Any]) -> None:
    one, other = porters
    before = ranks.traffic()
    one.echo.call_one(torch.zeros(2 * MIB, dtype=torch.uint8)).get(DEADLINE_S)
    one.echo.call_one(torch.zeros(10_000, dtype=torch.uint8)).get(DEADLINE_S)
    one.ask.call_one(other, MIB).get(DEADLINE_S)
    one.echo.call_one("small").get(DEADLINE_S)
    shared = "shared memory"
    found = figures(ranks.traffic() - before)
    assert found.pop(("program", "t[0]", "socket")) == (10_000, 1)
    assert found.pop(("t[0]", "program", "socket")) == (10_000, 1)
    assert found == {
        ("program", "t[0]", shared): (2 * MIB, 1),
        ("t[0]", "program", shared): (2 * MIB, 1),
        ("t[0]", "t[1]", shared): (MIB, 1),
        ("t[1]", "t[0]", shared): (MIB, 1),
    }


def test_a_broadcast_is_counted_for_each_who_gets_it(ranks: ProcMesh) -> None:
    before = ranks.traffic()
    ranks["x"] = torch.zeros(2 * MIB, dtype=torch.uint8)
    ranks["x"]
    found = figures(ranks.traffic() - before)
    pairs = (("program", "t[0]"), ("program", "t[1]"), ("t[0]", "program"), ("t[1]", "program"))
    assert {key[:2]: count for key, count in found.items()} == dict.fromkeys(pairs, (2 * MIB, 1))


def test_pieces_of_lent_memory_in_messages_are_no_values(ranks: ProcMesh, porters: tuple[Any, Any]) -> None:
    buffer = porters[0].lend.call_one(5 * MIB).get(DEADLINE_S)
    road, into = ranks._runtime.roads["messages"], bytearray(5 * MIB)
    before = ranks.traffic()
    road.carry(buffer._loan, memory_of(into), is_write=False)
    assert into == b"\x01" * len(into)
    road.carry(buffer._loan, memory_of(into), is_write=True)
    assert (ranks.traffic() - before).rows == ()  # who chooses the road counts them, once


def test_a_part_of_a_mesh_tells_of_what_concerns_it(ranks: ProcMesh, porters: tuple[Any, Any]) -> None:
    one, other = porters
    part = ranks.slice(gpus=1)
    before = part.traffic()
    assert before.name == "t[1]"
    buffer = one.lend.call_one(5000).get(DEADLINE_S)
    one.read.call_one(buffer).get(DEADLINE_S)
    buffer.read_into(bytearray(5000)).get(DEADLINE_S)
    assert (part.traffic() - before).rows == ()
    other.read.call_one(buffer).get(DEADLINE_S)
    lent = other.lend.call_one(70).get(DEADLINE_S)
    one.read.call_one(lent).get(DEADLINE_S)  # it is counted by a rank that is no part of it
    assert figures(part.traffic() - before) == {
        ("t[0]", "t[1]", "memory"): (5000, 1),
        ("t[1]", "t[0]", "memory"): (70, 1),
    }


def test_rates_move_while_bytes_go_and_fall_when_they_do_not(ranks: ProcMesh, porters: tuple[Any, Any]) -> None:
    one, other = porters
    buffer = one.lend.call_one(roads.SLAB_NBYTES * 2 + 5).get(DEADLINE_S)
    told: list[ThroughputEvent] = []

    def hear(event: object) -> None:
        if isinstance(event, ThroughputEvent) and event.mesh == "t":
            told.append(event)

    def is_over() -> bool:
        return not any(rank.in_bytes_per_s or rank.out_bytes_per_s for rank in ranks.view().ranks)

    wait_until(is_over, "earlier tests to be forgotten")
    forget = ranks._runtime.watch(hear)
    try:
        before = ranks.traffic()
        others = other.read.call_one(buffer, 1)
        under_way = []
        while not any(event.ranks[1][-1][0] for event in told if 1 in event.ranks):
            under_way = [rank.in_bytes_per_s for rank in ranks.view().ranks]
            if others.wait(0.05):
                others = other.read.call_one(buffer, 1)
        assert others.get(DEADLINE_S) is None
        wait_until(is_over, "no more bytes go")
        wait_until(lambda: told[-1].ranks[1][-1] == (0, 0), "that is told, too")
        counted = (ranks.traffic() - before).nbytes
        assert counted % buffer.nbytes == 0
        history = told[-1].ranks[1]
        assert len(history) == 60
        assert len(under_way) == 2
        said = len(told)
        ranks.traffic()
        assert len(told) == said  # who only asks moves nothing
    finally:
        forget()


def test_a_transfer_is_counted_while_it_goes_on(ranks: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessRoad, "slab_nbytes", MIB)
    meters = ranks._runtime.meters
    seen: list[tuple[int, int]] = []
    count = meters.count

    def watched(*args: Any, **kwargs: Any) -> None:
        count(*args, **kwargs)
        seen.append((args[3], kwargs["operations"]))

    monkeypatch.setattr(meters, "count", watched)
    into = bytearray(10 * MIB)
    buffer = Buffer(bytearray(b"x") * len(into))
    buffer.read_into(into).get(DEADLINE_S)
    assert into == b"x" * len(into)
    assert seen == [(MIB, 0)] * 9 + [(MIB, 1)]


def test_the_row_of_a_rank_that_was_killed_stays(porters: tuple[Any, Any]) -> None:
    one, _ = porters
    procs = this_host().spawn_procs({"gpus": 1}, name="dies")
    porter = procs.spawn("porter", Porter)
    pid = porter.pid.call_one().get(DEADLINE_S)
    buffer = one.lend.call_one(4321).get(DEADLINE_S)
    porter.read.call_one(buffer).get(DEADLINE_S)
    assert figures(procs.traffic()) == {("t[0]", "dies[0]", "memory"): (4321, 1)}
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        porter.pid.call_one().get(DEADLINE_S)
    traffic = procs.traffic()
    assert figures(traffic) == {("t[0]", "dies[0] (dead)", "memory"): (4321, 1)}
    assert traffic.rows[0].is_last_known
    assert "last known" in str(traffic)
    procs.stop().get(DEADLINE_S)


def test_who_does_not_answer_holds_up_nobody(ranks: ProcMesh, porters: tuple[Any, Any]) -> None:
    one, other = porters
    buffer = one.lend.call_one(99).get(DEADLINE_S)
    before = ranks.traffic()
    other.read.call_one(buffer).get(DEADLINE_S)
    pid = other.pid.call_one().get(DEADLINE_S)

    def told_nbytes() -> int:
        return sum(row.nbytes for row, _ in ranks._runtime._state.meters.carried(ranks.procs))

    wait_until(lambda: told_nbytes() == before.nbytes + 99, "it is told")
    os.kill(pid, signal.SIGSTOP)
    try:
        traffic = ranks.traffic(timeout_s=0.05)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert any(row.is_last_known for row in traffic.rows)
    assert figures(ranks.traffic() - before) == {("t[0]", "t[1]", "memory"): (99, 1)}
