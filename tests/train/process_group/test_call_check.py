"""Collectives that ranks call with different arguments are refused on all ranks, legal uses are not, and the mesh goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.errors import CollectiveError, RemoteError
from monarch_kernel.train.process_group.worker import GroupStore
from tests.support.waiting import LONG_S, wait_until

PRELUDE = """
import gc, os, threading, time, torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
sums = lambda: (x := torch.ones(3), dist.all_reduce(x))[0].tolist()
floats, ints = torch.ones(4), torch.ones(4, dtype=torch.int32)
"""
# The sizes are such that no rank ends before the last one comes, in any order; the last one differs from the two others.
LAST = "last = rank == 2\n"


@pytest.fixture(scope="module")
def store() -> Iterator[GroupStore]:
    store = GroupStore()
    yield store
    store.close()


@pytest.fixture(scope="module")
def procs(session: None, store: GroupStore) -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"dp": 3}, name="c", device="cpu")
    mesh.run(PRELUDE).get(LONG_S)
    yield mesh
    mesh.run("import gc; x = work = model = other = mesh = None; gc.collect(); dist.destroy_process_group()").get(
        LONG_S
    )
    mesh.stop(grace_s=0).get(LONG_S)


@pytest.fixture
def group(procs: ProcMesh, store: GroupStore) -> ProcMesh:
    """The three ranks with a fresh group."""
    store.form(procs).get(LONG_S)
    return procs


def refusal(mesh: ProcMesh, code: str) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        mesh.run(LAST + code).get(LONG_S)
    return caught.value


SYMMETRIC = {
    "dtypes of all_reduce": ("dist.all_reduce(ints if last else floats)", "all_reduce with different dtypes"),
    "shapes of all_reduce": (
        "dist.all_reduce(torch.ones((2, 6) if last else (3, 4)))",
        "all_reduce with different shapes",
    ),
    "sizes of all_reduce": ("dist.all_reduce(torch.ones(4 + 4 * last))", "all_reduce with different sizes"),
    "reductions": (
        "dist.all_reduce(floats, dist.ReduceOp.MAX if last else dist.ReduceOp.SUM)",
        "all_reduce with different reductions",
    ),
    "an async all_reduce": (
        "work = dist.all_reduce(ints if last else floats, async_op=True)\nwork.wait()",
        "all_reduce with different dtypes",
    ),
    "kinds": ("dist.barrier() if last else dist.all_reduce(floats)", "different collectives"),
    "roots": (
        "dist.broadcast(floats, int(last))\ndist.barrier()",
        "broadcast with different roots",
    ),
    "dtypes after a monitored_barrier": (
        "dist.monitored_barrier()\ndist.all_reduce(ints if last else floats)",
        "all_reduce with different dtypes",
    ),
    "layouts": (
        "mine = torch.ones(4, 4)\ndist.all_reduce(mine.to_sparse() if last else mine)",
        "all_reduce with different layouts",
    ),
    "coalesced": (
        "mine = ints if last else floats\n"
        "with dist._coalescing_manager():\n    dist.all_reduce(mine); dist.all_reduce(mine.clone())",
        "all_reduce with different dtypes",
    ),
    "all_gather": (
        "mine = ints if last else floats\ndist.all_gather([mine.clone() for _ in range(3)], mine)",
        "all_gather with different dtypes",
    ),
    "all_gather_into_tensor": (
        "dist.all_gather_into_tensor(torch.ones(12 + 3 * last), torch.ones(4 + last))",
        "all_gather with different sizes",
    ),
    "reduce_scatter": (
        "dist.reduce_scatter(torch.ones(2 + last), [torch.ones(2 + last) for _ in range(3)])",
        "reduce_scatter with different sizes",
    ),
    "reduce_scatter_tensor": (
        "mine = torch.float64 if last else torch.float32\n"
        "dist.reduce_scatter_tensor(torch.ones(2, dtype=mine), torch.ones(6, dtype=mine))",
        "reduce_scatter with different dtypes",
    ),
    "all_to_all": (
        "size = 2 if last else 1\n"
        "dist.all_to_all([torch.ones(size) for _ in range(3)], [torch.ones(size) for _ in range(3)])",
        "all_to_all with different sizes",
    ),
    "all_to_all_single": (
        "splits = [1, 1, 4] if last else [2, 2, 2]\ndist.all_to_all_single(torch.ones(6), torch.ones(6), splits, splits)",
        "all_to_all with different sizes",
    ),
    "splits that are equal on all ranks": (
        "splits = [1, 2, 3]\ndist.all_to_all_single(torch.ones(6), torch.ones(6), splits, splits)",
        " elements to [",
    ),
    "functional all_reduce": (
        "functional.all_reduce(ints if last else floats, 'sum', dist.group.WORLD).tolist()",
        "all_reduce with different dtypes",
    ),
    "functional all_gather": (
        "functional.wait_tensor(functional.all_gather_single(torch.ones(2 + last), 0, dist.group.WORLD))",
        "all_gather with different sizes",
    ),
    "functional all_gather by its old name": (
        "functional.wait_tensor(functional.all_gather_tensor(torch.ones(2 + last), 0, dist.group.WORLD))",
        "all_gather with different sizes",
    ),
    "functional reduce_scatter": (
        "functional.reduce_scatter_single(torch.ones(3 + 3 * last), 'sum', 0, dist.group.WORLD).tolist()",
        "reduce_scatter with different sizes",
    ),
    "functional and not": (
        "functional.all_reduce(ints, 'sum', dist.group.WORLD).tolist() if last else dist.all_reduce(floats)",
        "all_reduce with different dtypes",
    ),
    "a group of the user": (
        "other = dist.new_group([0, 1, 2], group_desc='mine')\ndist.all_reduce(ints if last else floats, group=other)",
        "the process group 'mine' call all_reduce with different dtypes",
    ),
    "a group with several backends": (  # beside a registered backend, torch does not number the collectives of this group
        "dist.Backend._plugins['other'] = None\n"
        "other = dist.new_group([0, 1, 2], backend='cpu:gloo,cuda:gloo', group_desc='both')\n"
        "del dist.Backend._plugins['other']\n"
        "dist.all_reduce(floats, group=other)\ndist.all_reduce(ints if last else floats, group=other)",
        "the process group 'both' call all_reduce with different dtypes (its collective 2)",
    ),
    "tensors of a model": (
        "for tensor in torch.nn.Linear(3, 3 + last).parameters():\n    dist.all_reduce(tensor.data)",
        "all_reduce with different sizes",
    ),
}


@pytest.mark.parametrize("case", SYMMETRIC)
def test_all_ranks_get_the_refusal_and_the_next_cell_works(group: ProcMesh, store: GroupStore, case: str) -> None:
    code, text = SYMMETRIC[case]
    error = refusal(group, code)
    assert set(error.ranks) == {0, 1, 2}
    for failure in error.reports.values():
        assert failure.etype == "CollectiveError", failure
        assert text in failure.message
        assert "code, line" in failure.message
    assert isinstance(error.exception, CollectiveError)
    store.form(group).get(LONG_S)
    assert group.run("sums()").get(LONG_S).values() == ([3.0] * 3,) * 3


def test_the_refusal_names_each_kind_of_call_with_its_ranks(group: ProcMesh, store: GroupStore) -> None:
    group.run(
        "import monarch_kernel.train.process_group.call_check as check; usual, check.LATE_S = check.LATE_S, 60.0"
    ).get(LONG_S)
    try:
        error = refusal(group, "dist.all_reduce((floats, ints, torch.ones(8))[rank])")
    finally:
        group.run("check.LATE_S = usual").get(LONG_S)
    assert set(error.ranks) == {0, 1, 2}
    for failure in error.reports.values():
        headline, *kinds = failure.message.splitlines()
        assert "all_reduce with different dtypes and sizes" in headline or "different sizes and dtypes" in headline
        assert [kind.partition(", ")[0] for kind in kinds[:3]] == [
            "  [0] all_reduce of float32 (4)",
            "  [1] all_reduce of int32 (4)",
            "  [2] all_reduce of float32 (8)",
        ]
    store.form(group).get(LONG_S)
    assert group.run("sums()").get(LONG_S).values() == ([3.0] * 3,) * 3


ONE_SIDED = {
    "broadcast": ("dist.broadcast(floats.double() if last else floats, 0)", "broadcast with different dtypes"),
    "reduce": ("dist.reduce(torch.ones(4 + last), 0)", "reduce with different sizes"),
    "gather": (
        "dist.gather(torch.ones(2 + last), [torch.ones(2) for _ in range(3)] if rank == 0 else None)",
        "gather with different sizes",
    ),
    "scatter": (
        "dist.scatter(torch.ones(2 + last), [torch.ones(2) for _ in range(3)] if rank == 0 else None)",
        "scatter with different sizes",
    ),
}


@pytest.mark.parametrize("case", ONE_SIDED)
def test_a_rank_that_has_left_is_refused_at_its_next_collective(group: ProcMesh, store: GroupStore, case: str) -> None:
    code, text = ONE_SIDED[case]
    error = refusal(group, f"{code}\ndist.barrier()")
    assert set(error.ranks) == {0, 1, 2}
    assert all(text in failure.message for failure in error.reports.values())
    store.form(group).get(LONG_S)
    assert group.run("sums()").get(LONG_S).values() == ([3.0] * 3,) * 3


# Rank 1 sends to rank 2.
MESSAGES = {
    "sizes": ("send(torch.ones(4), 2)", "recv(torch.ones(2), 1)"),
    "larger": ("send(torch.ones(4), 2)", "recv(torch.ones(8), 1)"),
    "dtypes": ("send(ints, 2, tag=3)", "recv(floats, 1, tag=3)"),
    "shapes": ("isend(torch.ones(2, 6), 2).wait()", "irecv(torch.ones(3, 4), 1).wait()"),
    "batch": (
        "batch_isend_irecv([dist.P2POp(dist.isend, floats.double(), 2)])[0].wait()",
        "batch_isend_irecv([dist.P2POp(dist.irecv, floats, 1)])[0].wait()",
    ),
}


@pytest.mark.parametrize(
    ("case", "late"), [("sizes", 1), ("sizes", 2), ("larger", 2), ("dtypes", 1), ("shapes", 2), ("batch", 1)]
)
def test_a_message_that_differs_is_refused_with_both_lines(
    group: ProcMesh, store: GroupStore, case: str, late: int
) -> None:
    send, recv = MESSAGES[case]
    code = f"""
