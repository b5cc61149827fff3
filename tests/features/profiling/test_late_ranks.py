"""Views have how late ranks are, from what they report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monarch_kernel.base.events import MeshView, RankView
from monarch_kernel.features.profiling.arrivals import GroupArrivals
from monarch_kernel.features.profiling.late_ranks import LateRanks
from monarch_kernel.features.profiling.messages import Arrived
from monarch_kernel.notebook.view.frames import mesh_frame
from monarch_kernel.notebook.view.text import mesh_text, meshes_text
from monarch_kernel.runtime.controller.host_compatibility import Clock

PROCS = (11, 12, 13)


class Reports:
    """Three ranks that report; their processes are 11, 12 and 13, and process 13 is on another host."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        hosts = {1: SimpleNamespace(clock=None), 2: SimpleNamespace(clock=Clock(ahead_s, 0.0))}
        core: Any = SimpleNamespace(ranks={}, hosts=hosts)
        self.late = LateRanks(core)

    def report(self, proc: int, first: int, late_s: float, now: float, *, n: int = 20, group: str = "0") -> None:
        record: Any = SimpleNamespace(spec=SimpleNamespace(proc=proc), host=1 if proc < 13 else 2)
        numbers = tuple(range(first, first + n))
        times = tuple(1000.0 + number + late_s for number in numbers)
        message = Arrived((GroupArrivals(group, (0, 1, 2), numbers, times),))
        assert self.late.may_send(proc, message)
        self.late.handlers[Arrived](record, message, now)

    def view(self, now: float) -> MeshView:
        ranks = tuple(RankView(rank, (("gpus", rank),), "running", "cell [5]") for rank in range(3))
        return self.late.shown(MeshView("t", (("gpus", 3),), ranks), PROCS, now)


def test_a_late_rank_is_shown() -> None:
    reports = Reports()
    assert reports.view(1.0).ranks[1].collectives == 0
    for proc, late_s in ((11, 0.0), (12, 0.0236), (13, 0.001)):
        reports.report(proc, 1, late_s, 1.0)
    view = reports.view(2.5)
    assert [(rank.last, rank.collectives) for rank in view.ranks] == [(0, 20), (20, 20), (0, 20)]
    assert view.ranks[1].late_s == pytest.approx(0.0236)
    titles, *rows = mesh_text(view).split("\n")[1:4]
    assert "late" in titles.split()
    assert "1.0 ms, last in 0 of 20" in mesh_text(view)
    assert "24 ms, last in 20 of 20" in rows[1]
    assert meshes_text([view]).split("\n")[1].endswith("[1] 24 ms, last in 20 of 20")
    assert mesh_frame(view, 0.0, None, None).ranks[1].late == "24 ms, last in 20 of 20"


def test_reports_that_overlap_in_part_are_compared() -> None:
    reports = Reports()
    reports.report(11, 1, 0.0, 1.0)
    reports.report(11, 21, 0.0, 2.0)
    reports.report(12, 11, 0.02, 2.0)
    reports.report(13, 5, 0.0, 2.0, n=21)
    assert [rank.collectives for rank in reports.view(2.5).ranks] == [15, 15, 15]


def test_clocks_of_hosts_are_corrected() -> None:
    reports = Reports(ahead_s=30.0)
    for proc, late_s in ((11, 0.0), (12, 0.02), (13, 30.001)):
        reports.report(proc, 1, late_s, 1.0)
    assert [rank.last for rank in reports.view(2.0).ranks] == [0, 20, 0]


def test_old_reports_are_not_shown() -> None:
    reports = Reports()
    for proc, late_s in ((11, 0.0), (12, 0.02), (13, 0.0)):
        reports.report(proc, 1, late_s, 1.0)
    assert reports.view(3.0).ranks[1].last == 20
    assert reports.view(9.0).ranks[1].collectives == 0


def test_collectives_before_a_time_are_left_out() -> None:
    reports = Reports()
    for proc, late_s in ((11, 0.0), (12, 0.02), (13, 0.0)):
        reports.report(proc, 1, late_s, 1.0)
    assert reports.late.late_since(1011.0, PROCS, 2.0)[1].of == 10
    assert not reports.late.late_since(1021.0, PROCS, 2.0)


def test_a_group_that_is_formed_again_is_not_compared_with_the_former_one() -> None:
    reports = Reports()
    for proc in PROCS:
        reports.report(proc, 1, 0.0, 1.0)
    for proc in PROCS:
        reports.report(proc, 1, 500.0 + (0.02 if proc == 12 else 0.0), 2.0)
    view = reports.view(3.0)
    assert [(rank.last, rank.collectives) for rank in view.ranks] == [(0, 20), (20, 20), (0, 20)]


def test_a_process_that_is_lost_has_no_arrivals() -> None:
    reports = Reports()
    for proc, late_s in ((11, 0.0), (12, 0.02), (13, 0.0)):
        reports.report(proc, 1, late_s, 1.0)
    reports.late.process_lost(13)
    assert reports.view(2.5).ranks[1].collectives == 0  # the group needs all three
