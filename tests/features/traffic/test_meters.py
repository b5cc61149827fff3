"""Rates are those of the last second, whenever reports come; they drop to zero without reports, and memory is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from monarch_kernel.base.events import MeshView, ThroughputEvent
from monarch_kernel.features.traffic.controller import KEPT, TrafficExtension, traffic_view
from monarch_kernel.features.traffic.meters import HISTORY_S, MAX_KINDS, MAX_NAME, MeterBook, Throughput
from monarch_kernel.features.traffic.table import End
from monarch_kernel.net.memory.counters import Meters
from monarch_kernel.net.transport.base import CONTROLLER, host_peer, rank_peer
from monarch_kernel.net.wire.messages import Carried, Collected, Hello, HostHello, Lost, Metered
from monarch_kernel.notebook.view.frames import mesh_frame
from monarch_kernel.runtime.controller.effects import Effect, Tell
from monarch_kernel.runtime.controller.state import State
from monarch_kernel.testing import rank_spec
from tests.runtime.controller.states import state_of_three


def moved(nbytes: int, over_s: float = 0.25, *, source: int = 1, target: int = 2) -> Metered:
    return Metered((Carried(source, target, "memory", nbytes, 1, 0.1),), over_s)


def events(effects: list[Effect]) -> list[ThroughputEvent]:
    return [
        effect.event for effect in effects if isinstance(effect, Tell) and isinstance(effect.event, ThroughputEvent)
    ]


def book_of(state: State) -> MeterBook:
    extension = state.extensions[TrafficExtension]
    assert isinstance(extension, TrafficExtension)
    return extension.book


def test_kinds_of_collectives_are_bounded() -> None:
    book = MeterBook()
    for i in range(3 * MAX_KINDS):
        book.handle(rank_peer(1), Metered((), 0.25, (Collected(f"{i}" + "x" * 10_000, "all_reduce", 1, 1, 0.1),)), 1.0)
    rows, _ = book.collected([1])
    assert len(rows) == MAX_KINDS
    assert max(len(one.group) for one, _ in rows) == MAX_NAME
    book.handle(rank_peer(1), Metered((), 0.25, (Collected("0" + "x" * 10_000, "all_reduce", 7, 2, 0.1),)), 2.0)
    assert book.collected([1])[0][0][0].nbytes == 7


def gathered(nbytes: int, **fields: Any) -> Metered:
    one = Collected("", "all_gather", nbytes, 1, 0.1, "gloo", 4, 3 * nbytes // 4, nbytes // 2)
    return Metered((), 1.0, (replace(one, **fields),))


def test_rates_include_what_collectives_move() -> None:
    book = MeterBook()
    book.handle(rank_peer(1), gathered(4000), 11.0)
    book.handle(rank_peer(1), gathered(8000), 12.0)
    assert book.rate(1, 12.5) == pytest.approx((3000, 2000))
    assert set(book.due(12.5)) == {1}
    book.handle(rank_peer(1), gathered(8000, seconds=0.5), 13.0)  # only waited
    book.handle(rank_peer(1), gathered(10, path="nccl"), 14.0)
    rows, _ = book.collected([1])
    assert [(one.path, one.nbytes, one.seconds) for one, _ in rows] == [("gloo", 8000, 0.5), ("nccl", 10, 0.1)]
    assert book.history(1, 14.5)[-2] == (0, 0)


def test_a_report_of_all_counts_for_a_new_controller_is_no_throughput() -> None:
    book = MeterBook()
    collected = Collected("", "all_reduce", 1 << 40, 9, 0.1, "gloo", 2, 1 << 40, 1 << 40)
    book.handle(rank_peer(1), replace(moved(1 << 40), collected=(collected,), is_repeat=True), 11.0)
    assert book.rate(1, 11.5) == (0, 0)
    assert book.due(11.5) == {}
    assert book.collected([1])[0][0][0].nbytes == 1 << 40
    book.handle(rank_peer(1), moved((1 << 40) + 500, 1.0), 12.0)
    assert book.rate(1, 12.5) == pytest.approx((0, 500))


def test_a_steady_flow_has_one_rate_and_ends_by_itself() -> None:
    throughput = Throughput()
    for i in range(1, 41):
        throughput.add(100 + i / 4, 0.25, 250.0, 25.0)
    assert throughput.rate(110.0) == pytest.approx((1000, 100))
    history = throughput.history(110.0)
    assert len(history) == HISTORY_S
    assert history[-1] == pytest.approx((1000, 100))
    assert history[-9:] == tuple(pytest.approx((1000, 100)) for _ in range(9))
    assert history[-12] == (0, 0)
    assert throughput.rate(111.9) == (0, 0)
    assert throughput.has_ceased(111.9)
    assert not throughput.is_over(111.9)
    assert throughput.is_over(110 + HISTORY_S + 2)


@given(st.lists(st.tuples(st.floats(0.001, 3), st.floats(0.001, 3), st.integers(0, 1 << 40)), min_size=1, max_size=30))
def test_no_byte_is_lost_or_made_up(reports: list[tuple[float, float, int]]) -> None:
    throughput, now, total = Throughput(), 1000.0, 0
    for after_s, over_s, nbytes in reports:
        now += min(after_s, 1.5)
        total += nbytes
        throughput.add(now, over_s, nbytes, 0)
    history = throughput.history(now + 1)
    assert sum(second[0] for second in history) == pytest.approx(total)


def test_the_history_is_bounded() -> None:
    throughput = Throughput()
    for second in range(10 * HISTORY_S):
        throughput.add(float(second), 1.0, 1, 1)
    assert len(throughput._steps) <= 2 * HISTORY_S * 4 + 5
    assert throughput.history(10.0 * HISTORY_S)[0] == pytest.approx((1, 1))


def test_events_name_ranks_until_their_traffic_stops() -> None:
    state = state_of_three(1, 2, 3)
    assert events(state.tick(9.0)) == []
    for i in range(1, 5):
        assert state.handle(moved(1000 * i), (), rank_peer(2), 10 + i / 4) == []
    (event,) = events(state.tick(11.6))
    assert event.mesh == "t"
    assert set(event.ranks) == {0, 1}
    assert event.ranks[0][-1] == pytest.approx((0, 4000))
    assert event.ranks[1][-1] == pytest.approx((4000, 0))
    assert events(state.tick(11.7)) == []  # not so soon
    (event,) = events(state.tick(13.0))
    assert event.ranks[1][-1] == (0, 0)
    assert event.ranks[1][-2] == pytest.approx((4000, 0), rel=0.5)
    assert events(state.tick(14.0)) == []
    book_of(state).handle(CONTROLLER, moved(5, source=0, target=3), 20.0)
    assert {event.mesh: set(event.ranks) for event in events(state.tick(20.2))} == {"": {0}, "t": {2}}


def test_ranks_may_report_only_their_own_traffic() -> None:
    state = state_of_three(1, 2, 3)
    state.handle(moved(1000, source=1, target=2), (), rank_peer(3), 10.0)
    assert state.dropped_messages == 1
    assert book_of(state).carried({1, 2, 3}) == []


def test_counts_of_several_processes_add_up_and_repeated_reports_count_once() -> None:
    book = MeterBook()
    book.handle(rank_peer(1), moved(100), 1.0)
    book.handle(rank_peer(2), moved(10), 1.0)
    book.handle(rank_peer(2), moved(10), 2.0)
    counted = [(row.nbytes, peer) for row, peer in book.carried({2})]
    assert counted == [(100, rank_peer(1)), (10, rank_peer(2))]
    assert book.carried({3}) == []
    state = state_of_three(1, 2, 3)
    (row,) = traffic_view("t", {2}, book, state.ranks, ()).rows
    assert row[2:] == ("memory", 110, 2, 0.2, False)


def test_dead_ranks_keep_their_rows_and_are_marked() -> None:
    state = state_of_three(1, 2, 3)
    state.handle(moved(100, source=1, target=2), (), rank_peer(2), 1.0)
    state.handle(moved(50, source=1, target=3), (), rank_peer(3), 1.0)
    book_of(state).handle(CONTROLLER, moved(7, source=0, target=1), 1.0)

    def rows(silent: tuple[int, ...] = ()) -> list[tuple[str, str, int, bool]]:
        traffic = traffic_view("t", {1, 2, 3}, book_of(state), state.ranks, silent)
        return [(str(row.source), str(row.target), row.nbytes, row.is_last_known) for row in traffic.rows]

    assert rows() == [("t[0]", "t[1]", 100, False), ("t[0]", "t[2]", 50, False), ("program", "t[0]", 7, False)]
    assert [row[3] for row in rows((3,))] == [False, True, False]
    state.handle(Lost(2, 0, 9, "", (), 0), (), host_peer(1), 2.0)
    assert rows()[0] == ("t[0]", "t[1] (dead)", 100, True)
    state.processes.heal([2], 3.0)
    assert rows()[0] == ("t[0]", "t[1] (dead)", 100, True)  # there is a new process now, but the dead one counted this
    state.handle(Hello("token", 2, 2000, "cpu"), (), rank_peer(2, 1), 4.0)
    earlier = traffic_view("t", {2}, book_of(state), state.ranks, ())
    state.handle(moved(1, source=1, target=2), (), rank_peer(2, 1), 5.0)
    assert rows()[0] == ("t[0]", "t[1] (dead)", 100, True)
    assert rows()[-1] == ("t[0]", "t[1]", 1, False)
    later = traffic_view("t", {2}, book_of(state), state.ranks, ())
    assert [(row.target.incarnation, row.nbytes) for row in (later - earlier).rows] == [(1, 1)]
    row = traffic_view("t", {1}, book_of(state), state.ranks, ()).rows[2]
    assert row.source == End("", 0, 0)


def test_a_view_has_each_link_of_its_ranks_once() -> None:
    state = state_of_three(1, 2, 3)
    extension = state.extensions[TrafficExtension]
    empty = MeshView("t", (("gpus", 3),), ())
    assert extension.shown(empty, [1, 2, 3], 2.0).links == ""
    for proc, name in ((1, "eth0"), (2, "eth0"), (3, "\x1b[31meth1" + "x" * 1_000)):
        state.handle(Metered((), 0.25, links=((name, 3.125e9),) * 100), (), rank_peer(proc), 1.0)
    assert extension.shown(empty, [1, 2], 2.0).links == "eth0 2.9 GiB/s"
    both = extension.shown(empty, [1, 2, 3], 2.0).links
    assert both.startswith("eth0 2.9 GiB/s, eth1xxx")
    assert len(both) < 100
    assert mesh_frame(extension.shown(empty, [1], 2.0), 5.0).links == "eth0 2.9 GiB/s"


def test_the_collectives_of_a_replaced_process_have_separate_rows() -> None:
    state = state_of_three(1, 2, 3)
    for proc in (1, 2, 3):
        state.handle(gathered(4000), (), rank_peer(proc), 1.0)
    state.handle(Lost(2, 0, 9, "", (), 0), (), host_peer(1), 2.0)
    state.processes.heal([2], 3.0)
    state.handle(Hello("token", 2, 2000, "cpu"), (), rank_peer(2, 1), 4.0)
    for peer in (rank_peer(1), rank_peer(3)):
        state.handle(gathered(4400, operations=2), (), peer, 5.0)
    state.handle(gathered(400), (), rank_peer(2, 1), 5.0)
    traffic = traffic_view("t", {1, 2, 3}, book_of(state), state.ranks, ())
    of_second = [row for row in traffic.collectives if row.end.rank == 1]
    assert [(row.end.is_dead, row.end.incarnation, row.nbytes) for row in of_second] == [
        (True, 0, 4000),
        (False, 1, 400),
    ]
    assert str(traffic).split("\n")[2:] == [
        "collectives of t",
        "collective  path  ranks           bytes a rank   times  waited",
        "all_gather  gloo  [0-2]       400 B to 4.3 KiB  1 to 2  100 ms",
        "all_gather  gloo  [1] (dead)           3.9 KiB       1  100 ms",
        "some counts are the last known ones of ranks that are dead or do not answer",
    ]


def test_the_traffic_of_very_many_processes_that_have_ended_is_forgotten() -> None:
    state, meters = State(), Meters(0)
    extension = state.extension(TrafficExtension)
    extension.started(meters)
    state.hosts.add(1, 0.0)
    state.handle(HostHello("t", 1, "vm", 1, 1, 0), (), host_peer(1), 0.0)
    for proc in range(1, KEPT + 4):
        state.processes.start(1, [rank_spec(proc)], 0.0)
        state.handle(Hello("t", proc, 1, "cpu"), (), rank_peer(proc), 0.0)
        meters.count(0, proc, "memory", 10)
        state.handle(moved(10, source=proc, target=0), (), rank_peer(proc), 0.0)
        extension.read(1.0)
        if proc == 2:
            state.handle(Lost(proc, 0, 9, "", (), 0), (), host_peer(1), 1.0)  # another process may replace it
        elif proc != 3:
            state.processes.stop((proc,), "no longer needed", 0.0, 1.0)
    rows = {row.source or row.target for row, _ in extension.book.carried(range(KEPT + 4))}
    assert rows == set(range(1, KEPT + 4)) - {1}
    meters.tell_all()
    assert {row.target for row in meters.changes().carried} == rows
