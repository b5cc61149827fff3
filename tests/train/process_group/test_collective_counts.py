"""Collectives are counted to the byte, by kind, group and data path, whether Python or C++ starts them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.errors import RemoteError
from monarch_kernel.features.traffic.table import Traffic
from monarch_kernel.train.process_group.worker import GroupStore
from tests.support.waiting import LONG_S, wait_until

SETUP = """
import warnings
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the first since torch 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
zeros, world, other = torch.zeros, dist.group.WORLD, 1 - rank
"""


@pytest.fixture(scope="module")
def procs(session: None) -> Iterator[ProcMesh]:
    """Two ranks with a process group."""
    store = GroupStore()
    mesh = this_host().spawn_procs({"dp": 2}, device="cpu", name="c")
    mesh.run("import torch, torch.distributed as dist").get(LONG_S)
    store.form(mesh).get(LONG_S)
    mesh.run(SETUP).get(LONG_S)
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)
    store.close()


def counted(procs: ProcMesh, code: str) -> Traffic:
    before = procs.traffic()
    procs.run(code).get(LONG_S)
    return procs.traffic() - before


def kinds(traffic: Traffic, rank: int) -> dict[tuple[str, str], tuple[int, int, int, int]]:
    """What a rank has done: (group, operation) -> bytes, operations, bytes in, bytes out."""
    return {
        (row.group, row.operation): (row.nbytes, row.operations, row.nbytes_in, row.nbytes_out)
        for row in traffic.collectives
        if row.end.rank == rank
    }


# A float has 4 bytes. For each case: the code, and operation -> (bytes, operations, bytes in, bytes out) of both ranks.
Counts = dict[str, tuple[int, int, int, int]]
EACH: dict[str, tuple[str, Counts, Counts]] = {
    "all_reduce": ("dist.all_reduce(zeros(1000))", {"all_reduce": (4000, 1, 4000, 4000)}, {}),
    "asynchronous": ("dist.all_reduce(zeros(10), async_op=True).wait()", {"all_reduce": (40, 1, 40, 40)}, {}),
    "inference": ("with torch.inference_mode(): dist.all_reduce(zeros(10))", {"all_reduce": (40, 1, 40, 40)}, {}),
    "sparse": (  # 100 rows of two indices of 8 bytes, and a value
        "dist.all_reduce(torch.eye(100).to_sparse())",
        {"all_reduce": (2000, 1, 2000, 2000)},
        {},
    ),
    "coalesced": (
        "with dist._coalescing_manager(): dist.all_reduce(zeros(10)); dist.all_reduce(zeros(20))",
        {"all_reduce": (120, 1, 120, 120)},
        {},
    ),
    "broadcast": ("dist.broadcast(zeros(10), 1)", {"broadcast": (40, 1, 40, 0)}, {"broadcast": (40, 1, 0, 40)}),
    "reduce": ("dist.reduce(zeros(10), 1)", {"reduce": (40, 1, 0, 40)}, {"reduce": (40, 1, 40, 0)}),
    "all_gather of a list": (
        "dist.all_gather([zeros(10), zeros(10)], zeros(10))",
        {"all_gather": (80, 1, 40, 40)},
        {},
    ),
    "all_gather": ("all_gather_single(zeros(20), zeros(10))", {"all_gather": (80, 1, 40, 40)}, {}),
    "reduce_scatter": ("reduce_scatter_single(zeros(10), zeros(20))", {"reduce_scatter": (80, 1, 40, 40)}, {}),
    "gather": (
        "dist.gather(zeros(10), [zeros(10), zeros(10)] if rank == 0 else None, 0)",
        {"gather": (80, 1, 40, 0)},
        {"gather": (40, 1, 0, 40)},
    ),
    "scatter": (
        "dist.scatter(zeros(10), [zeros(10), zeros(10)] if rank == 0 else None, 0)",
        {"scatter": (80, 1, 0, 40)},
        {"scatter": (40, 1, 40, 0)},
    ),
    "all_to_all": ("dist.all_to_all_single(zeros(10), zeros(10))", {"all_to_all": (40, 1, 20, 20)}, {}),
    "uneven all_to_all": (  # rank 0 keeps 3 and sends 1; rank 1 sends 5 and keeps 2
        "mine, theirs = ([3, 1], [3, 5]) if rank == 0 else ([5, 2], [1, 2])\n"
        "dist.all_to_all_single(zeros(sum(theirs)), zeros(sum(mine)), theirs, mine)",
        {"all_to_all": (32, 1, 20, 4)},
        {"all_to_all": (28, 1, 4, 20)},
    ),
    "messages": (
        "dist.send(zeros(50), 1) if rank == 0 else dist.recv(zeros(50), 0)",
        {"send": (200, 1, 0, 200)},
        {"recv": (200, 1, 200, 0)},
    ),
    "a message from any rank": (
        "dist.send(zeros(5), 1) if rank == 0 else dist.recv(zeros(5))",
        {"send": (20, 1, 0, 20)},
        {"recv": (20, 1, 20, 0)},
    ),
    "a batch of messages": (
        "ops = [dist.P2POp(dist.isend, zeros(5), other), dist.P2POp(dist.irecv, zeros(5), other)]\n"
        "for work in dist.batch_isend_irecv(ops): work.wait()",
        {"send": (20, 1, 0, 20), "recv": (20, 1, 20, 0)},
        {},
    ),
    "barriers": (
        "dist.barrier(); dist.monitored_barrier()",
        {"barrier": (0, 1, 0, 0), "monitored_barrier": (0, 1, 0, 0)},
        {},
    ),
    "functional": (
        "functional.all_reduce(zeros(10), 'sum', world).tolist()\n"
        "functional.all_gather_tensor(zeros(10), 0, world).tolist()\n"
        "functional.reduce_scatter_tensor(zeros(20), 'sum', 0, world).tolist()\n"
        "functional.all_to_all_single(zeros(10), None, None, world).tolist()",
        {
            "all_reduce": (40, 1, 40, 40),
            "all_gather": (80, 1, 40, 40),
            "reduce_scatter": (80, 1, 40, 40),
            "all_to_all": (40, 1, 20, 20),
        },
        {},
    ),
    "compiled": (
        "def double(x): return functional.all_reduce(x, 'sum', world) * 2\n"
        "torch.compile(double, backend='eager')(zeros(10)).tolist(); torch._dynamo.reset()",
        {"all_reduce": (40, 1, 40, 40)},
        {},
    ),
    "DTensor": (
        "DTensor.from_local(zeros(10), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local().tolist()",
        {"all_gather": (80, 1, 40, 40)},
        {},
    ),
}


def test_ddp_needs_no_kernel_of_the_dispatcher(procs: ProcMesh) -> None:
    """First, because functional collectives add the kernels, which all collectives then go through."""
    code = """
