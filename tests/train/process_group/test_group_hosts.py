"""The process group of a mesh whose ranks are on several hosts that share only a network."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.actor import Actor, ProcMesh, SupervisionError, current_rank, endpoint
from monarch_kernel.errors import RemoteError
from monarch_kernel.runtime.controller.session import current_session
from monarch_kernel.train.process_group.worker import GroupStore
from monarch_kernel.train.spmd import setup_torch_elastic_env
from tests.failures.machines import LONG_S, Machines, family, hosts_on
from tests.support.ranks import wait_until_in_collective
from tests.support.waiting import wait_until

SUM = "x = torch.ones(3) * (rank + 1); dist.all_reduce(x); x.tolist()"
IMPORTS = "import os, pathlib, time, torch, torch.distributed as dist"
LEAVE = """
import gc
mesh = x = model = optimizer = None
if dist.is_initialized():
    dist.destroy_process_group()
gc.collect()
"""
STEP = """
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(rank)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
[round(each, 5) for each in torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()]
"""


@pytest.fixture(scope="module")
def standing(session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Agents for all tests of this module."""
    machines = Machines(tmp_path_factory.mktemp("agents"))
    current_session().local_host(is_idle=True)  # started before any test, because tests must leave nothing behind
    yield machines
    for hosts in machines.meshes:
        hosts.shutdown().get(LONG_S)


@pytest.fixture
def machines(tmp_path: Path, procs: ProcMesh) -> Iterator[Machines]:
    """Agents of one test, which end with it; depends on `procs`, so that the controller has opened its sockets before."""
    machines = Machines(tmp_path)
    yield machines
    for hosts in machines.meshes:
        hosts.shutdown().get(LONG_S)


@pytest.fixture(scope="module")
def store() -> Iterator[GroupStore]:
    store = GroupStore()
    yield store
    store.close()


@pytest.fixture(scope="module")
def procs(standing: Machines, store: GroupStore) -> ProcMesh:
    """Two ranks on each of three hosts."""
    return with_group(hosts_on(standing, 3).spawn_procs({"gpus": 2}, device="cpu"), store)


def on_one_host(standing: Machines, **options: Any) -> ProcMesh:
    """Separate ranks on one of the hosts."""
    (hosts,) = standing.meshes
    return hosts.slice(hosts=slice(1, 2)).spawn_procs(device="cpu", **options)


def with_group(mesh: ProcMesh, store: GroupStore) -> ProcMesh:
    mesh.run(IMPORTS).get(LONG_S)
    store.form(mesh).get(LONG_S)
    return mesh


@pytest.fixture
def group(procs: ProcMesh, store: GroupStore) -> Iterator[ProcMesh]:
    """The six ranks with a fresh group, whatever the last test did to it."""
    store.form(procs).get(LONG_S)
    yield procs
    procs.run(LEAVE).get(LONG_S)


def test_collectives_run_on_all_hosts(group: ProcMesh) -> None:
    assert group.run(SUM).get(LONG_S).values() == ([21.0] * 3,) * 6
    assert (
        group.run("mesh.mesh_dim_names, tuple(mesh.shape)").get(LONG_S).values() == ((("hosts", "gpus"), (3, 2)),) * 6
    )


def test_scripts_for_torchrun_find_the_places_of_their_hosts(group: ProcMesh) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]
    found = group.run(f"[int(os.environ[name]) for name in {names}]").get(LONG_S).values()
    assert found == tuple([rank, rank % 2, 6, 2, rank // 2, 3] for rank in range(6))
    (address,) = set(group.run("os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])").get(LONG_S).values())
    with socket.create_server(address):  # a program that a rank starts can meet there
        pass
    interfaces = group.run("os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME']").get(LONG_S).values()
    assert {f"={gloo}" == nccl for gloo, nccl in interfaces} == {True}


def test_the_keys_are_in_the_process_of_rank_0_and_at_no_port(group: ProcMesh) -> None:
    kept = "from monarch_kernel.runtime.rpc.handles import PROCESS\nlen(PROCESS.client.stores)"
    assert group.run(kept).get(LONG_S).values() == (1,) + (0,) * 5
    listens = "[each for each in __import__('psutil').Process().net_connections('tcp') if each.status == 'LISTEN']"
    assert all(group.run(f"len({listens})").get(LONG_S).values())
    left = "dist.destroy_process_group(); mesh = None; __import__('gc').collect()"
    group.run(left).get(LONG_S)

    def are_closed() -> bool:
        return set(group.run(f"len({listens})").get(LONG_S).values()) == {0}

    wait_until(are_closed, "gloo's listeners to be closed, after its threads are idle")


def test_a_scripts_own_initialisation_works(group: ProcMesh) -> None:
    again = "dist.destroy_process_group(); dist.init_process_group('gloo')\n" + SUM
    assert group.run(again).get(LONG_S).values() == ([21.0] * 3,) * 6


@pytest.mark.slow
def test_a_model_is_trained_on_all_hosts(group: ProcMesh) -> None:
    found = group.run(STEP).get(LONG_S).values()
    assert len({tuple(each) for each in found}) == 1
    assert group.run("len({round(each, 6) for each in losses})").get(LONG_S).values() == (3,) * 6


@pytest.mark.slow
def test_forming_again_and_again_keeps_variables_and_descriptors(group: ProcMesh, store: GroupStore) -> None:
    count = "len(os.listdir('/proc/self/fd'))"
    group.run("kept = torch.arange(rank)").get(LONG_S)
    before = group.run(count).get(LONG_S).values()
    for _ in range(4):
        store.form(group).get(LONG_S)
        assert group.run(SUM).get(LONG_S).values()[0] == [21.0] * 3
    after = group.run(count).get(LONG_S).values()
    assert all(b - a <= 8 for a, b in zip(before, after)), (before, after)
    assert group.run("kept.tolist()").get(LONG_S).values() == tuple(list(range(rank)) for rank in range(6))


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])  # the host with the store, and another one
def test_a_host_that_is_killed_in_a_collective_frees_the_others_and_is_replaced(
    machines: Machines, store: GroupStore, host: int
) -> None:
    mesh = with_group(hosts_on(machines, 2).spawn_procs({"gpus": 2}, device="cpu"), store)
    mesh.run("kept = rank * 7").get(LONG_S)
    first = mesh.view().ranks[2 * host].pid
    agent = next(each for each in machines.agents if first in {process.pid for process in family(each.pid)})
    future = mesh.run(f"if rank // 2 == {host}: time.sleep(600)\n{SUM}")
    wait_until_in_collective(mesh.slice(hosts=1 - host))
    os.kill(agent.pid, signal.SIGKILL)
    error = future.exception(LONG_S)
    assert isinstance(error, SupervisionError)
    kinds = {point.rank: report.kind for point, report in error.reports.items()}
    lost = [2 * host, 2 * host + 1]
    assert [rank for rank, kind in kinds.items() if kind == "lost"] == lost
    assert {kind for rank, kind in kinds.items() if rank not in lost} == {"released"}
    assert mesh.heal().get(LONG_S) == tuple(lost)
    with_group(mesh, store)
    assert mesh.run(SUM).get(LONG_S).values() == ([10.0] * 3,) * 4
    kept = mesh.run("globals().get('kept')").get(LONG_S).values()
    assert kept == tuple(None if rank in lost else rank * 7 for rank in range(4))


