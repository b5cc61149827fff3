"""Detached hosts of real engines survive the program: another program replaces one, or the engine gets them back in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from monarch_kernel.actor import ProcMesh
from monarch_kernel.actor.host_mesh import serve_ranks
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.net.wire.config import Recipe
from monarch_kernel.runtime.controller import state
from monarch_kernel.runtime.detached.registry import Home
from monarch_kernel.runtime.detached.session import DetachedSession
from tests.launch.rays import RayCluster, raylet_of
from tests.launch.slurms import SlurmCluster, why_no_slurm
from tests.launch.sshds import SshFolder, why_no_sshd
from tests.support.processes import wait_gone
from tests.support.waiting import LONG_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import msgspec
from monarch_kernel.actor.host_mesh import HostMesh, serve_ranks
from monarch_kernel.runtime.detached.session import DetachedSession
from monarch_kernel.runtime.detached.registry import Home
from monarch_kernel.launch.registry import ENGINES, make_launcher
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.net.wire.config import Recipe
recipe = msgspec.json.decode(sys.argv[2], type=Recipe)
home = Home(Path(sys.argv[3]), "t")
home.create()
session = DetachedSession(home)
serve_ranks(session)
launcher = make_launcher(ENGINES[recipe.engine], recipe.options, **recipe.common)
numbers = session.add_hosts(launcher, 2, grace_s=1.0, is_light=True)
hosts = HostMesh(session.runtime, Region.whole(Extent({"hosts": 2})), numbers)
mesh = hosts.spawn_procs({"gpus": 1}, device="cpu", name="t")
mesh.initialized.get(60)
session.keep("t", session.runtime.queries.specs(mesh.procs), False, "cpu", {}, keep_s=float(sys.argv[4]), recipe=recipe)
print(*mesh.run("import os\\nkept = rank * 7\\nos.getppid()").get(60).values(), flush=True)
sys.stdin.read()
"""


@dataclass
class Kept:
    """An engine with room for three hosts.

    Attributes:
        recipe: the recipe of a launcher.
        machine: returns the machine on which an agent runs.
        left: returns the objects that remain in the engine.
    """

    recipe: Recipe
    machine: Callable[[int], object]
    left: Callable[[], list[str]]


@pytest.fixture
def on_ray(ray_cluster: RayCluster) -> Kept:
    recipe = Recipe("ray", {"address": ray_cluster.address}, {"gpus": 8, "python": sys.executable})
    return Kept(recipe, raylet_of, ray_cluster.left)


@pytest.fixture
def on_ssh(tmp_path: Path) -> Iterator[Kept]:
    if why := why_no_sshd():
        pytest.skip(why)
    folder = SshFolder(tmp_path)
    try:
        for name in "abc":
            folder.add(name)
        options = {"config": str(folder.config), "tunnel": "never"}
        recipe = Recipe("ssh", options, {"hosts": ("a", "b", "c"), "python": sys.executable})
        yield Kept(recipe, port_of, lambda: [str(path) for path in Path(os.environ["TMPDIR"]).glob("monarch-ssh-*")])
    finally:
        folder.close()


@pytest.fixture
def on_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    if why := why_no_slurm():
        pytest.skip(why)
    cluster = SlurmCluster(tmp_path, ("n1", "n2", "n3"))
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    try:
        recipe = Recipe("slurm", {"directory": str(tmp_path / "logs")}, {"python": sys.executable})
        yield Kept(recipe, node_of, lambda: cluster.run("squeue", "-h").splitlines())
    finally:
        cluster.close()


def node_of(agent: int) -> str:
    """Return the Slurm node on which an agent runs."""
    return psutil.Process(agent).environ()["SLURMD_NODENAME"]


def port_of(agent: int) -> str:
    """Return the port of the SSH server that started an agent."""
    return psutil.Process(agent).environ()["SSH_CONNECTION"].split()[3]


def brought_up(kept: Kept, root: Path, keep_s: float = 0.0) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a program with a mesh on two hosts of an engine; return it and the pids of the agents."""
    here, recipe = str(Path(__file__).parents[2]), msgspec.json.encode(kept.recipe).decode()
    words = [sys.executable, "-c", PROGRAM, here, recipe, str(root), str(keep_s)]
    program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    agents = [int(pid) for pid in program.stdout.readline().split()]
    assert len(agents) == 2
    return program, agents


def end(program: subprocess.Popen[str]) -> None:
    program.kill()
    program.communicate()


SOON_LOST_S = 4.0
"""How long an attach waits for the host that the test has killed; the other one tries to connect once a second."""


@pytest.fixture
def soon_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "ATTACH_HOST_S", SOON_LOST_S)


def check_another_host_is_asked_for(kept: Kept, tmp_path: Path) -> None:
    root = tmp_path / "meshes"
    program, agents = brought_up(kept, root)
    machines = [kept.machine(pid) for pid in agents]
    end(program)
    os.kill(agents[0], signal.SIGKILL)
    session, manifest = DetachedSession.attach(Home(root, "t"))
    try:
        serve_ranks(session)
        extent = Extent(manifest.specs[0].axes)
        procs = [spec.proc for spec in manifest.specs]
        mesh = ProcMesh(session.runtime, Region.whole(extent), procs, "t", extent, session)
        wait_until(lambda: len(mesh.deaths()) == 1, "the lost host to be noticed")
        mesh.heal().get(LONG_S)
        assert mesh.run("globals().get('kept')").get(LONG_S).values() == (None, 7)
        now = mesh.run("import os; os.getppid()").get(LONG_S).values()
        assert now[1] == agents[1]
        assert kept.machine(now[0]) not in machines
    finally:
        session.close()
    wait_until(lambda: not kept.left(), "the engine to get everything back")
    assert not root.exists()


def check_all_is_given_back_in_time(kept: Kept, tmp_path: Path) -> None:
    program, agents = brought_up(kept, tmp_path / "meshes", keep_s=1.0)
    end(program)
    wait_gone(*agents)
    wait_until(lambda: not kept.left(), "the engine to get everything back")


def test_a_lost_host_is_replaced_after_attach_ssh(on_ssh: Kept, soon_lost: None, tmp_path: Path) -> None:
    check_another_host_is_asked_for(on_ssh, tmp_path)


def test_a_lost_host_is_replaced_after_attach_ray(on_ray: Kept, soon_lost: None, tmp_path: Path) -> None:
    check_another_host_is_asked_for(on_ray, tmp_path)


def test_detached_hosts_are_given_back_after_their_time_ssh(on_ssh: Kept, tmp_path: Path) -> None:
    check_all_is_given_back_in_time(on_ssh, tmp_path)


def test_detached_hosts_are_given_back_after_their_time_ray(on_ray: Kept, tmp_path: Path) -> None:
    check_all_is_given_back_in_time(on_ray, tmp_path)


def test_a_lost_host_is_replaced_after_attach_slurm(on_slurm: Kept, soon_lost: None, tmp_path: Path) -> None:
    check_another_host_is_asked_for(on_slurm, tmp_path)


def test_detached_hosts_are_given_back_after_their_time_slurm(on_slurm: Kept, tmp_path: Path) -> None:
    check_all_is_given_back_in_time(on_slurm, tmp_path)