model = DistributedDataParallel(torch.nn.Linear(10, 9))
for _ in range(3): model(zeros(2, 10)).sum().backward()
model = None
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
"""
    assert kinds(counted(procs, code), 0)["", "all_reduce"] == (3 * 396, 3, 3 * 396, 3 * 396)
    assert procs["has_kernel"].values() == (False, False)


@pytest.mark.parametrize("case", EACH)
def test_each_kind_is_counted_to_the_byte(procs: ProcMesh, case: str) -> None:
    code, first, second = EACH[case]
    traffic = counted(procs, code)
    for rank, expected in enumerate((first, second or first)):
        of_world = {
            operation: counts for (group, operation), counts in kinds(traffic, rank).items() if group in ("", "dp")
        }
        assert of_world == expected
    assert traffic.unread == 0
    assert {(row.path, row.ranks) for row in traffic.collectives} == {("gloo", 2)}


# In buckets of one layer: 4 * (10 * 9 + 9) and 4 * (9 * 8 + 8) bytes, which are 716. The first backward has one bucket.
DDP_SETUP = """
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
def wrap(module=None, **options):
    if module is None: module = nn.Sequential(nn.Linear(10, 9), nn.Linear(9, 8))
    return DistributedDataParallel(module, bucket_cap_mb=0.0001, **options)
def use(model, times=3, x=zeros(2, 10)):
    for _ in range(times): model(x).sum().backward()
