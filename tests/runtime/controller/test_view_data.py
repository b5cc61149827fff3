"""Snapshots of hosts and meshes for views."""

from __future__ import annotations

from msgspec.structs import replace

from monarch_kernel.errors import Failure
from monarch_kernel.runtime.controller.process_records import HostRecord, RankRecord
from monarch_kernel.runtime.controller.view_data import host_views, mesh_view
from monarch_kernel.testing import rank_spec


def names(records: dict[int, HostRecord], *hosts: int) -> list[str]:
    return [view.name for view in host_views(records, hosts)]


def test_agents_of_one_machine_keep_their_names_while_one_is_replaced() -> None:
    records = {host: HostRecord(host, hostname="vm", up=True) for host in (1, 2)}
    assert names(records, 1, 2) == ["vm#1", "vm#2"]
    assert names(records, 1) == ["vm"]
    records[2].gone, records[2].end = True, Failure("lost", "HostLost", "it has died")
    assert names(records, 1, 2) == ["vm#1", "vm#2"]
    records[2].successor, records[3] = 3, HostRecord(3)
    assert names(records, 1, 3) == ["vm#1", ""]
    records[3].hostname, records[3].up = "vm", True
    assert names(records, 1, 3) == ["vm#1", "vm#3"]


def test_the_device_is_shown_once_the_host_has_reported_it() -> None:
    record = RankRecord(replace(rank_spec(1), device="auto"), 1)
    for device in ("", "cpu"):
        record.device = device
        view = mesh_view("t", {"gpus": 1}, [record], {1: HostRecord(1)}, lambda host: None, 0.0)
        assert [rank.device for rank in view.ranks] == [device]


def test_a_mesh_is_up_from_the_moment_when_the_last_rank_has_come_up() -> None:
    records = [RankRecord(rank_spec(rank), 1) for rank in range(2)]

    def age(now: float) -> tuple[bool, float]:
        view = mesh_view("t", {"gpus": 2}, records, {1: HostRecord(1)}, lambda host: None, now)
        return view.is_up, view.age_s

    records[0].up, records[0].up_at = True, 103.0
    assert age(104.0) == (False, 0.0)
    records[1].up, records[1].up_at = True, 105.0
    assert age(109.0) == (True, 4.0)
    records[1] = RankRecord(rank_spec(1), 1, up_at=105.0)  # replaces the other, and starts
    assert age(110.0) == (True, 5.0)
