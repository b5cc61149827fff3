"""Ranks on hosts of Kubernetes and Lightning.ai, with real agents that connect to the controller."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import HostMesh, ProcMesh, shutdown_context
from monarch_kernel.actor.host_mesh import allocate, serve_ranks
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.launch.base import Launcher
from monarch_kernel.launch.kubernetes import KubernetesLauncher
from monarch_kernel.launch.lightning import LightningLauncher
from monarch_kernel.runtime.controller.session import current_session
from monarch_kernel.train.process_group.worker import GroupStore
from tests.launch.cluster import Cluster, Image
from tests.launch.lightnings import lightning_cloud
from tests.support.waiting import LONG_S, wait_until


@dataclass
class Engine:
    """A launcher, and access to its engine."""

    launcher: Launcher
    names: Callable[[], list[str]]  # of the objects in the engine


@contextlib.contextmanager
def kubernetes(directory: Path, **options: Any) -> Iterator[Engine]:
    cluster = Cluster(directory)
    cluster.images["monarch:1"] = Image({"python3": (sys.executable, "...")})
    launcher = KubernetesLauncher(image="monarch:1", kubeconfig=cluster.kubeconfig(), **options)
    try:
        yield Engine(launcher, lambda: cluster.names("pods") + cluster.names("secrets"))
    finally:
        launcher.close(5.0)
        cluster.close()


@contextlib.contextmanager
def lightning(directory: Path) -> Iterator[Engine]:
    with lightning_cloud(directory) as cloud:
        launcher = LightningLauncher(machine="CPU", poll_s=0.2)
        try:
            yield Engine(launcher, cloud.names)
        finally:
            launcher.close(5.0)


@pytest.fixture(params=["kubernetes", "lightning"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    if request.param == "lightning" and sys.version_info < (3, 11):
        pytest.skip("the SDK needs Python 3.11")
    with {"kubernetes": kubernetes, "lightning": lightning}[request.param](tmp_path) as engine:
        try:
            yield engine
        finally:
            shutdown_context().get()


@pytest.fixture
def store() -> Iterator[GroupStore]:
    store = GroupStore()
    yield store
    store.close()


def values(mesh: ProcMesh, code: str) -> list[Any]:
    return list(mesh.run(code).get(LONG_S).values())


@pytest.mark.slow
def test_a_cell_runs_across_hosts(engine: Engine, store: GroupStore) -> None:
    hosts = allocate(engine.launcher, 2)
    mesh = hosts.spawn_procs({"gpus": 2}, device="cpu")
    assert dict(mesh.extent) == {"hosts": 2, "gpus": 2}
    agents = values(mesh, "import os, torch, torch.distributed as dist\nos.getppid()")
    assert agents[0] == agents[1] != agents[2] == agents[3]
    assert values(mesh, "os.environ.get('MONARCH_AGENT', 'nothing')") == ["nothing"] * 4  # only agents have the keys
    store.form(mesh).get(LONG_S)
    total = "x = torch.tensor([rank]); dist.all_reduce(x); x.item()"
    assert values(mesh, total) == [6, 6, 6, 6]
    hosts.shutdown().get()
    wait_until(lambda: engine.names() == [], "nothing to be left in the engine")


@pytest.mark.parametrize("way", ["dial", "tunnel"])
def test_the_controller_connects_to_pods_that_cannot_connect_to_it(tmp_path: Path, way: str) -> None:
    with kubernetes(tmp_path, **{way: True}) as engine:
        try:
            session = current_session()
            serve_ranks(session)
            numbers = session.add_hosts(engine.launcher, 2, is_light=True)
            hosts = HostMesh(session.runtime, Region.whole(Extent({"hosts": 2})), numbers)
            mesh = hosts.spawn_procs({"gpus": 1}, device="cpu")
            assert values(mesh, "'x' * 3_000_000")[1] == "x" * 3_000_000
        finally:
            shutdown_context().get()
