"""Two meshes for all modules of this folder: the imports to shard tensors take each rank a second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monarch_kernel.actor import ProcMesh, this_host
from monarch_kernel.train.process_group.worker import GroupStore
from tests.support.ranks import preload_training
from tests.support.waiting import LONG_S

IMPORTS = """
import copy, os, pathlib, time, torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from monarch_kernel.runtime.rpc.handles import PROCESS

def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 7), nn.Linear(7, 3, bias=False))

def full(module):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in module.state_dict().items()}
"""
SHARDING = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
"""
LEAVE = """
import gc
mesh = model = opt = ref = x = y = None
gc.collect()
dist.destroy_process_group()
gc.collect()
"""


def run(mesh: ProcMesh, code: str) -> tuple[Any, ...]:
    """Run a cell, and return the value of each rank."""
    return mesh.run(code).get(LONG_S).values()


@pytest.fixture(scope="package")
def meshes(session: None) -> Iterator[tuple[ProcMesh, ProcMesh]]:
    """Four ranks that train, two that generate."""
    preload_training()
    store = GroupStore()
    trainer = this_host().spawn_procs({"dp": 2, "tp": 2}, name="trainer", device="cpu")
    generator = this_host().spawn_procs({"gpus": 2}, name="generator", device="cpu")
    imports = trainer.run(IMPORTS + SHARDING), generator.run(IMPORTS)
    for mesh, imported in zip((trainer, generator), imports):
        imported.get(LONG_S)
        store.form(mesh).get(LONG_S)
    yield trainer, generator
    for mesh in (trainer, generator):
        run(mesh, LEAVE)
        mesh.stop(grace_s=0).get(LONG_S)
    store.close()
