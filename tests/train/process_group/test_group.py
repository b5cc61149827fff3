"""The process group of a mesh: formed, used, broken, and formed again in the same processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from monarch_kernel.actor import Actor, Future, ProcMesh, SupervisionError, endpoint, this_host
from monarch_kernel.errors import Failure, RemoteError
from monarch_kernel.net.wire.messages import Payload
from monarch_kernel.notebook.view.stacks import stacks_text
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.host.connection_holder import HOLD_S
from monarch_kernel.runtime.host.processes import start_ticks
from monarch_kernel.runtime.rpc.answers import Value
from monarch_kernel.train.process_group.native_waits import NativeWaits
from monarch_kernel.train.process_group.sockets import copy_of, open_sockets
from monarch_kernel.train.process_group.worker import GroupStore, RankGroup, blame_deaths
from tests.support.ranks import wait_until_in_collective
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_for_files, wait_until

SUM = "x = torch.ones(3) * (rank + 1); dist.all_reduce(x); x.tolist()"
IMPORTS = "import os, pathlib, time, torch, torch.distributed as dist"
# Closes the connections to the store, whose other ends are in this process.
LEAVE = """
import gc
mesh = x = work = before = None
if dist.is_initialized():
    dist.destroy_process_group()
gc.collect()
"""


@pytest.fixture(scope="module")
def store() -> Iterator[GroupStore]:
    store = GroupStore()
    yield store
    store.close()


@pytest.fixture(scope="module")
def procs(session: None, store: GroupStore) -> Iterator[ProcMesh]:
    mesh = this_host().spawn_procs({"dp": 2, "tp": 2}, device="cpu")
    mesh.run(IMPORTS).get(LONG_S)
    store.form(mesh).get(LONG_S)  # once, so that the store exists before any test
    mesh.run(LEAVE).get(LONG_S)
    yield mesh
    mesh.stop(grace_s=0).get(LONG_S)


@pytest.fixture
def group(procs: ProcMesh, store: GroupStore) -> Iterator[ProcMesh]:
    """The four ranks with a fresh group, whatever the last test did to it."""
    store.form(procs).get(LONG_S)
    yield procs
    procs.run(LEAVE).get(LONG_S)


def others(store: GroupStore, size: int) -> ProcMesh:
    mesh = this_host().spawn_procs({"r": size}, device="cpu")
    mesh.run(IMPORTS).get(LONG_S)
    store.form(mesh).get(LONG_S)
    return mesh


# -- forming


def test_collectives_run_on_all_ranks(group: ProcMesh) -> None:
    future = group.run(SUM)
    assert future.get(LONG_S).values() == ([10.0] * 3,) * 4
    assert future.in_step


def test_scripts_for_torchrun_find_what_they_expect(group: ProcMesh) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]
    found = group.run(f"[int(os.environ[name]) for name in {names}]").get(LONG_S).values()
    assert found == tuple([rank, 4, rank, 4, 0, 1] for rank in range(4))
    assert (
        group.run("dist.is_torchelastic_launched(), dist.get_backend()").get(LONG_S).values() == ((True, "gloo"),) * 4
    )


def test_a_scripts_own_initialisation_finds_the_group(group: ProcMesh) -> None:
    code = "before = dist.group.WORLD\ndist.init_process_group('gloo')\nbefore is dist.group.WORLD"
    assert group.run(code).get(LONG_S).values() == (True,) * 4
    assert (
        group.run("dist.destroy_process_group(); dist.init_process_group('gloo')\n" + SUM).get(LONG_S).values()
        == ([10.0] * 3,) * 4
    )


SCRIPT = """
def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()
    dist.destroy_process_group()
for _ in range(20): main()
"""


@pytest.mark.slow
def test_a_script_that_trains_and_destroys_its_group_can_run_again(group: ProcMesh) -> None:
    """Torch deadlocks if a group is dropped while gloo's thread drops an operation of the backward pass."""
    group.run(SCRIPT).get(LONG_S)
    assert group.run("main(); dist.is_initialized()").get(LONG_S).values() == (False,) * 4


