"""Meshes on hosts of an engine outlive the program; another program attaches to them at the port at which they look for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.actor.host_mesh import serve_ranks
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.errors import AttachError, LaunchError
from monarch_kernel.notebook.magics.attach import DetachedMeshes
from monarch_kernel.notebook.syntax.usage import UsageProblem
from monarch_kernel.runtime.controller import state
from monarch_kernel.runtime.detached import registry
from monarch_kernel.runtime.detached.registry import Home
from monarch_kernel.runtime.detached.session import DetachedSession, end
from tests.failures.machines import family
from tests.support.processes import is_alive, wait_gone
from tests.support.timing import Bar
from tests.support.waiting import LONG_S, wait_until

GRACE_S = 1.0
PROGRAM = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from monarch_kernel.actor.host_mesh import HostMesh, serve_ranks
from monarch_kernel.runtime.detached.session import DetachedSession
from monarch_kernel.runtime.detached.registry import Home
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.net.wire.config import Recipe
from tests.failures.machines import Machines
home = Home(Path({root!r}), "t")
home.create()
session = DetachedSession(home)
serve_ranks(session)
machines = Machines(Path({logs!r}))
numbers = session.add_hosts(machines, 2, grace_s={grace_s}, lost_after_s=1.0, is_light=True)
hosts = HostMesh(session.runtime, Region.whole(Extent({{"hosts": 2}})), numbers)
mesh = hosts.spawn_procs({{"gpus": 2}}, device="cpu", name="t")
mesh.initialized.get(60)
recipe = Recipe("local") if {has_recipe} else None
session.keep("t", session.runtime.queries.specs(mesh.procs), False, "cpu", {{}}, keep_s={keep_s}, recipe=recipe)
mesh.run("kept = rank * 7").get(60)
print(*(agent.pid for agent in machines.agents), flush=True)
for line in sys.stdin:
    command = line.strip()
    if command == "cell":
        mesh.run("import os, time").get(60)
        code = "while not os.path.exists(r'{go}'):\\n    print('count', rank)\\n    time.sleep(0.05)\\nrank * 2"
        future = mesh.run_cell(code, cell=5, want_value=True, listen=lambda event: None)
        future.wait(1.0)
    elif command == "heal":
        os.kill(machines.agents[1].pid, 9)
        while len(mesh.deaths()) < 2: time.sleep(0.01)
        mesh.heal().get(60)
    elif command == "leave":
        session.leave()
        os._exit(0)
    print("done", *(agent.pid for agent in machines.agents), flush=True)
"""