store = dist.distributed_c10d._get_default_store()
if rank == {late}: store.wait(["other"])
if rank == {3 - late}: store.set("other", "1")
if rank == 1: dist.{send}
if rank == 2: dist.{recv}
dist.barrier()
"""
    error = refusal(group, code)
    assert set(error.ranks) == {0, 1, 2}
    text = error.primary.message
    what = {"larger": "sizes", "batch": "dtypes"}.get(case, case)
    assert "call send and recv of one message" in text
    assert f"with different {what}; it was refused" in text
    assert "  [1] send of " in text
    assert "  [2] recv of " in text
    assert text.count(": code, line") == 2
    assert all(report.etype == "CollectiveError" for report in error.reports.values()), error.reports
    store.form(group).get(LONG_S)
    assert group.run("sums()").get(LONG_S).values() == ([3.0] * 3,) * 3


def test_the_error_has_the_line_of_each_rank(group: ProcMesh) -> None:
    error = refusal(group, "if rank == 0:\n    dist.all_reduce(floats)\nelse:\n    dist.all_reduce(ints)")
    lines = error.primary.message.splitlines()[1:]
    assert "  [0] all_reduce of float32 (4), sum: code, line 3" in lines
    assert any("all_reduce of int32 (4), sum: code, line 5" in line for line in lines)


def test_the_group_stays_refused_for_code_that_catches_the_error(group: ProcMesh) -> None:
    code = """
