"""Another user of the machine connects to the ports of gloo, while a process group is formed and later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from monarch_kernel.actor import ProcMesh, SupervisionError, this_host
from monarch_kernel.errors import RemoteError
from monarch_kernel.train.process_group.worker import GroupStore
from tests.support.ranks import Ranks
from tests.support.stranger import run_as_nobody, started_as_nobody
from tests.support.waiting import LONG_S, wait_for_files, wait_until

SUM = "x = torch.ones(3) * (rank + 1); dist.all_reduce(x); x.tolist()"

# Connects in place of each of four ranks, and stays.
TAKE_PLACES = """
import socket, struct, sys
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(4)]
for number, connection in enumerate(connections):
    connection.sendall(struct.pack("=q", number))
print("connected", flush=True)
sys.stdin.read()
"""

# Connects, and sends nothing, a part of a number, and what other servers expect.
LOOK_AROUND = """
import socket, sys
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(4)]
for text, connection in zip((b"", b"abc", b"GET / HTTP/1.1\\r\\n\\r\\n", b"\\xff" + bytes(8) + b"\\x7f"), connections):
    connection.sendall(text)
print("connected", flush=True)
print([connection.recv(1) for connection in connections], flush=True)
sys.stdin.read()
"""

# Ports stay open while ranks wait, as where the operating system has no filters for sockets.
NO_FILTER = """
import contextlib
from monarch_kernel.train.process_group import strangers
closed_ports, strangers.closed_ports = strangers.closed_ports, lambda *_: contextlib.nullcontext()
"""
# Makes a file once the port is closed.
NOTES = """
import contextlib, pathlib
from monarch_kernel.train.process_group import strangers
closed_ports = strangers.closed_ports
@contextlib.contextmanager
def noting(*of):
    with closed_ports(*of):
        pathlib.Path({path!r}).touch()
        yield
strangers.closed_ports = noting
"""
AGAIN = "strangers.closed_ports = closed_ports"

# Opens as many connections as it can to each port.
FLOOD = """
import select, socket, sys
n = 0
for port in map(int, sys.argv[1:]):
    attempts = [socket.socket() for _ in range(200)]
    for each in attempts:
        each.setblocking(False)
        each.connect_ex(("127.0.0.1", port))
    poll = select.poll()
    for each in attempts:
        poll.register(each, select.POLLOUT)
    n += sum(not event & select.POLLERR for _, event in poll.poll(300))
