"""Where a mesh listens if all its hosts are on this machine, and what other users of the machine find there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.actor.host_mesh import HostMesh, serve_ranks, shutdown_context
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.launch.local import LocalLauncher
from monarch_kernel.runtime.controller.session import current_session
from tests.support.processes import command_of
from tests.support.stranger import run_as_nobody
from tests.support.waiting import LONG_S

KNOCK = """
for port in map(int, sys.argv[1:]):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(20)
    connection.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n" + bytes(10_000))
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    print("closed")
"""

LOOK = """
import stat
for path in sys.argv[1:]:
    try:
        os.listdir(path)
        print("listed", path)
    except PermissionError:
        print("refused")
"""


@pytest.fixture(scope="module")
def others() -> set[tuple[str, int]]:
    """Where servers of other tests listen, such as JupyterLab."""
    shutdown_context().get(LONG_S)
    return listeners()


@pytest.fixture(scope="module")
def mesh(others: set[tuple[str, int]]) -> Iterator[ProcMesh]:
    """A rank on each of two hosts, both of which are this machine."""
    session = current_session()
    serve_ranks(session)
    numbers = session.add_hosts(LocalLauncher(session.directory), 2, is_light=True, lost_after_s=10.0)
    mesh = HostMesh(session.runtime, Region.whole(Extent({"hosts": 2})), numbers).spawn_procs({"procs": 1})
    mesh.initialized.get(LONG_S)
    yield mesh
    shutdown_context().get(LONG_S)


def listeners() -> set[tuple[str, int]]:
    """Where this process and its descendants listen."""
    me = psutil.Process()
    return {
        (each.laddr.ip.removeprefix("::ffff:"), each.laddr.port)
        for process in (me, *me.children(recursive=True))
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def test_a_mesh_of_this_machine_listens_at_no_interface_that_others_reach(
    mesh: ProcMesh, others: set[tuple[str, int]]
) -> None:
    found = listeners() - others
    assert len(found) == 3  # the controller, and the two agents that behave like other hosts
    assert {address for address, _ in found} == {"127.0.0.1"}
    ranks = "import os; os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME']"
    assert mesh.run(ranks).get(LONG_S).values() == (("lo", "=lo"),) * 2


def test_a_stranger_without_keys_is_disconnected(mesh: ProcMesh, others: set[tuple[str, int]]) -> None:
    ports = sorted(port for _, port in listeners() - others)
    assert run_as_nobody(KNOCK, *ports).split() == ["closed"] * len(ports)
    assert mesh.run("rank").get(LONG_S).values() == (0, 1)


def test_another_user_can_list_no_directory_of_the_session(mesh: ProcMesh) -> None:
    directories = {str(current_session().directory)}
    for process in psutil.Process().children(recursive=True):
        for each in process.net_connections("unix"):
            if each.laddr.startswith("/"):
                directories.add(os.path.dirname(each.laddr))
    assert len(directories) >= 3
    assert set(run_as_nobody(LOOK, *directories).split()) == {"refused"}


def test_no_secret_is_on_a_command_line(mesh: ProcMesh) -> None:
    token = current_session().token
    lines = [" ".join(command_of(each)) for each in psutil.Process().children(recursive=True)]
    assert lines
    assert not any(token in line for line in lines)