texts = set()
for _ in range(3):
    try:
        dist.all_reduce(ints if last else floats)
    except RuntimeError as error:
        texts.add(str(error))
len(texts)
"""
    assert group.run(LAST + code).get(LONG_S).values() == (1, 1, 1)


def test_a_rank_that_catches_the_refusal_and_goes_on_frees_those_that_wait(group: ProcMesh, tmp_path: Path) -> None:
    code = f"""
import pathlib
freed = pathlib.Path({str(tmp_path / "freed")!r})
try:
    if last:
        while not (freed.parent / "waits").exists(): pass
    dist.all_reduce(ints if last else floats)
except RuntimeError as error:
    if not last: freed.touch()
while last and not freed.exists(): pass
"""
    running = group.run(LAST + code)
    wait_until(lambda: all(group.doing().get(LONG_S)[rank].collectives for rank in (0, 1)), "two ranks to wait")  # type: ignore[union-attr]
    (tmp_path / "waits").touch()
    running.get(LONG_S)


LARGE = """
big = torch.ones(8 << 20)
time.sleep(last * {wait_s})
x = big.double() if last else big.clone()
{collective}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "collective", ["dist.all_gather([torch.empty_like(x) for _ in range(3)], x)", "dist.all_reduce(x)"]
)
def test_a_refusal_frees_ranks_in_the_middle_of_large_messages(
    group: ProcMesh, store: GroupStore, collective: str
) -> None:
    """When a connection ends, gloo forgets the message that it is writing, and the one that it is reading."""
    for i in range(24):
        error = refusal(group, LARGE.format(wait_s=0.005 * i, collective=collective))
        assert "with different dtypes" in error.primary.message
        store.form(group).get(LONG_S)