def test_the_device_mesh_has_the_axes_of_the_mesh(group: ProcMesh) -> None:
    code = "mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_local_rank('dp'), mesh.get_local_rank('tp')"
    assert group.run(code).get(LONG_S).values() == tuple(
        (("dp", "tp"), (2, 2), rank // 2, rank % 2) for rank in range(4)
    )
    code = "x = torch.tensor([float(rank)]); dist.all_reduce(x, group=mesh.get_group('tp')); x.item()"
    assert group.run(code).get(LONG_S).values() == (1.0, 1.0, 5.0, 5.0)


def test_forming_again_and_again_keeps_variables_and_descriptors(group: ProcMesh, store: GroupStore) -> None:
    count = "len(os.listdir('/proc/self/fd'))"
    group.run("kept = torch.arange(rank)").get(LONG_S)
    before = group.run(count).get(LONG_S).values()
    for _ in range(5):
        store.form(group).get(LONG_S)
        assert group.run(SUM).get(LONG_S).values()[0] == [10.0] * 3
    assert group.run("kept.tolist()").get(LONG_S).values() == tuple(list(range(rank)) for rank in range(4))
    after = group.run(count).get(LONG_S).values()
    assert all(b - a <= 4 for a, b in zip(before, after)), (before, after)


PAGES = """
import contextlib, gc
def pages():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "calls-" in os.readlink(f"/proc/self/fd/{name}")
    return found
before, mine = pages(), dist.new_group()
there = pages()
dist.destroy_process_group(mine)
del mine
gc.collect()
before, there, pages()
"""


def test_a_group_that_ends_after_it_was_destroyed_leaves_no_memory_of_calls(group: ProcMesh) -> None:
    for before, there, after in group.run(PAGES).get(LONG_S).values():
        assert there > before == after


@pytest.mark.parametrize("size", [1, 3, 2])
def test_meshes_of_other_sizes_have_separate_groups(group: ProcMesh, store: GroupStore, size: int) -> None:
    mesh = others(store, size)
    try:
        assert mesh.run(SUM).get(LONG_S).values() == ([size * (size + 1) / 2] * 3,) * size
        assert group.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4
    finally:
        mesh.stop(grace_s=0).get()


# -- its store


class Watcher(Actor):
    """Counts the requests that wait in the stores of its process, whatever it does."""

    @endpoint
    def n_waiting(self) -> int:
        from monarch_kernel.runtime.rpc.handles import PROCESS

        found: int = PROCESS.client.stores.n_waiting
        return found


def listening() -> set[tuple[str, int]]:
    """The TCP ports at which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


def test_nothing_listens_where_ranks_meet(procs: ProcMesh) -> None:
    """A process that reaches torch's own store, which has no authentication, can make ranks unpickle arbitrary data."""
    before = listening()
    store = GroupStore()
    mesh = others(store, 2)
    try:
        assert mesh.run(SUM).get(LONG_S).values() == ([3.0] * 3,) * 2
        assert listening() == before
        (port,) = set(mesh.run("int(os.environ['MASTER_PORT'])").get(LONG_S).values())
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        kinds = "{type(each).__name__ for each in __import__('gc').get_objects() if isinstance(each, dist.TCPStore)}"
        assert mesh.run(kinds).get(LONG_S).values() == (set(),) * 2
    finally:
        mesh.stop(grace_s=0).get()


def test_groups_of_all_kinds_meet_in_the_store(group: ProcMesh) -> None:
    code = """
from torch.distributed.device_mesh import init_device_mesh
square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
flat = square[("a", "b")]._flatten("ab")
some = dist.new_group([1, 3])
found = [None] * 4
dist.all_gather_object(found, rank)
sums = []
for each in (square.get_group("a"), square.get_group("b"), flat.get_group()):
    x = torch.tensor([float(rank)]); dist.all_reduce(x, group=each); sums.append(x.item())
if rank in (1, 3):
    x = torch.tensor([float(rank)]); dist.all_reduce(x, group=some); sums.append(x.item())
dist.monitored_barrier()
square = flat = some = each = None
sums, found
"""
    assert group.run(code).get(LONG_S).values() == (
        ([2.0, 1.0, 6.0], [0, 1, 2, 3]),
        ([4.0, 1.0, 6.0, 4.0], [0, 1, 2, 3]),
        ([2.0, 5.0, 6.0], [0, 1, 2, 3]),
        ([4.0, 5.0, 6.0, 4.0], [0, 1, 2, 3]),
    )


def test_the_store_behaves_like_torchs_own(group: ProcMesh) -> None:
    code = """
import datetime
store = dist.distributed_c10d._get_default_store()
if rank == 0: store.set("text", "hello"); store.set("bytes", b"\\0\\xff")
store.wait(["text", "bytes"])
total = store.add("number", 0)
dist.barrier()
store.add("number", rank); dist.barrier()
found = [store.get("text"), store.get("bytes"), store.get("number"), store.check(["text", "none"]), store.check(["text"])]
dist.barrier()
if rank == 1:
    found += [store.compare_set("text", "other", "new"), store.compare_set("text", "hello", "new"), store.get("text")]
    found += [store.delete_key("text"), store.delete_key("text"), store.check(["text"])]
    store.append("parts", "a"); store.append("parts", "b")
    store.multi_set(["x", "y"], ["1", "2"])
    found += [store.multi_get(["parts", "x", "y"]), store.num_keys() > 4, store.clone().get("x")]
dist.barrier()
try: store.wait(["none"], datetime.timedelta(seconds=0.05))
except dist.DistStoreError as error: found.append("none" in str(error))
try: store.add("bytes", 1)
except dist.DistStoreError as error: found.append("not a number" in str(error))
store = None
found
"""
    common = [b"hello", b"\0\xff", b"6", False, True]
    changed = [b"hello", b"new", b"new", True, False, False, [b"ab", b"1", b"2"], True, b"1"]
    assert group.run(code).get(LONG_S).values() == tuple(
        [*common, *(changed if rank == 1 else []), True, True] for rank in range(4)
    )


def test_the_rendezvous_of_the_environment_meets_in_the_store(group: ProcMesh) -> None:
    code = """
store, *place = next(dist.rendezvous("env://"))
store.set(f"here/{rank}", "")
store.wait([f"here/{each}" for each in range(4)])
store = None
place
"""
    assert group.run(code).get(LONG_S).values() == tuple([rank, 4] for rank in range(4))


@pytest.fixture
def waiting(
    procs: ProcMesh, store: GroupStore, by_value: None, tmp_path: Path
) -> Iterator[tuple[ProcMesh, Future[Any], Path]]:
    """A mesh whose rank 1 is busy until a file is there, while all others wait for it in the store."""
    mesh, go = others(store, 3), tmp_path / "go"
    watcher = mesh[[0]].spawn("watcher", Watcher)
    mesh[[1]].run(f"while not pathlib.Path(r'{go}').exists(): time.sleep(0.002)")
    forming = store.form(mesh)
    wait_until(lambda: sum(watcher.n_waiting.call().get(LONG_S).values()) == 2, "two ranks to wait")
    yield mesh, forming, go
    mesh.stop(grace_s=0).get()


def test_an_interrupt_ends_the_wait_for_a_rank_that_does_not_come(
    waiting: tuple[ProcMesh, Future[Any], Path], store: GroupStore, bar: Bar
) -> None:
    mesh, forming, go = waiting
    with bar.below(5, "the interrupt"):
        forming.interrupt()
        error = forming.exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert {report.kind for report in error.reports.values()} == {"interrupted"}
    go.touch()
    store.form(mesh).get(LONG_S)
    assert mesh.run(SUM).get(LONG_S).values() == ([6.0] * 3,) * 3


@pytest.mark.parametrize("dead", [0, 1])
def test_a_death_ends_the_wait_for_a_rank_that_does_not_come(
    waiting: tuple[ProcMesh, Future[Any], Path], dead: int, bar: Bar
) -> None:
    """Also the death of the rank that serves the keys."""
    mesh, forming, go = waiting
    with bar.below(5, "the end"):
        os.kill(mesh.view().ranks[dead].pid, signal.SIGKILL)
        go.touch()
        error = forming.exception(LONG_S)
    assert isinstance(error, SupervisionError)
    kinds = {point.rank: report.kind for point, report in error.reports.items()}
    assert kinds.pop(dead) == "lost"
    assert set(kinds.values()) == {"released"}


# -- broken groups


def test_an_interrupt_frees_ranks_that_wait_for_a_missing_one(group: ProcMesh, store: GroupStore, bar: Bar) -> None:
    group.run("kept = rank * 7").get(LONG_S)
    some = group[[0, 1, 3]]
    future = some.run(SUM)
    wait_until_in_collective(some)
    with bar.below(5, "the interrupt"):
        future.interrupt()
        error = future.exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert error.ranks == (0, 1, 3)
    assert {report.kind for report in error.reports.values()} == {"interrupted"}
    assert not future.in_step
    store.form(group).get(LONG_S)
    assert group.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4
    assert group.run("kept").get(LONG_S).values() == (0, 7, 14, 21)


GIVEN_UP = """
x = torch.ones(1)
if rank == 0:
    dist.irecv(x, 1, tag=1)  # the work is dropped, and with it the receive
    dist.send(x, 1, tag=2)
elif rank == 1:
    dist.recv(x, 0, tag=2)
    dist.send(x, 0, tag=1)
dist.barrier()
"""


def test_an_interrupt_frees_a_rank_that_has_a_message_for_a_receive_that_was_given_up(
    group: ProcMesh, store: GroupStore
) -> None:
    """Gloo does not find the end of such a connection, and its destructor waits for what waits for the peer."""
    future = group.run(GIVEN_UP)
    wait_until_in_collective(group)
    future.interrupt()
    assert isinstance(error := future.exception(LONG_S), RemoteError)
    assert {report.kind for report in error.reports.values()} == {"interrupted"}
    store.form(group).get(LONG_S)
    assert group.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4


def test_no_cell_receives_what_an_interrupted_cell_has_sent(group: ProcMesh, store: GroupStore, tmp_path: Path) -> None:
    """No rank waits in torch, so that nothing else tells of the messages."""
    sleeps = f"\nopen({str(tmp_path)!r} + f'/{{name}}{{rank}}', 'w').close()\ntime.sleep(300)"
    future = group.run(f"name = 'a'; w = dist.isend(torch.full((1,), -1.0), rank ^ 1){sleeps}")
    wait_for_files(tmp_path, *(f"a{rank}" for rank in range(4)))
    future.interrupt()
    assert isinstance(future.exception(LONG_S), RemoteError)
    assert not future.in_step
    store.form(group).get(LONG_S)
    code = (
        "x = torch.zeros(1); w = dist.isend(torch.ones(1) * rank, rank ^ 1); dist.recv(x, rank ^ 1); w.wait(); x.item()"
    )
    assert group.run(code).get(LONG_S).values() == (1.0, 0.0, 3.0, 2.0)
    future = group.run(f"name = 'b'; {SUM}{sleeps}")  # no message in this one
    wait_for_files(tmp_path, *(f"b{rank}" for rank in range(4)))
    future.interrupt()
    assert isinstance(future.exception(LONG_S), RemoteError)
    assert future.in_step


TO_THE_NEXT = "w = dist.isend(torch.ones(1) * {value}, (rank + 1) % 4); x = torch.zeros(1)"
FROM_ANY = "(dist.recv(x), x.item())"
FROM_THE_LAST = "(dist.recv(x, (rank - 1) % 4), x.item())"


@pytest.mark.parametrize("received", [FROM_ANY, FROM_THE_LAST])
def test_no_cell_receives_what_a_failed_cell_has_sent(group: ProcMesh, store: GroupStore, received: str) -> None:
    """No rank waits for its message to be received: in gloo, such a wait would last until the group ends."""
    sends = TO_THE_NEXT.format(value=-1)
    for unmatched in (
        f"{sends}\nif rank == 2: raise ValueError('first')\n{received}",
        "x = torch.zeros(1); w = dist.irecv(x, (rank + 1) % 4)\nif rank == 1: raise ValueError('second')",
    ):
        future = group.run(unmatched)
        assert isinstance(future.exception(LONG_S), RemoteError)
        assert not future.in_step
        store.form(group).get(LONG_S)
        future = group.run(f"{TO_THE_NEXT.format(value='rank')}\n{received}")
        assert future.get(LONG_S).values() == ((3, 3.0), (0, 0.0), (1, 1.0), (2, 2.0))
        assert future.in_step


def test_a_failed_cell_whose_messages_were_all_received_keeps_the_group(group: ProcMesh) -> None:
    fails = "if rank == 3: raise ValueError('after the messages')"
    pair = "dp = mesh.get_group('dp'); x = torch.zeros(1); other = dist.get_process_group_ranks(dp)[rank < 2]"
    for matched in (
        f"{TO_THE_NEXT.format(value='rank')}\n{FROM_ANY}\n{fails}",
        f"{TO_THE_NEXT.format(value='rank')}\n{FROM_THE_LAST}\n{fails}",
        f"{pair}\nw = dist.isend(torch.ones(2), other, dp, 7); dist.recv(torch.zeros(2), None, dp, 7); w.wait()\n{fails}",
        f"given = [None]; dist.send_object_list([1], 1) if rank == 0 else None\n"
        f"dist.recv_object_list(given, 0) if rank == 1 else None\n{fails}",
    ):
        future = group.run(matched)
        error = future.exception(LONG_S)
        assert isinstance(error, RemoteError)
        assert [(point.rank, report.etype) for point, report in error.reports.items()] == [(3, "ValueError")]
        assert future.in_step
    assert group.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4


def test_messages_of_some_ranks_only_keep_the_group(group: ProcMesh) -> None:
    """Torch counts them as collectives of these ranks."""
    for code in (
        "dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0) if rank == 1 else None",
        "works = [dist.isend(torch.ones(1), 3) if rank == 2 else dist.recv(torch.ones(1)) if rank == 3 else 0 for _ in 'abc']",
        "if rank < 2: dist.batch_isend_irecv([dist.P2POp((dist.irecv, dist.isend)[rank], torch.ones(1), 1 - rank)])[0].wait()",
        f"dist.monitored_barrier(wait_all_ranks=True); {SUM}",
    ):
        future = group.run(code)
        future.get(LONG_S)
        assert future.in_step, code
    assert group.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4


def test_a_message_of_a_cell_that_ended_well_waits_for_the_next_cell(group: ProcMesh) -> None:
    future = group.run(TO_THE_NEXT.format(value="rank"))
    future.get(LONG_S)
    assert future.in_step
    assert group.run(FROM_THE_LAST).get(LONG_S).values() == ((3, 3.0), (0, 0.0), (1, 1.0), (2, 2.0))


LARGE = {
    "messages": "works = [dist.isend(big, (rank + 1) % 4), dist.irecv(there, (rank - 1) % 4)]",
    "messages from any rank": "works = [dist.isend(big, (rank + 1) % 4), dist.irecv(there)]",
    "gathered": "works = [dist.all_gather(list(all), big, async_op=True)]",
}


def interrupt_large_messages(group: ProcMesh, store: GroupStore, start: str) -> None:
    future = group.run(
        f"big, there, *all = torch.ones(6, 8 << 20)\nwhile True:\n    {start}\n    for work in works: work.wait()\n"
    )
    wait_until_in_collective(group)
    future.interrupt()
    assert isinstance(error := future.exception(LONG_S), RemoteError)
    assert {report.kind for report in error.reports.values()} == {"interrupted"}
    store.form(group).get(LONG_S)
    assert group.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4


@pytest.mark.parametrize("start", LARGE.values(), ids=LARGE)
def test_an_interrupt_frees_ranks_in_the_middle_of_large_messages(
    group: ProcMesh, store: GroupStore, start: str
) -> None:
    """When a connection ends, gloo forgets the message that it is writing, and the one that it is reading."""
    interrupt_large_messages(group, store, start)


@pytest.mark.slow
@pytest.mark.parametrize("start", LARGE.values(), ids=LARGE)
def test_many_interrupts_free_ranks_in_the_middle_of_large_messages(
    group: ProcMesh, store: GroupStore, start: str
) -> None:
    for _ in range(8):
        interrupt_large_messages(group, store, start)


def test_an_error_on_one_rank_releases_those_that_wait_for_it(group: ProcMesh, store: GroupStore, bar: Bar) -> None:
    with bar.below(10, "the release"):
        error = group.run(f"if rank == 2: raise ValueError('no data')\n{SUM}").exception(LONG_S)
    assert isinstance(error, RemoteError)
    kinds = {point.rank: report.kind for point, report in error.reports.items()}
    assert kinds == {0: "released", 1: "released", 2: "exception", 3: "released"}
    assert error.rank == 2
    assert isinstance(error.exception, ValueError)
    store.form(group).get(LONG_S)
    assert group.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_rank_that_comes_late_to_a_collective_is_released_with_the_others(group: ProcMesh, late: int) -> None:
    """The release of the others closes its connections before it has waited long enough to be released itself."""
    code = f"if rank == 2: raise ValueError('no data')\nif rank == {late}: time.sleep(0.7)\n{SUM}"
    error = group.run(code).exception(LONG_S)
    assert isinstance(error, RemoteError)
    kinds = {point.rank: report.kind for point, report in error.reports.items()}
    assert kinds == {0: "released", 1: "released", 2: "exception", 3: "released"}


def test_ranks_that_compute_are_not_released(group: ProcMesh, store: GroupStore) -> None:
    code = "if rank == 0: raise ValueError('no data')\nend = time.monotonic() + 2.5\nwhile time.monotonic() < end: pass\n'done'"
    error = group.run(code).exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert error.ranks == (0,)
    assert set(error.results.values()) == {"done"}
    assert group.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4  # the group still works


def test_ranks_at_different_collectives_are_reported(group: ProcMesh) -> None:
    future = group.run("if rank != 1: work = dist.barrier(async_op=True)")
    future.get(LONG_S)
    assert not future.in_step


FAILS_TO_RECEIVE = """
import datetime
some, said = dist.new_group(), ""
try:
    if rank == 0: dist.irecv(torch.ones(1), 1, {group}).wait(datetime.timedelta(seconds=0.2))
    else: dist.recv(torch.ones(1), 0, {group})
except RuntimeError as error: said = str(error)
some = None
said
"""


def check_that_receives_have_failed(future: Future[Any]) -> None:
    """The first rank has not waited longer; gloo then closes its connections, and so ends the receives of the others."""
    first, *others = future.get(LONG_S).values()
    assert "Timed out" in first
    assert all(others)


def test_a_failed_receive_leaves_the_group_to_be_formed_again(group: ProcMesh, store: GroupStore) -> None:
    """Gloo closes all connections of the group, and counts a failed receive like any other."""
    future = group.run(FAILS_TO_RECEIVE.format(group="None"))
    check_that_receives_have_failed(future)
    assert not future.in_step
    store.form(group).get(LONG_S)
    exchange = "x = torch.zeros(1)\ndist.recv(x, rank - 1) if rank % 2 else dist.send(x + rank, rank + 1)\nx.item()"
    future = group.run(exchange)
    assert future.get(LONG_S).values() == (0.0, 0.0, 0.0, 2.0)
    assert future.in_step


def test_a_failure_in_a_group_of_the_user_leaves_the_default_group(group: ProcMesh) -> None:
    future = group.run(FAILS_TO_RECEIVE.format(group="some"))
    check_that_receives_have_failed(future)
    assert future.in_step
    assert group.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4


def test_an_init_that_fails_on_all_ranks_leaves_the_group_to_be_formed_again(group: ProcMesh) -> None:
    future = group.run("dist.destroy_process_group()\ndist.init_process_group('no such backend')")
    assert future.exception(LONG_S) is not None
    assert not future.in_step


def test_groups_that_only_some_ranks_make_do_not_block_later_ones(group: ProcMesh) -> None:
    """Torch names groups by their count, and the members of a group meet under its name."""
    group.run("kept = dist.new_group([0, 1])").get(LONG_S)
    group.run("if rank < 2: dist.new_group([0, 1])").get(LONG_S)
    group[[2, 3]].run("for _ in range(3): dist.new_group([2, 3])").get(LONG_S)
    counts = group.run("dist.distributed_c10d._world.group_count").get(LONG_S).values()
    assert len(set(counts)) == 1
    pair = "x = torch.ones(1); dist.all_reduce(x, group={}); x.item()"
    code = f"g = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]\n{pair.format('g')}"
    assert group.run(code).get(LONG_S).values() == (2.0,) * 4
    assert group[[0, 1]].run(pair.format("kept")).get(LONG_S).values() == (2.0,) * 2
    group.run("g = kept = None").get(LONG_S)


def test_ranks_that_make_groups_of_other_members_at_the_same_time_do_not_meet(group: ProcMesh) -> None:
    """Torch gives these groups the same name."""
    code = """
for _ in range(5):
    g = dist.new_group([0, 1] if rank < 2 else [2, 3])
    x = torch.ones(1) * rank; dist.all_reduce(x, group=g)
g = None
x.item()
"""
    assert group.run(code).get(LONG_S).values() == (1.0, 1.0, 5.0, 5.0)


def test_collectives_are_named_on_ranks_that_are_outside_of_some_group(group: ProcMesh) -> None:
    group.run("work = [dist.new_group([0, 1]), dist.new_group([2, 3])]").get(LONG_S)
    running = group.run(
        "if rank == 1: time.sleep(1000)\n"
        "dist.all_reduce(torch.ones(2, 3), group=mesh.get_group('tp') if rank == 3 else None)"
    )

    def waiting() -> dict[int, Doing]:
        found = {rank: each for rank, each in group.doing().get(LONG_S).items() if isinstance(each, Doing)}
        return found if len(found) == 4 and all(found[rank].collectives for rank in (0, 2, 3)) else {}

    doing = wait_until(waiting, "all ranks but one to wait in a collective")
    assert [each.unknown for each in doing.values()] == [""] * 4
    named = {
        rank: [(wait.operation, wait.group, wait.members, wait.shapes) for wait in each.collectives]
        for rank, each in doing.items()
    }
    of_all, of_axis = ("all_reduce", "", (0, 1, 2, 3), "2x3"), ("all_reduce", "tp", (2, 3), "2x3")
    assert named == {0: [of_all], 1: [], 2: [of_all], 3: [of_axis]}
    text = stacks_text(group.view(), doing)
    assert "waits in all_reduce #" in text
    assert "[1,3] have not started it" in text
    assert "of group tp [2-3]" in text
    assert "[2] has not started it" in text
    running.interrupt()
    assert running.exception(LONG_S) is not None


def test_a_brief_look_finds_a_wait_once_its_group_stands_still(group: ProcMesh) -> None:
    running = group.run("for _ in range(3): dist.all_reduce(torch.ones(3))\nif rank: dist.all_reduce(torch.ones(2, 3))")

    def found() -> bool:
        answers = group.doing(brief=True).get(LONG_S)
        waits = {
            rank: [call.shapes for call in each.collectives]
            for rank, each in answers.items()
            if isinstance(each, Doing)
        }
        return waits == {0: [], 1: ["2x3"], 2: ["2x3"], 3: ["2x3"]}

    wait_until(found, "a brief look to find the wait")
    running.interrupt()
    assert running.exception(LONG_S) is not None


def test_a_recorder_that_cannot_be_read_is_reported_and_breaks_nothing(group: ProcMesh) -> None:
    group.run(
        "import pickle\nfrom torch._C import _distributed_c10d as c10d\n"
        "read, c10d._dump_fr_trace = c10d._dump_fr_trace, lambda **options: pickle.dumps({'entries': [{}]})"
    ).get(LONG_S)
    try:
        doing = group.doing().get(LONG_S)
        assert [isinstance(each, Doing) and each.unknown for each in doing.values()] == [
            "KeyError: 'time_created_ns'"
        ] * 4
        running = group.run("time.sleep(1000)")
        wait_until(
            lambda: all(isinstance(each, Doing) and each.activities for each in group.doing().get(LONG_S).values()),
            "the cell to run",
        )
        text = stacks_text(group.view(), group.doing().get(LONG_S))
        assert "    its collectives are not known: KeyError: 'time_created_ns'" in text.splitlines()
        running.interrupt()
        assert running.exception(LONG_S) is not None
    finally:
        group.run("c10d._dump_fr_trace = read").get(LONG_S)
    assert group.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4


def test_the_death_of_a_rank_in_a_collective_frees_the_others(store: GroupStore, procs: ProcMesh, bar: Bar) -> None:
    mesh = others(store, 3)
    try:
        with bar.below(10, "the release"):
            error = mesh.run(f"if rank == 1: os.kill(os.getpid(), {int(signal.SIGKILL)})\n{SUM}").exception(LONG_S)
        assert isinstance(error, SupervisionError)
        assert error.rank == 1
        assert "killed by SIGKILL" in str(error)
        assert mesh[[0, 2]].run("rank").get(LONG_S).values() == (0, 2)  # the processes of the survivors stay
        with pytest.raises(SupervisionError, match="forming the process group of"):
            store.form(mesh).get(LONG_S)
    finally:
        mesh.stop(grace_s=0).get()


@pytest.mark.parametrize(
    "operation", ["dist.send(big, 1) if rank == 0 else dist.recv(big, 0)", "dist.broadcast(big, 0)"]
)
def test_the_death_of_a_rank_frees_one_that_sends_it_a_large_tensor(
    store: GroupStore, procs: ProcMesh, operation: str
) -> None:
    """The rank dies when the first bytes have arrived. Gloo forgets the message of which it has written a part."""
    mesh = others(store, 2)
    die = (
        "import signal, threading\nbig = torch.full((32 << 20,), float(rank == 0))\ndef die():\n"
        "    while big[0] == 0: pass\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 1: threading.Thread(target=die, daemon=True).start()\n"
    )
    try:
        error = mesh.run(f"{die}{operation}\ndist.barrier()").exception(LONG_S)
        assert isinstance(error, SupervisionError)
        assert error.rank == 1
        assert mesh[[0]].run("rank").get(LONG_S).values() == (0,)
    finally:
        mesh.stop(grace_s=0).get()


CUT = """
import signal, threading
from monarch_kernel.train.process_group.sockets import copy_of, has_closed, open_sockets, unsent_and_received
big, there = torch.full((32 << 20,), float(rank == 0)), None
if {operation!r}.endswith(("(model)", "loss.backward()")):
    model = torch.nn.Linear(8192, 4096, bias=False)
if {operation!r} == "loss.backward()":
    model = torch.nn.parallel.DistributedDataParallel(model)
    loss = model(torch.ones(1, 8192)).sum()
if "functional_collectives" in {operation!r}:  # its first use runs Python code of torch for a while before it waits
    torch.distributed._functional_collectives.broadcast(torch.ones(1), 0, dist.group.WORLD) + 0
if "its own store" in {operation!r}:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore({path!r}, 2), rank=rank, world_size=2)
dist.barrier()
opened = open_sockets()
connections = [copy for each in opened if (copy := copy_of(each)) is not None]
def received(): return max(unsent_and_received(each)[1] - old for each, old in zip(connections, before))
before = [unsent_and_received(each)[1] for each in connections]
def kill():
    while received() < 1 << 20: pass
    os.kill({pid}, signal.SIGKILL)
    for each in connections: each.close()
if rank == 1: threading.Thread(target=kill).start()
{operation}
there = True
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation",
    [
        "dist.send(big, 1) if rank == 0 else dist.recv(big, 0)",
        "dist.send(big, 1) if rank == 0 else dist.recv(big)",
        "work = dist.isend(big, 1) if rank == 0 else dist.irecv(big, 0)\n"
        "while rank == 1 and not any(map(has_closed, opened)): pass\nwork.wait()",
        "dist.broadcast(big, 0)",
        "dist.broadcast(big, 0)  # in a group with its own store",
        "dist.all_reduce(big)",
        "torch.distributed.nn.functional.all_reduce(big)",
        "c10d = torch.ops._c10d_functional\nc10d.wait_tensor(c10d.broadcast(big, 0, dist.group.WORLD.group_name))",
        "torch.distributed._functional_collectives.broadcast(big, 0, dist.group.WORLD) + 0",
        "torch.nn.parallel.DistributedDataParallel(model)",
        "loss.backward()",
    ],
)
def test_the_death_of_a_rank_frees_one_that_has_received_a_part_of_its_message(
    store: GroupStore, procs: ProcMesh, operation: str, tmp_path: Path
) -> None:
    """Gloo forgets the message of which it has read a part. What completes it is no result."""
    mesh = others(store, 2)
    held = "len(os.listdir('/proc/self/fd'))"
    try:
        mesh.run(f"{SUM}; import torch.distributed.nn.functional, torch.distributed._functional_collectives").get(
            LONG_S
        )
        before = mesh[[1]].run(held).get(LONG_S).values()
        code = CUT.format(operation=operation, pid=mesh.view().ranks[0].pid, path=str(tmp_path / "store"))
        error = mesh.run(code).exception(LONG_S)
        assert isinstance(error, SupervisionError)
        kinds = {point.rank: report.kind for point, report in error.reports.items()}
        assert kinds == {0: "lost", 1: "released"} or (kinds[1] == "exception" and "irecv" in operation)
        assert mesh[[1]].run("there").get(LONG_S).values() == (None,)
        mesh.heal().get(LONG_S)
        mesh.run(f"{IMPORTS}, gc\nmodel = loss = work = None; gc.collect()").get(LONG_S)
        store.form(mesh).get(LONG_S)
        assert mesh.run(SUM).get(LONG_S).values() == ([3.0] * 3,) * 2
        assert mesh[[1]].run(held).get(LONG_S).values() == before
    finally:
        mesh.stop(grace_s=0).get()


@pytest.mark.parametrize(
    "blocked", [SUM, "dist.barrier()", "dist.broadcast(torch.ones(3), 1)", "dist.recv(torch.ones(1))"]
)
def test_the_death_of_a_rank_also_frees_ranks_that_wait_for_a_freed_rank(
    procs: ProcMesh, store: GroupStore, blocked: str, bar: Bar
) -> None:
    """In some gloo collectives, ranks have no connection to the dead rank, and would wait for its neighbours forever."""
    mesh = others(store, 4)
    try:
        future = mesh.run(f"if rank == 1: time.sleep(600)\n{blocked}\n{SUM}")
        wait_until_in_collective(mesh[[0, 2, 3]])
        with bar.below(0.8, "the release"):  # less than the timeout for joining
            os.kill(mesh.view().ranks[1].pid, signal.SIGKILL)
            error = future.exception(LONG_S)
        assert isinstance(error, SupervisionError)
        assert {point.rank: report.kind for point, report in error.reports.items()} == dict.fromkeys(
            (0, 2, 3), "released"
        ) | {1: "lost"}
    finally:
        mesh.stop(grace_s=0).get()


# Otherwise the release of rank 1 also frees each rank that has waited for a second, for whatever rank that is.
NOT_BY_TIME = "from monarch_kernel.runtime.worker import collective_aborts; collective_aborts.RELEASE_AFTER_S = 600.0"


@pytest.mark.parametrize(
    ("theirs", "values"),
    [
        ("dist.all_reduce(x, group=tp)", {2: 5.0, 3: 5.0}),
        ("dist.recv(x, group=tp) if rank % 2 else dist.send(x, rank + 1, tp)", {2: 2.0, 3: 2.0}),
    ],
    ids=["all_reduce", "receive from any rank"],
)
def test_the_death_of_a_rank_does_not_affect_groups_that_it_was_not_in(
    procs: ProcMesh, store: GroupStore, theirs: str, values: dict[int, float]
) -> None:
    mesh = this_host().spawn_procs({"dp": 2, "tp": 2}, device="cpu")
    try:
        mesh.run(f"{IMPORTS}\n{NOT_BY_TIME}").get(LONG_S)
        store.form(mesh).get(LONG_S)
        later = (
            "import signal\nx, tp = torch.ones(1) * rank, mesh.get_group('tp')\n"
            "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\nif rank == 2: time.sleep(1)\n"
        )
        error = mesh.run(f"{later}{theirs}\nx.item()").exception(LONG_S)
        assert isinstance(error, SupervisionError)
        assert {point.rank: value for point, value in error.results.items()} == values
        assert {point.rank: report.kind for point, report in error.reports.items()} == {0: "lost", 1: "released"}
    finally:
        mesh.stop(grace_s=0).get()


SPY = """
from torch.distributed import distributed_c10d as helpers
limits_s, original = [], helpers.ProcessGroupGloo
class Spy(original):
    def __init__(self, *args, timeout, **kwargs):
        limits_s.append(timeout.total_seconds())
        super().__init__(*args, timeout=timeout, **kwargs)
helpers.ProcessGroupGloo = Spy
"""


def test_gloo_waits_for_messages_as_long_as_the_group(group: ProcMesh, store: GroupStore) -> None:
    """Gloo fixes the timeout of sends, receives and monitored barriers when it connects the ranks."""
    group.run(SPY).get(LONG_S)
    try:
        store.form(group).get(LONG_S)
        assert group.run("set(limits_s)").get(LONG_S).values() == ({1800.0},) * 4
        own = "import datetime; own = dist.new_group(timeout=datetime.timedelta(seconds=77)); own = None; limits_s[-1]"
        assert group.run(own).get(LONG_S).values() == (77.0,) * 4
    finally:
        group.run("helpers.ProcessGroupGloo = original").get(LONG_S)


@pytest.mark.slow
def test_a_peer_that_computes_for_8_s_is_waited_for(group: ProcMesh) -> None:
    """Each of the other ranks waits in another kind of receive, and then all of them in a barrier."""
    wait = """
import time
x, said, sub = torch.zeros(2), [None], dist.new_group([0, 3])
if rank == 0:
    time.sleep(8)
    dist.send(torch.ones(2), 1); dist.send_object_list(["a"], 2); dist.send(torch.ones(2), 3, sub)
if rank == 1: dist.recv(x, 0)
if rank == 2: dist.recv_object_list(said, 0)
if rank == 3: dist.recv(x, 0, sub)
rank != 0 or time.sleep(8)
dist.monitored_barrier()
sub = None
x.tolist(), said
"""
    found = group.run(wait).get(LONG_S).values()
    assert found[1:] == (([1.0, 1.0], [None]), ([0.0, 0.0], ["a"]), ([1.0, 1.0], [None]))


def test_errors_of_torch_are_consequences_of_a_death_while_the_group_is_formed() -> None:
    dead = Failure("lost", "RankDied", "killed by SIGKILL")
    refused = Failure("exception", "RuntimeError", "Gloo connectFullMesh failed: Connection refused")
    other = Failure("exception", "KeyError", "'x'")
    formed = Value(Payload(), (), {})
    assert list(blame_deaths([refused, other, formed])) == [refused, other, formed]
    assert list(blame_deaths([refused, dead, other, formed])) == [
        replace(refused, kind="released"),
        dead,
        other,
        formed,
    ]


DIE_IN_THE_WINDOW = """
import gc, signal
from monarch_kernel.runtime.worker.store_client import StoreClient
client = next(each for each in gc.get_objects() if type(each) is StoreClient)
def ask(operation, keys=(), *args, **kwargs):
    found = StoreClient.ask(client, operation, keys, *args, **kwargs)
    if operation == "get" and "cpu" in keys[0]: os.kill(os.getpid(), signal.SIGKILL)
    return found
if rank == {dead}: client.ask = ask
"""


@pytest.mark.parametrize("dead", [1, 3])
def test_a_death_between_the_addresses_and_the_connections_frees_ranks_that_wait_for_a_connection(
    procs: ProcMesh, store: GroupStore, dead: int, bar: Bar
) -> None:
    mesh = others(store, 4)
    try:
        mesh.run(DIE_IN_THE_WINDOW.format(dead=dead)).get(LONG_S)
        with bar.below(5, "the end"):
            error = store.form(mesh).exception(LONG_S)
        assert isinstance(error, SupervisionError)
        kinds = {point.rank: report.kind for point, report in error.reports.items()}
        assert kinds.pop(dead) == "lost"
        assert set(kinds.values()) <= {"released"}
    finally:
        mesh.stop(grace_s=0).get()


def test_sockets_of_the_user_are_not_taken_for_those_of_an_old_group(group: ProcMesh, store: GroupStore) -> None:
    """The system reuses descriptor numbers at once."""
    pair = "dist.destroy_process_group(); mesh = None; gc.collect(); pairs = [socket.socketpair() for _ in range(40)]"
    group.run(f"import gc, socket\n{pair}").get(LONG_S)
    for _ in range(2):  # the second time the first group is aborted
        store.form(group).get(LONG_S)
    use = "[(a.send(b'x'), b.recv(1)) for a, b in pairs] == [(1, b'x')] * 40"
    assert set(group.run(use).get(LONG_S).values()) == {True}
    group.run("[end.close() for pair in pairs for end in pair]; pairs = None").get(LONG_S)


def test_a_reused_descriptor_is_not_taken_for_the_old_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        former = socket.create_connection(address)
        number = former.fileno()
        (seen,) = (each for each in open_sockets() if each.fd == number)
        copy = copy_of(seen)
        assert copy is not None
        copy.close()
        with socket.create_connection(address) as other:
            former.close()
            os.dup2(other.fileno(), number)
            assert copy_of(seen) is None
            os.close(number)


ABORT_IN_THE_MIDST = """
import gc, random, threading
from monarch_kernel.train.process_group.worker import RankGroup
ours = next(each for each in gc.get_objects() if type(each) is RankGroup)
threading.Timer(0.02 + 0.004 * random.random(), ours.abort).start()
x = torch.ones({n})
try:
    while True: dist.all_reduce(x)
except RuntimeError as error:
    said = str(error)
said
"""


@pytest.mark.parametrize(
    ("n", "times"),
    [
        (64, 5),
        (4_000_000, 2),
        pytest.param(64, 30, marks=pytest.mark.slow),
        pytest.param(4_000_000, 10, marks=pytest.mark.slow),
    ],
)
def test_an_abort_during_collectives_frees_all_ranks(group: ProcMesh, store: GroupStore, n: int, times: int) -> None:
    """Gloo drops a send when its write fails, and a rank that waits for it would wait forever."""
    for _ in range(times):
        said = group.run(ABORT_IN_THE_MIDST.format(n=n)).get(LONG_S)
        assert all(each.endswith("its process group has ended") for each in said.values()), said
        store.form(group).get(LONG_S)


WAIT = """
said = ''
try:
    dist.all_reduce(torch.ones(3), group=globals().get('own'))
except RuntimeError as error:
    said = str(error)
said
"""


# The rank meets the others in its group without this limit.
WAIT_BRIEFLY = """
import datetime
options, said = dist.AllreduceOptions(), ''
options.timeout = datetime.timedelta(seconds=0.2)
try:
    own.allreduce([torch.ones(3)], options).wait()
except RuntimeError as error:
    said = str(error)
said
"""


@pytest.fixture
def pair(procs: ProcMesh, store: GroupStore) -> Iterator[ProcMesh]:
    mesh = others(store, 2)
    yield mesh
    mesh.stop(grace_s=0).get()


def test_a_waiting_rank_notices_a_rank_that_leaves_the_group(pair: ProcMesh, bar: Bar) -> None:
    """This is like in any script: the agent keeps connections open only when a rank dies."""
    waits = pair[[0]].run(WAIT)
    wait_until_in_collective(pair[[0]])
    with bar.below(5, "the error"):
        pair[[1]].run(LEAVE).get(LONG_S)
        assert "peer" in waits.get(LONG_S).values()[0]


def test_a_waiting_rank_notices_a_rank_whose_collective_failed(pair: ProcMesh, bar: Bar) -> None:
    """Gloo closes the connections of a group after a failure."""
    pair.run("own = dist.new_group()").get(LONG_S)
    assert "imed out" in pair[[1]].run(WAIT_BRIEFLY).get(LONG_S).values()[0]
    with bar.below(5, "the error"):
        assert "peer" in pair[[0]].run(WAIT).get(LONG_S).values()[0]


class Reducer(Actor):
    @endpoint
    def reduce(self, ready: str) -> None:
        import torch
        import torch.distributed as dist

        Path(ready, str(dist.get_rank())).touch()
        dist.all_reduce(torch.ones(3))


class Boss(Actor):
    @endpoint
    def ask(self, reducers: Any, ready: str) -> None:
        reducers.reduce.call(ready).get()


def test_a_death_in_a_call_from_another_rank_frees_all_before_their_connections_close(
    procs: ProcMesh, by_value: None, store: GroupStore, tmp_path: Path, bar: Bar
) -> None:
    mesh, bosses = others(store, 3), this_host().spawn_procs({"r": 1}, device="cpu")
    try:
        reducers = mesh.spawn("reducers", Reducer)
        future = bosses.spawn("boss", Boss).ask.call_one(reducers.slice(r=slice(0, 2)), str(tmp_path))
        wait_for_files(tmp_path, "0", "1")
        with bar.below(HOLD_S * 0.9, "the release"):
            os.kill(mesh.view().ranks[1].pid, signal.SIGKILL)
            assert future.exception(LONG_S) is not None
    finally:
        bosses.stop(grace_s=0).get()
        mesh.stop(grace_s=0).get()


UNTIL_IT_FAILS = """
pathlib.Path(r'{ready}', str(rank)).touch()
x, part = torch.ones(64), torch.ones(16)
try:
    while True:
        dist.all_gather_into_tensor(x, part)
        dist.reduce_scatter_tensor(part, x)
        dist.all_reduce(x)
except RuntimeError as error:
    said = str(error)
said
"""


@pytest.mark.parametrize("times", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_a_death_during_collectives_frees_all_ranks(
    procs: ProcMesh, store: GroupStore, tmp_path: Path, times: int
) -> None:
    """Messages that ranks still send to the dead rank do no harm: the agent keeps its connections open.

    The test stops the other ranks for a moment, so that they have something to answer when the rank dies. The survivors form
    the next group with a new rank.
    """
    chance, mesh = random.Random(3), others(store, 4)

    def kill_one(attempt: int) -> int:
        ready = tmp_path / str(attempt)
        ready.mkdir()
        future = mesh.run(UNTIL_IT_FAILS.format(ready=ready))
        wait_for_files(ready, *"0123")
        time.sleep(chance.uniform(0.02, 0.08))  # somewhere in a collective
        dead = chance.randrange(4)
        pids = [each.pid for each in mesh.view().ranks]
        living = [pid for rank, pid in enumerate(pids) if rank != dead]
        for pid in living:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.02)
        os.kill(pids[dead], signal.SIGKILL)
        wait_until(lambda: not start_ticks(pids[dead]), "the rank to be dead")
        for pid in living:
            os.kill(pid, signal.SIGCONT)
        error = future.exception(LONG_S)
        assert isinstance(error, SupervisionError), error
        return dead

    try:
        for attempt in range(times):
            dead = kill_one(attempt)
            mesh.heal().get(LONG_S)
            mesh[[dead]].run(IMPORTS).get(LONG_S)
            store.form(mesh).get(LONG_S)
        assert mesh.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4
    finally:
        mesh.stop(grace_s=0).get()


def test_forming_the_group_is_no_wait_of_another_thread() -> None:
    """An interrupted call of an actor that goes on must not end what a cell forms meanwhile."""
    group = RankGroup.__new__(RankGroup)
    vars(group).update(_sockets_before=set(), _formed_ns=0, _forms_on=7)
    vars(group).update(_calls=SimpleNamespace(oldest_s=lambda others: 0.0))
    assert group.pending_s() > 0
    assert group.pending_s({5}) > 0
    assert group.pending_s({5, 7}) == 0


def test_an_abort_while_forming_ends_and_two_concurrent_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr("monarch_kernel.train.process_group.worker._dist", lambda: sys.modules["torch.distributed"])
    group = RankGroup.__new__(RankGroup)
    vars(group).update(_spec=SimpleNamespace(device="cpu", world_size=3), _lock=threading.Lock(), _closing=[])
    vars(group).update(_client=SimpleNamespace(end=lambda dead: None), _waits=NativeWaits(), has_aborted=False)
    vars(group).update(_sockets={(0, 1): set(), (0, 2): set()}, _sockets_before=set())
    vars(group).update(_meter=SimpleNamespace(aborted=lambda read, dead: None))
    vars(group).update(_check=SimpleNamespace(withdraw=lambda: None))
    others = [threading.Thread(target=group._end_forming), threading.Thread(target=group.abort)]

    def sockets() -> set[Any]:
        """Let the other threads run while this one lists sockets."""
        while others:
            running.append(others.pop())
            running[-1].start()
            running[-1].join(0.05)  # it has ended, or waits
        return set()

    running: list[threading.Thread] = []
    errors: list[Any] = []
    monkeypatch.setattr("monarch_kernel.train.process_group.worker.open_sockets", sockets)
    monkeypatch.setattr(threading, "excepthook", errors.append)
    group.abort(1)
    for thread in running:
        thread.join()
    assert not errors
    assert (group._sockets, group._sockets_before) == ({}, None)