"""
DDP: dict[str, tuple[str, tuple[int, int]]] = {  # the code, and bytes and number of its all_reduces
    "buckets": ("use(wrap())", (3 * 716, 5)),
    "buckets as views": ("use(wrap(gradient_as_bucket_view=True))", (3 * 716, 5)),
    "another group": ("use(wrap(process_group=mesh.get_group()))", (3 * 716, 5)),
    "two models at once": (
        "one, two = wrap(), wrap()\nfor _ in range(3): (one(zeros(2, 10)) + two(zeros(2, 10))).sum().backward()",
        (6 * 716, 10),
    ),
    "unused parameters": ("use(wrap(find_unused_parameters=True))", (3 * (716 + 4 * 4), 12)),  # an int32 for each
    "a static graph": ("use(wrap(static_graph=True))", (3 * 716 + 4 * 4, 5)),
    "no_sync": ("model = wrap()\nwith model.no_sync(): use(model)\nuse(model, 1)", (716, 1)),
    "a hook in C++": (
        "model = wrap(); model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS); use(model)",
        (3 * 716 // 2, 5),
    ),
    "a hook in Python": ("model = wrap(); model.register_comm_hook(None, allreduce_hook); use(model)", (3 * 716, 5)),
    "a new group": (
        "model = wrap(); use(model, 1); model._update_process_group(dist.new_group([0, 1], group_desc='new')); use(model, 1)",
        (2 * 716, 2),
    ),
    "uneven inputs": (  # and eight times a number, 36 bytes, for what the ranks still have
        "model = wrap()\nwith model.join(): use(model, 2 + rank)",
        (3 * 716 + 36, 5 + 8),
    ),
}


@pytest.mark.parametrize("case", DDP)
def test_gradients_of_ddp_are_counted_to_the_byte(procs: ProcMesh, case: str) -> None:
    code, expected = DDP[case]
    traffic = counted(procs, f"{DDP_SETUP}{code}\nmodel = None")
    for rank in (0, 1):
        found = [counts for (_, operation), counts in kinds(traffic, rank).items() if operation == "all_reduce"]
        nbytes, operations, nbytes_in, nbytes_out = map(sum, zip(*found))
        assert (nbytes, operations) == expected
        assert (nbytes_in, nbytes_out) == (nbytes, nbytes)
    assert traffic.unread == 0


def test_parameters_and_buffers_of_ddp_are_counted_to_the_byte(procs: ProcMesh) -> None:
    """The first rank sends them. Before, the ranks compare their numbers of parameters, of 8 bytes."""
    code = "use(wrap(nn.Sequential(nn.Linear(10, 9), nn.BatchNorm1d(9))), 0)"
    traffic = counted(procs, DDP_SETUP + code)
    nbytes = 4 * (10 * 9 + 4 * 9 + 9) + 8  # with a number of batches of 8 bytes
    (sent,) = (each for (_, operation), each in kinds(traffic, 0).items() if operation == "broadcast")
    assert sent[2:] == (0, sent[0])
    assert sent[0] >= nbytes
    assert kinds(traffic, 0)["", "all_gather"] == (16, 1, 8, 8)
    assert traffic.unread == 0


def test_a_profile_has_the_operators_of_ddp(procs: ProcMesh) -> None:
    code = """
model = wrap()
with torch.profiler.profile() as profile: use(model)
found = sum(each.name == "c10d::allreduce_" for each in profile.events())
model = profile = None
"""
    traffic = counted(procs, DDP_SETUP + code)
    assert procs["found"].values() == (5, 5)
    assert kinds(traffic, 0)["", "all_reduce"] == (3 * 716, 5, 3 * 716, 3 * 716)


def test_parameters_and_gradients_of_fsdp_are_counted_to_the_byte(procs: ProcMesh) -> None:
    setup = """
model = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Linear(8, 6))
for each in (*model, model): fully_shard(each)
"""
    procs.run(setup).get(LONG_S)
    traffic = counted(procs, "for _ in range(3): model(zeros(2, 10)).sum().backward()\nmodel = None")
    nbytes = 4 * (10 * 8 + 8 + 8 * 6 + 6)
    for rank in (0, 1):
        moved = {operation: row for (_, operation), row in kinds(traffic, rank).items()}
        assert moved["reduce_scatter"] == (3 * nbytes, 6, 3 * nbytes // 2, 3 * nbytes // 2)
        assert moved["all_gather"][0] == 6 * nbytes  # for the forward and for the backward pass
    assert traffic.unread == 0


def test_groups_are_counted_separately(procs: ProcMesh) -> None:
    code = """
mine = dist.new_group([0, 1], group_desc="mine")
dist.all_reduce(zeros(10), group=mine)
dist.all_reduce(zeros(20), group=mesh.get_group())
dist.all_reduce(zeros(30), group=dist.new_group([0, 1]))
"""
    found = kinds(counted(procs, code), 0)
    assert found["mine", "all_reduce"] == (40, 1, 40, 40)
    assert found["[0-1]", "all_reduce"] == (120, 1, 120, 120)
    assert sum(nbytes for nbytes, *_ in found.values()) == 240


def when_timed(procs: ProcMesh, code: str, *operations: str) -> Traffic:
    """Run code until a rank has had to wait for each of these collectives: the duration of others is not known."""
    found = []

    def all_are_timed() -> bool:
        found.append(counted(procs, code))
        return {row.operation for row in found[-1].collectives if row.timed_nbytes} >= set(operations)

    wait_until(all_are_timed, f"a duration of {operations}")
    return found[-1]


def test_bandwidths_are_those_of_the_time_that_a_collective_took(procs: ProcMesh) -> None:
    code = "for _ in range(3): dist.all_reduce(zeros(100_000)); all_gather_single(zeros(100_000), zeros(50_000))"
    traffic = when_timed(procs, code, "all_reduce", "all_gather")
    for row in traffic.collectives:
        assert row.seconds > 0
        assert row.timed_nbytes in (0, 400_000, 800_000, 1_200_000)
        assert row.algorithm_bytes_per_s == pytest.approx(row.timed_nbytes / row.timed_s if row.timed_nbytes else 0.0)
        factor = {"all_reduce": 1.0, "all_gather": 0.5}[row.operation]  # on two ranks
        assert row.bus_bytes_per_s == pytest.approx(factor * row.algorithm_bytes_per_s)
    assert "algbw" in str(traffic)


def test_a_collective_that_is_over_before_its_wait_has_no_duration(procs: ProcMesh) -> None:
    code = """
