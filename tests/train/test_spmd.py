"""Ranks get the environment of torchrun, and torch.distributed works with it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from monarch_kernel.actor import Actor, ProcMesh, current_rank, endpoint
from monarch_kernel.train.spmd import setup_torch_elastic_env, setup_torch_elastic_env_async
from tests.support.ports import free_ports
from tests.support.waiting import LONG_S

PROCS = {"dp": 2, "tp": 2}


class Reducer(Actor):
    """Sums over the group that the environment describes."""

    @endpoint
    def environment(self) -> dict[str, str]:
        import os

        return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}

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


def test_actors_can_form_a_process_group(procs: ProcMesh) -> None:
    setup_torch_elastic_env(procs)
    reducers = procs.spawn("reducers", Reducer)
    found = reducers.environment.call().get(LONG_S).values()
    assert [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"]) for each in found] == [
        (str(rank), str(rank), "4") for rank in range(4)
    ]
    ((address, port),) = {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in found}
    with pytest.raises(ConnectionRefusedError):  # the ranks meet by messages: other processes find no store
        socket.create_connection((address, int(port)), 5)
    assert reducers.total.call().get(LONG_S).values() == (10.0,) * 4
    setup_torch_elastic_env(procs)  # a store without the addresses of the old group
    assert reducers.total.call().get(LONG_S).values() == (10.0,) * 4


def test_a_slice_is_a_separate_group(procs: ProcMesh) -> None:
    for dp in range(2):
        setup_torch_elastic_env(procs.slice(dp=dp))
    reducers = procs.spawn("reducers", Reducer)
    parts = [reducers.slice(dp=dp).total.call() for dp in range(2)]
    assert [part.get(LONG_S).values() for part in parts] == [(3.0, 3.0)] * 2


def test_the_address_of_the_store_can_be_given(procs: ProcMesh) -> None:
    (port,) = free_ports(1)
    asyncio.run(setup_torch_elastic_env_async(procs, "127.0.0.1", port))
    reducers = procs.spawn("reducers", Reducer)
    assert {each["MASTER_PORT"] for each in reducers.environment.call().get(LONG_S).values()} == {str(port)}
    assert reducers.total.call().get(LONG_S).values() == (10.0,) * 4
    with pytest.raises(ValueError, match="go together"):
        setup_torch_elastic_env(procs, master_port=1)