def test_a_collective_that_was_aborted_is_not_compared(group: ProcMesh) -> None:
    running = group.run("if rank: dist.all_reduce(floats)")
    wait_until(lambda: all(group.doing().get(LONG_S)[rank].collectives for rank in (1, 2)), "two ranks to wait")  # type: ignore[union-attr]
    group.interrupt(abort=True)
    assert running.exception(LONG_S) is not None
    error = group.run("if rank == 0: dist.barrier()").exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert not isinstance(error.exception, CollectiveError)


def test_a_smaller_group_is_refused_without_the_others(group: ProcMesh) -> None:
    code = """
pair = dist.new_group([1, 2])
if rank:
    dist.all_reduce(ints if last else floats, group=pair)
"""
    error = refusal(group, code)
    assert set(error.ranks) == {1, 2}
    assert "[1] all_reduce of float32 (4), sum" in error.primary.message
    assert "[0]" not in error.primary.message


def test_a_switch_turns_it_off(group: ProcMesh) -> None:
    code = "os.environ['MONARCH_CHECK_COLLECTIVES'] = '0'\nother = dist.new_group([0, 1, 2])\n"
    code += "del os.environ['MONARCH_CHECK_COLLECTIVES']\nx = torch.ones((3, 4) if rank else (2, 6))\n"
    assert group.run(code + "dist.all_reduce(x, group=other); x.sum().item()").get(LONG_S).values() == (36.0,) * 3


# -- legal uses

