"""Collectives are counted by kind, group and bytes; of those that C++ starts, only their number is reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.features.traffic.table import Traffic
from monarch_kernel.train.process_group.worker import GroupStore
from tests.support.waiting import LONG_S


@pytest.fixture(scope="module")
def procs(session: None) -> Iterator[ProcMesh]:
    """Two ranks with a process group."""
    store = GroupStore()
    mesh = this_host().spawn_procs({"dp": 2}, device="cpu", name="c")
    mesh.run("import torch, torch.distributed as dist").get(LONG_S)
    store.form(mesh).get(LONG_S)
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)
    store.close()


def counted(procs: ProcMesh, code: str) -> Traffic:
    before = procs.traffic()
    procs.run(code).get(LONG_S)
    return procs.traffic() - before


def kinds(traffic: Traffic, rank: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
    return {
        (row.group, row.operation): (row.nbytes, row.operations) for row in traffic.collectives if row.end.rank == rank
    }


EACH = """
x, two = torch.zeros(1000), torch.zeros(2000)
dist.all_reduce(x)
work = dist.all_reduce(x, async_op=True); work.wait()
dist.broadcast(x, 0)
dist.all_gather([torch.zeros(1000), torch.zeros(1000)], x)
getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(two, x)  # the first since torch 2.13
getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(x, two)
dist.all_to_all_single(torch.zeros(1000), x)
dist.reduce(x, 0)
dist.barrier()
"""


def test_each_kind_is_counted_once_with_its_bytes(procs: ProcMesh) -> None:
    traffic = counted(procs, EACH)
    expected = {
        ("", "all_reduce"): (8000, 2),
        ("", "broadcast"): (4000, 1),
        ("", "all_gather"): (16000, 2),
        ("", "reduce_scatter"): (8000, 1),
        ("", "all_to_all"): (4000, 1),
        ("", "reduce"): (4000, 1),
        ("", "barrier"): (0, 1),
    }
    assert kinds(traffic) == kinds(traffic, 1) == expected
    assert traffic.unread == 0
    assert all(row.seconds > 0 for row in traffic.collectives)
    assert "all_reduce" in str(traffic)


def test_a_sparse_tensor_counts_its_indices_and_values(procs: ProcMesh) -> None:
    traffic = counted(procs, "dist.all_reduce(torch.eye(100).to_sparse())")
    assert kinds(traffic) == {("", "all_reduce"): (100 * (2 * 8 + 4), 1)}


def test_groups_are_counted_separately_and_coalesced_collectives_as_one(procs: ProcMesh) -> None:
    code = """
other = dist.new_group([0, 1], group_desc="mine")
dist.all_reduce(torch.zeros(10), group=other)
dist.all_reduce(torch.zeros(10), group=mesh.get_group())
with dist._coalescing_manager(async_ops=False):
    dist.all_reduce(torch.zeros(10)); dist.all_reduce(torch.zeros(20))
"""
    traffic = counted(procs, code)
    found = kinds(traffic)
    assert found.pop(("mine", "all_reduce")) == (40, 1)
    assert sum(nbytes for nbytes, _ in found.values()) == 160
    assert traffic.unread == 0


def test_messages_between_two_ranks_are_counted_by_both(procs: ProcMesh) -> None:
    traffic = counted(procs, "y = torch.zeros(50)\ndist.send(y, 1) if rank == 0 else dist.recv(y, 0)")
    assert kinds(traffic) == {("", "send"): (200, 1)}
    assert kinds(traffic, 1) == {("", "recv"): (200, 1)}
    assert traffic.unread == 0


def test_collectives_of_cpp_are_reported_as_a_number(procs: ProcMesh) -> None:
    code = """
import torch.distributed._functional_collectives as functional
z = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD); z.tolist()
"""
    traffic = counted(procs, code)
    assert kinds(traffic) == {}
    assert traffic.unread == 2  # one on each rank
    assert "2 collectives more" in str(traffic)
