"""Meshes of hosts from a launcher: the program requests hosts, uses them before they are up, and gives them back."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import (
    Actor,
    HostMesh,
    ProcMesh,
    SupervisionError,
    allocate,
    endpoint,
    this_host,
)
from monarch_kernel.errors import ActorError, LaunchError
from monarch_kernel.launch.local import LocalLauncher
from tests.support.actors import host_agent
from tests.support.ranks import LightLauncher, light_hosts
from tests.support.waiting import LONG_S


class Neighbor(Actor):
    """Returns the host agent of its process, and starts other processes there."""

    @endpoint
    def agent(self) -> int:
        return host_agent()

    @endpoint
    def spawn_beside(self) -> int:
        procs = this_host().spawn_procs({"x": 2}, device="cpu", name="beside", axes={"a": 2, "b": 1})
        (agent,) = set(procs.spawn("child", Neighbor).agent.call().get(LONG_S).values())
        procs.stop().get(LONG_S)
        return int(agent)

    @endpoint
    def hand_over(self) -> HostMesh:
        return this_host()

    @endpoint
    def start_on(self, hosts: HostMesh) -> list[int]:
        procs = hosts.spawn_procs({"x": 1}, device="cpu", name="elsewhere")
        agents = procs.spawn("child", Neighbor).agent.call().get(LONG_S).values()
        procs.stop().get(LONG_S)
        return [int(agent) for agent in agents]

    @endpoint
    def ask_for_hosts(self) -> None:
        allocate(LocalLauncher(Path()), 1)


@pytest.fixture(scope="module")
def hosts(session: None, by_value: None) -> Iterator[HostMesh]:
    """Two hosts with an agent each."""
    hosts = light_hosts(LocalLauncher(), 2)
    assert hosts.initialized.get(LONG_S)
    yield hosts
    hosts.shutdown().get(LONG_S)


@pytest.fixture(scope="module")
def procs(hosts: HostMesh) -> Iterator[ProcMesh]:
    procs = hosts.spawn_procs({"gpus": 2}, device="cpu", name="procs")
    assert procs.initialized.get(LONG_S)
    yield procs
    procs.stop().get(LONG_S)


@pytest.fixture(scope="module")
def here(procs: ProcMesh) -> Any:
    first = procs.spawn("first", Neighbor)  # the first actor makes the program serve requests of ranks
    first.spawn_beside.call().get(LONG_S)
    first.stop().get(LONG_S)
    return procs.spawn("here", Neighbor)


@pytest.fixture
def own(procs: ProcMesh, here: Any) -> Iterator[Any]:
    """Actors for one test. The processes that they start end with them."""
    own = procs.spawn("own", Neighbor)
    yield own
    own.stop().get(LONG_S)


def agents(here: Any) -> list[int]:
    """Return the agents of the hosts, in their order."""
    found = list(here.agent.call().get(LONG_S).values())
    assert found[0] == found[1]
    assert found[2] == found[3]
    return found[::2]


def test_processes_have_the_axes_of_their_hosts_and_then_their_own(hosts: HostMesh, here: Any) -> None:
    assert dict(hosts.extent) == {"hosts": 2}
    assert dict(here.extent) == {"hosts": 2, "gpus": 2}
    assert len(set(agents(here))) == 2


def test_a_slice_of_the_hosts_starts_separate_processes(hosts: HostMesh, here: Any) -> None:
    mesh = hosts.slice(hosts=1).spawn_procs({"gpus": 2}, device="cpu", name="part", axes={"tp": 2})
    part = mesh.spawn("here", Neighbor)
    assert dict(part.extent) == {"tp": 2}
    assert set(part.agent.call().get(LONG_S).values()) == {agents(here)[1]}
    mesh.stop().get(LONG_S)


def test_a_rank_starts_processes_on_its_own_host(here: Any, own: Any) -> None:
    beside = own.slice(gpus=1).spawn_beside.call().get(LONG_S)
    assert list(beside.values()) == agents(here)


def test_a_handle_of_a_host_means_the_same_host_in_every_process(hosts: HostMesh, here: Any, own: Any) -> None:
    theirs = own.slice(hosts=1, gpus=0).hand_over.call_one().get(LONG_S)
    assert isinstance(theirs, HostMesh)
    first = own.slice(hosts=0, gpus=0)
    assert first.start_on.call_one(theirs).get(LONG_S) == [agents(here)[1]]  # through the program
    assert first.start_on.call_one(hosts).get(LONG_S) == agents(here)


def test_processes_get_their_device_folder_and_environment(hosts: HostMesh, tmp_path: Path) -> None:
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        procs = hosts.spawn_procs(name="settled", env={"GREETING": "hello", "CUDA_VISIBLE_DEVICES": ""})
    finally:
        os.chdir(before)
    found = procs.run("import os\nstr(device), os.getcwd(), os.environ['GREETING'], os.environ['CUDA_VISIBLE_DEVICES']")
    assert set(found.get(LONG_S).values()) == {("cpu", str(tmp_path), "hello", "")}
    procs.stop().get(LONG_S)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hosts": 0}, "hosts must be more than 0, not 0"),
        ({"lost_after_s": 0.01}, "lost_after_s must be at least 0.5, not 0.01: hosts send"),
        ({"timeout_s": 0.0}, "timeout_s must be more than 0"),
        ({"lost_after_s": -1.0}, "lost_after_s must be more than 0"),
        ({"axis": "not an axis"}, "axis"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], says: str) -> None:
    launcher = LocalLauncher()
    with pytest.raises(ValueError, match=says):
        allocate(launcher, **options)
    launcher.close(1.0)


def test_axes_must_match_the_number_of_processes(hosts: HostMesh) -> None:
    with pytest.raises(ValueError, match="have 3 points, but there are 4 processes"):
        hosts.spawn_procs({"gpus": 2}, axes={"dp": 3})


def test_only_the_program_allocates_hosts(here: Any) -> None:
    with pytest.raises(ActorError, match="only the program can allocate hosts, not a rank"):
        here.slice(hosts=0, gpus=0).ask_for_hosts.call_one().get(LONG_S)


def test_hosts_can_be_used_and_given_back_before_they_are_up(hosts: HostMesh, tmp_path: Path) -> None:
    stall = tmp_path / "stall"
    stall.touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nwhile test -e {stall}; do sleep 0.02; done\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    late = allocate(LightLauncher(python=str(python)), 2, axis="nodes")
    procs = late.spawn_procs({"gpus": 1}, device="cpu", name="late")
    agent = procs.spawn("here", Neighbor).agent.call()
    assert not agent.done()  # no call has waited for the hosts, which can't be up yet
    late.slice(nodes=1).shutdown().get(LONG_S)
    stall.unlink()
    with pytest.raises(SupervisionError, match="its host was given back"):
        agent.get(LONG_S)
    assert procs.slice(nodes=0).initialized.get(LONG_S)
    assert [host.state for host in late.view().hosts] == ["up", "released"]
    assert late.slice(nodes=0).initialized.get(LONG_S)
    with pytest.raises(LaunchError, match="1 of 2 hosts are gone:\nhost 1: its host was given back"):
        late.initialized.get(LONG_S)
    late.shutdown().get(LONG_S)
    late.shutdown().get(LONG_S)  # and again
    assert hosts.initialized.get(LONG_S)  # the session and the other hosts go on