LEGAL = {
    "sizes that differ by step": "for n in range(1, 150): dist.all_reduce(torch.ones(n))",
    "flat and scalar": (
        "dist.all_reduce(torch.ones(2, 6) if rank else torch.ones(12))\n"
        "dist.all_reduce(torch.tensor(1.0) if rank else torch.ones(1))\ndist.all_reduce(torch.ones(0))"
    ),
    "complex": (
        "x = torch.ones(2, dtype=torch.complex64)\ndist.all_reduce(torch.view_as_real(x) if rank else x)\n"
        "dist.broadcast(torch.view_as_real(x) if rank else x, 0)"
    ),
    "lists and tensors": (
        "many = torch.ones(12)\n"
        "dist.all_gather(list(many.chunk(3)), floats) if rank else dist.all_gather_into_tensor(many, floats)"
    ),
    "uneven all_to_all": (
        "sent = [rank, 1, 2]\nreceived = [[0, 1, 2][i] if rank == 0 else rank for i in range(3)]\n"
        "for _ in range(3):\n"
        "    dist.all_to_all_single(torch.ones(sum(received)), torch.ones(sum(sent)), received, sent)"
    ),
    "objects": (
        "found = [None] * 3\nfor size in (1, 1000, 3):\n"
        "    dist.all_gather_object(found, 'x' * size * (rank + 1))\n"
        "    dist.broadcast_object_list([b'y' * size * (rank + 1)], 0)\n"
        "    dist.gather_object('z' * rank, [None] * 3 if rank == 0 else None)\n"
        "    dist.scatter_object_list([None], ['a', 'bb', 'ccc'] if rank == 0 else None)"
    ),
    "sparse": "dist.all_reduce((torch.eye(4) if rank else torch.ones(4, 4)).to_sparse())",
    "messages between two ranks": (
        "if rank == 0: dist.send(floats, 1)\nif rank == 1: dist.recv(floats, 0)\ndist.all_reduce(floats)\n"
        "dist.batch_isend_irecv([dist.P2POp(dist.isend, floats, 2)])[0].wait() if rank == 0 else None\n"
        "dist.recv(floats, 0) if rank == 2 else None\ndist.all_gather([torch.ones(4) for _ in range(3)], floats)"
    ),
    "messages in any order of tags, and objects": (
        "if rank == 0:\n"
        "    for n in range(1, 150): dist.send(torch.ones(n), 1, tag=n % 3)\n"
        "    works = [dist.isend(torch.ones(n + 1), 2, tag=n) for n in range(3)]\n"
        "    [each.wait() for each in works]\n    works = each = None\n"
        "    dist.send_object_list(['x' * 100, 5], 1)\n"
        "if rank == 1:\n"
        "    for n in range(1, 150): dist.recv(torch.ones(n), 0, tag=n % 3)\n"
        "    dist.recv_object_list([None, None], 0)\n"
        "if rank == 2:\n"
        "    for n in (2, 0, 1): dist.recv(torch.ones(n + 1), 0, tag=n)\n"
    ),
    "messages from any rank": (
        "if rank: dist.send(torch.ones(2), 0)\n"
        "else: dist.recv(torch.ones(2)); dist.recv(torch.ones(2))\n"
        "dist.barrier()\n"
        "if rank: dist.send(torch.ones(3), 0)\n"
        "else: dist.recv(torch.ones(3), 1); dist.recv(torch.ones(3), 2)"
    ),
    "monitored_barrier": "dist.monitored_barrier()\ndist.all_reduce(floats)\ndist.broadcast(floats, 1)",
    "calls that torch refuses": (
        "try:\n    dist.all_gather([torch.ones(3)] * 3, floats)\nexcept (RuntimeError, ValueError): pass\n"
        "dist.all_reduce(floats)\ndist.barrier()"
    ),
    "collectives that C++ starts": (
        "dist._broadcast_coalesced(dist.group.WORLD, [floats.clone(), ints.clone()], 1 << 20, 0)\n"
        "torch.ops._c10d_functional.all_reduce(floats, 'sum', '0') if rank == 0 else dist.all_reduce(floats)\n"
        "dist.all_reduce(ints)\ndist.barrier()"
    ),
    "pairs and threads": (
        "pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 1, 2])]\n"
        "def work(group, dtype):\n"
        "    for n in range(1, 40): dist.all_reduce(torch.ones(n, dtype=dtype), group=group)\n"
        "threads = [threading.Thread(target=work, args=(each, dtype)) for each, dtype in\n"
        "           zip(pairs, (torch.float32, torch.int64, torch.float64)) if rank in dist.get_process_group_ranks(each)]\n"
        "[each.start() for each in threads]\nwork(dist.group.WORLD, torch.float32)\n[each.join() for each in threads]\n"
        "pairs = threads = None"
    ),
    "many async": (
        "works = [dist.all_reduce(torch.ones(n % 7 + 1), async_op=True) for n in range(100)]\n"
        "[each.wait() for each in works]\nworks = each = None"
    ),
    "a fast loop": "for n in range(600): dist.all_reduce(floats)\ndist.barrier()",
    "functional": (
        "a = functional.all_reduce(torch.ones(3), 'sum', dist.group.WORLD)\n"
        "b = functional.all_gather_single(a, 0, dist.group.WORLD)\n"
        "c = functional.reduce_scatter_single(b, 'sum', 0, dist.group.WORLD)\n"
        "d = functional.all_to_all_single(c, [rank] * 3, [0, 1, 2], dist.group.WORLD)\n"
        "e = functional.broadcast(torch.ones(2), 1, dist.group.WORLD)\n"
        "f = functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], 'sum', dist.group.WORLD)\n"
        "[each.tolist() for each in (a, b, c, d, e, *f)]\na = b = c = d = e = f = each = None"
    ),
    "functional, by names that torch has replaced": (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    a = functional.all_gather_tensor(floats, 0, dist.group.WORLD)\n"
        "    b = functional.reduce_scatter_tensor(a, 'sum', 0, dist.group.WORLD).tolist()\n"
        "assert not [each for each in seen if 'monarch_kernel' in each.filename], [str(each) for each in seen]\n"
        "a = b = seen = each = None"
    ),
    "compiled on one rank": (
        "def step(x):\n"
        "    y = functional.all_reduce(x * 2, 'sum', dist.group.WORLD)\n    dist.all_reduce(x)\n    return x + y\n"
        "run = torch.compile(step, backend='eager') if rank == 0 else step\n"
        "for n in (3, 4): run(torch.ones(n)).tolist()\n"
        "dist.barrier()\nrun = None; torch._dynamo.reset()"
    ),
    "DDP": (
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for n in (2, 5):\n    model(torch.ones(n + rank, 4)).sum().backward(); dist.all_reduce(floats)\n"
        "model = None; gc.collect()"
    ),
    "FSDP2": (
        "from torch.distributed.fsdp import fully_shard\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 7))\n"
        "for each in (*model, model): fully_shard(each, mesh=mesh)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for n in (2, 5):\n    model(torch.ones(n + rank, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))\n"
        "model = optimizer = each = None; gc.collect()"
    ),
}


@pytest.mark.parametrize("case", LEGAL)
def test_legal_uses_are_not_refused(group: ProcMesh, case: str) -> None:
    group.run(LEGAL[case]).get(LONG_S)
    assert group.run("sums()").get(LONG_S).values() == ([3.0] * 3,) * 3


def test_the_memory_of_a_destroyed_group_is_freed_though_a_model_keeps_the_group(
    group: ProcMesh, store: GroupStore
) -> None:
    pages = "len({line.split()[-2] for line in open('/proc/self/maps') if '/calls-' in line})"
    group.run("import os; kept = dist.group.WORLD").get(LONG_S)
    before = group.run(f"gc.collect(); {pages}").get(LONG_S).values()
    store.form(group).get(LONG_S)
    assert group.run(f"gc.collect(); {pages}").get(LONG_S).values() == before
    group.run("kept = None").get(LONG_S)