def test_an_interrupt_frees_ranks_that_wait_for_a_host(group: ProcMesh, store: GroupStore) -> None:
    some = group.slice(hosts=slice(0, 3, 2))
    future = some.run(SUM)
    wait_until_in_collective(some)
    future.interrupt()
    error = future.exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert {report.kind for report in error.reports.values()} == {"interrupted"}
    store.form(group).get(LONG_S)
    assert group.run(SUM).get(LONG_S).values() == ([21.0] * 3,) * 6


def test_a_mesh_of_one_host_forms_its_group_there(standing: Machines, group: ProcMesh, store: GroupStore) -> None:
    mesh = with_group(on_one_host(standing, per_host={"gpus": 2}), store)
    assert mesh.run(SUM).get(LONG_S).values() == ([3.0] * 3,) * 2
    assert mesh.run("os.environ['MASTER_ADDR']").get(LONG_S).values() == ("127.0.0.1",) * 2
    assert group.run(SUM).get(LONG_S).values() == ([21.0] * 3,) * 6
    mesh.stop(grace_s=0).get(LONG_S)


@pytest.mark.slow
def test_the_error_of_a_host_that_cannot_be_reached_says_what_to_check(machines: Machines, store: GroupStore) -> None:
    """Each host has an address at which only it can reach itself, like a host behind a firewall."""
    mesh = hosts_on(machines, 2).spawn_procs({"gpus": 1}, device="cpu", env={"GLOO_SOCKET_IFNAME": "lo"})
    mesh.run(IMPORTS + "\nif rank == 1:\n    " + BLOCK).get(LONG_S)
    error = store.form(mesh).exception(LONG_S)
    assert isinstance(error, RemoteError)
    text = error.reports[mesh.extent.point(1)].message
    assert f"host {socket.gethostname()} can't connect to 127.0.0.1 port" in text
    assert f"(rank 0, on host {socket.gethostname()}" in text
    assert "firewalls" in text


def test_an_interface_that_does_not_exist_is_named(standing: Machines, procs: ProcMesh, store: GroupStore) -> None:
    mesh = on_one_host(standing, per_host={"gpus": 1}, env={"GLOO_SOCKET_IFNAME": "nosuch0"})
    error = store.form(mesh).exception(LONG_S)
    assert isinstance(error, RemoteError)
    assert "nosuch0" in str(error)
    assert "lo (127.0.0.1" in str(error)
    mesh.stop(grace_s=0).get(LONG_S)


# Imitates a firewall within one process: refuses connections to the other host.
BLOCK = """import socket; connect = socket.create_connection
    def refuse(address, *args, **kwargs): raise ConnectionRefusedError(111, 'Connection refused')
    socket.create_connection = refuse"""


class Reducer(Actor):
    """Sums over the group that the environment describes."""

    @endpoint
    def environment(self) -> list[int]:
        return [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]

    @endpoint
    def total(self) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        try:
            mine = torch.tensor([float(current_rank().rank + 1)])
            dist.all_reduce(mine)
            return mine.item()
        finally:
            dist.destroy_process_group()


def test_actors_form_groups_across_hosts(standing: Machines, procs: ProcMesh, by_value: None) -> None:
    mesh = standing.meshes[0].spawn_procs({"gpus": 2}, device="cpu")  # rank 0 keeps the store as long as it lives
    setup_torch_elastic_env(mesh)
    reducers = mesh.spawn("reducers", Reducer)
    assert reducers.environment.call().get(LONG_S).values() == tuple([r, r % 2, 2, r // 2] for r in range(6))
    assert reducers.total.call().get(LONG_S).values() == (21.0,) * 6
    mesh.stop(grace_s=0).get(LONG_S)