class Program:
    """A program with a mesh on two hosts, which accepts commands."""

    def __init__(self, root: Path, logs: Path, go: Path, *, keep_s: float = 0.0, has_recipe: bool = False) -> None:
        here = str(Path(__file__).parents[3])
        places = {"here": here, "root": str(root), "logs": str(logs), "go": go}
        code = PROGRAM.format(**places, grace_s=GRACE_S, keep_s=keep_s, has_recipe=has_recipe)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.agents = [int(pid) for pid in self.process.stdout.readline().split()]
        assert len(self.agents) == 2

    def do(self, command: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        if command == "leave":
            self.process.wait(LONG_S)
        else:
            self.agents = [int(pid) for pid in self.process.stdout.readline().split()[1:]]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        below = [process for agent in self.agents for process in family(agent)]
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        with suppress(AssertionError):  # of a test that failed halfway
            wait_until(lambda: not any(map(is_alive, below)), "all to end by themselves", 10.0)  # then they are killed
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until(lambda: not any(map(is_alive, below)), "all to end")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "meshes"


@pytest.fixture
def program(root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Program]:
    program = Program(root, tmp_path, tmp_path / "go", **getattr(request, "param", {}))
    yield program
    program.close()


SOON_LOST_S = 4.0
"""How long an attach waits for a host that a test has killed; those that live try to connect once a second."""


@pytest.fixture
def none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an attach wait only briefly for hosts: the test has seen all of them end."""
    monkeypatch.setattr(state, "ATTACH_RANKS_S", 0.2)


def attach_mesh(root: Path) -> tuple[DetachedSession, ProcMesh]:
    session, manifest = DetachedSession.attach(Home(root, "t"))
    serve_ranks(session)
    extent = Extent(manifest.specs[0].axes)
    procs = [spec.proc for spec in manifest.specs]
    return session, ProcMesh(session.runtime, Region.whole(extent), procs, "t", extent, session)


def test_programs_attach_repeatedly_even_before_agents_notice_the_loss(program: Program, root: Path) -> None:
    program.do("leave")
    session, mesh = attach_mesh(root)
    assert mesh.run("kept").get(LONG_S).values() == (0, 7, 14, 21)
    mesh.run("kept += 1").get(LONG_S)
    age_s = mesh.view().age_s
    session.leave()
    session, mesh = attach_mesh(root)
    try:
        assert mesh.view().age_s > age_s > 0  # it was up all the time
        assert mesh.run("kept").get(LONG_S).values() == (1, 8, 15, 22)
        assert not mesh.deaths()
    finally:
        session.close()


@pytest.mark.slow
def test_attach_with_a_replaced_host_and_a_lost_host(
    program: Program, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "ATTACH_HOST_S", SOON_LOST_S)
    program.do("heal")
    assert len(program.agents) == 3
    program.kill()
    os.kill(program.agents[0], signal.SIGKILL)
    session, mesh = attach_mesh(root)
    try:
        wait_until(lambda: len(mesh.deaths()) == 2, "the lost host to be found so")
        assert mesh.slice(hosts=1).run("rank").get(LONG_S).values() == (2, 3)
        with pytest.raises(LaunchError, match="an earlier kernel requested the hosts of this mesh from local"):
            mesh.heal().get(LONG_S)
    finally:
        session.close()


HEALER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from tests.runtime.detached.test_session import LONG_S, SOON_LOST_S, attach_mesh, state, wait_until
state.ATTACH_HOST_S = SOON_LOST_S
session, mesh = attach_mesh(Path({root!r}))
wait_until(lambda: len(mesh.deaths()) == 2, "the lost host to be found so")
mesh.heal().get(LONG_S)
mesh.run("import os\\nkept = globals().get('kept', rank)").get(LONG_S)
print(*mesh.run("os.getpid()").get(LONG_S).values())
session.leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [{"has_recipe": True}], indirect=True)
def test_the_attached_program_gets_a_new_host_from_the_engine(program: Program, root: Path) -> None:
    program.kill()
    os.kill(program.agents[0], signal.SIGKILL)
    code = HEALER.format(here=str(Path(__file__).parents[3]), root=str(root))
    second = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    pids = tuple(map(int, second.stdout.split()))
    session, mesh = attach_mesh(root)
    try:  # the new host was kept as the other one was
        assert mesh.run("kept").get(LONG_S).values() == (0, 1, 14, 21)
        assert mesh.run("os.getpid()").get(LONG_S).values() == pids
    finally:
        session.close()
    wait_gone(*pids)
    assert not root.exists()


KEEP_S = 1.0
LONGER_S = 6.0
"""Long enough for the test to attach to the mesh in time."""


@pytest.mark.slow
@pytest.mark.parametrize("program", [{"keep_s": KEEP_S}], indirect=True)
@pytest.mark.parametrize("how", ["leave", "kill"])
def test_a_mesh_ends_after_its_time_limit_and_attach_reports_it(
    program: Program, root: Path, how: str, bar: Bar, none_comes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = [process for agent in program.agents for process in family(agent)]
    program.do("leave") if how == "leave" else program.kill()
    left = time.monotonic()
    wait_until(lambda: not any(map(is_alive, below)), "all to end by themselves")
    bar.check_above(time.monotonic() - left, KEEP_S, "the end of a mesh that is kept for a time")
    meshes = DetachedMeshes(root)
    if how == "kill":
        assert "t     hosts=2 gpus=2  4 on 2 hosts, time is over  none for " in meshes.text([])
        assert "none for 0" not in meshes.text([])
    with pytest.raises(
        UsageProblem, match="'t' is the name of a detached mesh, and its time is over.*remove it with %mesh down t"
    ):
        meshes.check_free("t", detach=False)
    for _ in range(2):  # a refused attempt does not attach
        with pytest.raises(AttachError, match=r"mesh 't' is gone: its time is over: it was kept for 1 s .* until \d"):
            attach_mesh(root)
    if how == "leave":
        assert end(Home(root, "t")) == 0
    else:  # no host has connected, which decides it
        home = Home(root, "t")
        monkeypatch.setattr(registry, "_ENDING_S", 0.0)
        wait_until(home.is_gone, "no host to be expected any more")
        assert meshes.text([]).startswith("t is gone: its time is over: it was kept for 1 s")
        assert not meshes.text([])
    assert not (root / "t").exists()


@pytest.mark.slow
@pytest.mark.parametrize("program", [{"keep_s": LONGER_S}], indirect=True)
def test_the_time_limit_counts_only_without_a_program(program: Program, root: Path) -> None:
    program.do("leave")
    session, mesh = attach_mesh(root)
    try:
        until = time.monotonic() + 1.1 * LONGER_S
        while time.monotonic() < until:
            assert mesh.run("kept").get(LONG_S).values() == (0, 7, 14, 21)
        assert not Home(root, "t").time_over()
    finally:
        session.close()


@pytest.mark.slow
def test_the_error_says_why_a_mesh_cannot_be_attached(program: Program, root: Path, none_comes: None) -> None:
    with pytest.raises(AttachError, match="attached to another kernel"):
        attach_mesh(root)
    program.do("leave")
    port = Home(root, "t").manifest().elsewhere.port  # type: ignore[union-attr]
    with (
        socket.create_server(("", port), reuse_port=False),
        pytest.raises(AttachError, match=f"port {port} of this machine, and another program listens there"),
    ):
        attach_mesh(root)
    below = [process for agent in program.agents for process in family(agent)]
    for agent in program.agents:
        psutil.Process(agent).kill()
    wait_until(lambda: not any(map(is_alive, below)), "agents to end")
    with pytest.raises(AttachError, match=r"none of the 2 hosts .* has connected to port"):
        attach_mesh(root)
    assert end(Home(root, "t")) == 0
    assert not (root / "t").exists()