print(n)
"""


@pytest.fixture(scope="module")
def ranks(session: None) -> Iterator[Ranks]:
    ranks = Ranks(2, "import gc, os, socket, torch, torch.distributed as dist")
    yield ranks
    ranks.close()


@pytest.fixture
def mesh(ranks: Ranks) -> ProcMesh:
    """Two ranks with a fresh group."""
    ranks.store.form(ranks.mesh).get(LONG_S)
    return ranks.mesh


def ports(mesh: ProcMesh, rank: int) -> set[int]:
    """The ports at which a rank listens."""
    pid = mesh.view().ranks[rank].pid
    connections = psutil.Process(pid).net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def test_nobody_reaches_a_rank_while_it_waits_for_late_ranks(mesh: ProcMesh, tmp_path: Path) -> None:
    """It can neither fill the descriptors of the rank nor keep the group from being formed."""
    mesh[[0]].run(NOTES.format(path=str(tmp_path / "closed"))).get(LONG_S)
    before = ports(mesh, 0)
    first = mesh[[0]].run("group = dist.new_group([0, 1])")
    wait_for_files(tmp_path, "closed")
    (port,) = ports(mesh, 0) - before
    with started_as_nobody(FLOOD + "sys.stdout.flush(); sys.stdin.read()", port) as program:
        assert program.stdout
        assert program.stdout.readline() == "0\n"
        mesh[[1]].run("group = dist.new_group([0, 1])").get(LONG_S)
        first.get(LONG_S)
    mesh[[0]].run(AGAIN).get(LONG_S)
    code = "x = torch.ones(1); dist.all_reduce(x, group=group); dist.destroy_process_group(group); del group; x.item()"
    assert mesh.run(code).get(LONG_S).values() == (2.0, 2.0)


def test_a_group_in_which_another_user_may_have_taken_a_place_is_not_used(ranks: Ranks, mesh: ProcMesh) -> None:
    mesh.run(NO_FILTER).get(LONG_S)
    before = ports(mesh, 0)
    first = mesh[[0]].run("group = dist.new_group([0, 1])")
    wait_until(lambda: ports(mesh, 0) - before, "gloo to listen")
    (port,) = ports(mesh, 0) - before
    with started_as_nobody(TAKE_PLACES, port) as program:
        assert program.stdout
        assert program.stdout.readline() == "connected\n"
        second = mesh[[1]].run("group = dist.new_group([0, 1])")
        for future in (first, second):
            error = future.exception(LONG_S)
            assert isinstance(error, RemoteError)
            (report,) = error.reports.values()
            assert report.etype == "ConnectionError"
            assert "rank 0 on" in report.message
            assert "from 127.0.0.1 " in report.message
            assert "(user nobody)" in report.message
    assert mesh.run("'group' in globals()").get(LONG_S).values() == (False, False)
    ranks.store.form(mesh).get(LONG_S)
    mesh.run(AGAIN).get(LONG_S)
    assert mesh.run(SUM).get(LONG_S).values() == ([3.0] * 3,) * 2


def test_a_process_that_takes_no_place_is_disconnected_and_the_group_is_used(mesh: ProcMesh) -> None:
    mesh.run(NO_FILTER).get(LONG_S)
    before = ports(mesh, 0)
    first = mesh[[0]].run("group = dist.new_group([0, 1])")
    wait_until(lambda: ports(mesh, 0) - before, "gloo to listen")
    (port,) = ports(mesh, 0) - before
    with started_as_nobody(LOOK_AROUND, port) as program:
        assert program.stdout
        assert program.stdout.readline() == "connected\n"
        mesh[[1]].run("group = dist.new_group([0, 1])").get(LONG_S)
        first.get(LONG_S)
        assert program.stdout.readline() == "[b'', b'', b'', b'']\n"
    mesh.run(AGAIN).get(LONG_S)
    code = "x = torch.ones(1); dist.all_reduce(x, group=group); dist.destroy_process_group(group); del group; x.item()"
    assert mesh.run(code).get(LONG_S).values() == (2.0, 2.0)


def test_a_rank_without_descriptors_says_that_something_opened_many_connections(session: None) -> None:
    mesh = this_host().spawn_procs({"r": 2}, name="few", device="cpu")
    store = GroupStore()
    try:
        mesh.run("import os, resource, torch.distributed as dist").get(LONG_S)
        store.form(mesh).get(LONG_S)
        mesh.run(NO_FILTER).get(LONG_S)
        before = ports(mesh, 0)
        limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 40,) * 2)"
        alone = mesh[[0]].run(f"{limit}; dist.new_group([0, 1])")
        wait_until(lambda: ports(mesh, 0) - before, "gloo to listen")
        with started_as_nobody(FLOOD + "sys.stdin.read()", *(ports(mesh, 0) - before)):
            error = alone.exception(LONG_S)
        assert isinstance(error, SupervisionError)
        assert "no file descriptor left" in str(error)
    finally:
        mesh.stop(grace_s=0).get(LONG_S)
        store.close()


def test_nobody_reaches_a_rank_once_its_groups_are_formed(mesh: ProcMesh) -> None:
    mesh.run("group = dist.new_group([0, 1])").get(LONG_S)
    count = "len(os.listdir('/proc/self/fd'))"
    before = mesh.run(count).get(LONG_S).values()
    known = ports(mesh, 0) | ports(mesh, 1)
    assert len(known) >= 4  # the default group and the new one, of each rank
    assert run_as_nobody(FLOOD, *known) == "0\n"
    assert mesh.run(count).get(LONG_S).values() == before
    code = (
        "x = torch.ones(1); dist.all_reduce(x, group=group); dist.destroy_process_group(group); group = None; x.item()"
    )
    assert mesh.run(code).get(LONG_S).values() == (2.0, 2.0)
    assert mesh.run(SUM).get(LONG_S).values() == ([3.0] * 3,) * 2


def test_nobody_reaches_a_rank_by_a_group_of_one_rank(mesh: ProcMesh) -> None:
    """Such as that of a dimension of size 1 of a DeviceMesh: gloo listens for it, too, though nothing ever connects."""
    before = ports(mesh, 0) | ports(mesh, 1)
    mesh.run("groups = [dist.new_group([each]) for each in (0, 1)]").get(LONG_S)
    known = (ports(mesh, 0) | ports(mesh, 1)) - before
    assert len(known) == 2
    assert run_as_nobody(FLOOD, *known) == "0\n"
    code = (
        "x = torch.ones(1); dist.all_reduce(x, group=groups[rank]); dist.destroy_process_group(groups[rank]); x.item()"
    )
    assert mesh.run(code).get(LONG_S).values() == (1.0, 1.0)
    mesh.run("del groups").get(LONG_S)


def test_nobody_reaches_a_rank_by_a_group_whose_calls_torch_compares(mesh: ProcMesh) -> None:
    """``TORCH_DISTRIBUTED_DEBUG=DETAIL``: such a group has a second one of gloo, and a wrapper around both."""
    before = ports(mesh, 0) | ports(mesh, 1)
    mesh.run("dist.set_debug_level(dist.DebugLevel.DETAIL); group = dist.new_group([0, 1])").get(LONG_S)
    mesh.run("dist.set_debug_level(dist.DebugLevel.OFF)").get(LONG_S)
    known = (ports(mesh, 0) | ports(mesh, 1)) - before
    assert len(known) == 4
    assert run_as_nobody(FLOOD, *known) == "0\n"
    code = (
        "x = torch.ones(1); dist.all_reduce(x, group=group); dist.destroy_process_group(group); group = None; x.item()"
    )
    assert mesh.run(code).get(LONG_S).values() == (2.0, 2.0)


def test_the_ports_of_groups_that_programs_make_by_an_address_are_closed_too(ranks: Ranks, mesh: ProcMesh) -> None:
    free = mesh[[0]].run("s = socket.create_server(('127.0.0.1', 0)); s.getsockname()[1]").get(LONG_S).values()[0]
    mesh[[0]].run("s.close()").get(LONG_S)
    mesh.run("dist.destroy_process_group(); mesh = None; gc.collect()").get(LONG_S)
    code = f"dist.init_process_group('gloo', 'tcp://127.0.0.1:{free}', rank=rank, world_size=2)"
    mesh.run(code).get(LONG_S)
    known = (ports(mesh, 0) | ports(mesh, 1)) - {free}
    assert known
    assert run_as_nobody(FLOOD, *known) == "0\n"
    assert mesh.run(SUM + "\n").get(LONG_S).values() == ([3.0] * 3,) * 2
    mesh.run("dist.destroy_process_group(); gc.collect()").get(LONG_S)


def test_lazy_connections_keep_their_ports(ranks: Ranks, mesh: ProcMesh) -> None:
    mesh.run("os.environ['TORCH_GLOO_LAZY_INIT'] = '1'").get(LONG_S)
    ranks.store.form(mesh).get(LONG_S)
    assert mesh.run(SUM).get(LONG_S).values() == ([3.0] * 3,) * 2
    mesh.run("del os.environ['TORCH_GLOO_LAZY_INIT']").get(LONG_S)