work = dist.all_reduce(zeros(1000), async_op=True)
while not work.is_completed(): pass
work.wait()
"""
    assert {(row.operations, row.timed_nbytes) for row in counted(procs, code).collectives} == {(1, 0)}


def test_some_of_the_collectives_of_cpp_have_a_duration(procs: ProcMesh) -> None:
    # The second rank starts its part later, so that the first one's is rarely over when its thread looks.
    code = """
if rank == 1: dist.recv(zeros(1), 0)
result = functional.all_reduce(zeros(1000), "sum", world)
if rank == 0: dist.send(zeros(1), 1)
result.tolist()
"""
    traffic = when_timed(procs, code, "all_reduce")
    assert all(row.timed_nbytes % 4000 == 0 for row in traffic.collectives if row.operation == "all_reduce")


@pytest.mark.parametrize("call", ["send(torch.zeros(2), 7)", "recv(torch.zeros(2), -3)", "isend(torch.zeros(2), 2)"])
def test_a_message_to_no_rank_is_refused(procs: ProcMesh, call: str) -> None:
    """In gloo it ends the process by SIGSEGV."""
    with pytest.raises(RemoteError, match=r"rank -?\d does not exist: the process group has 2 ranks, 0 to 1"):
        procs.run(f"dist.{call}").get(LONG_S)


def test_rates_include_collectives(procs: ProcMesh) -> None:
    def moved() -> tuple[float, float]:
        """Bytes in and out in the last minute."""
        return tuple(map(sum, zip(*procs.throughput())))  # type: ignore[return-value]

    procs.run("dist.all_reduce(zeros(4_000_000))").get(LONG_S)
    wait_until(lambda: min(moved()) >= 32_000_000, "the throughput")  # the other tests move less


@pytest.mark.parametrize("call", ["dist.all_reduce(x, group=group)", "reduce_scatter_single(x[:5], x, group=group)"])
def test_a_collective_that_fails_is_not_counted(procs: ProcMesh, call: str) -> None:
    """Neither on the rank that refuses it nor on the rank that waits in it."""
    code = """
group = dist.new_group([0, 1], group_desc="refused")
x = zeros(10, dtype=torch.int32 if rank else torch.float32)
try: {call}
except RuntimeError as error: text = str(error)
"""
    before = procs.traffic()
    procs.run(code.format(call=call)).get(LONG_S)
    assert all("with different dtypes" in text for text in procs["text"].values())
    assert not [row for row in (procs.traffic() - before).collectives if row.group == "refused"]


def test_groups_that_ended_are_forgotten(procs: ProcMesh) -> None:
    """What is kept of each collective's size would add up in a loop that makes and destroys groups."""
    code = """
import gc
from monarch_kernel.train.process_group.operators import _Group
def kept(): return sum(type(each) is _Group and each.label == "brief" for each in gc.get_objects())
group = dist.new_group([0, 1], group_desc="brief")
dist.all_reduce(zeros(10), group=group)
during = kept()
dist.destroy_process_group(group)
del group
"""
    procs.run(code).get(LONG_S)
    assert procs["during"].values() == (1, 1)

    def is_forgotten() -> bool:
        procs.run("after = kept()").get(LONG_S)
        return procs["after"].values() == (0, 0)

    wait_until(
        is_forgotten, "the group to be forgotten"
    )  # a thread that reports counts may look at all of them just then


def test_gradients_of_ddp_that_are_aborted_are_not_counted(procs: ProcMesh) -> None:
    """Last, because it leaves no usable group."""
    code = """
group = dist.new_group([0, 1], group_desc="ddp")
model = DistributedDataParallel(torch.nn.Linear(10, 9), process_group=group)
for _ in range(3): model(zeros(2, 10)).sum().backward()
"""
    procs.run(code).get(LONG_S)
    before = procs.traffic()
    running = procs.run("if rank == 0: model(zeros(2, 10)).sum().backward()")
    wait_until(lambda: bool(procs.doing().get(LONG_S)[0].collectives), "the gradients to be sent")  # type: ignore[union-attr]
    procs.interrupt(abort=True)
    assert running.exception(LONG_S) is not None
    assert not [row for row in (procs.traffic() - before).collectives if row.group == "ddp"]
