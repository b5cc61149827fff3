"""A script of torch's DTensor: every rank runs the same program, and the placements are those of ours."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from benchmarks.tensors.work import AXES, PLAN, WIDE, data, main, median_of, mlp, no_such, peak_mib, reset_peak, train

SHARDED = ("sharded_sgd", "sharded_adamw", "first", "matmul", "peak")


def whole(value: Any) -> float:
    """Return the value of a scalar; all ranks take part."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def spread(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    """Place the parameters of a model."""
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = PLAN.get(f"{path}.{name}")
            placements: list[Placement] = [Replicate(), Replicate() if dim is None else Shard(dim)]
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return model


def stepper(mesh: DeviceMesh, kind: Any, width: int = 512) -> Callable[[], Any]:
    """Make a function that trains a step; returns the loss."""
    model = spread(mesh, mlp(width))
    x, y = (distribute_tensor(value, mesh, [Shard(0), Replicate()]) for value in data(256))
    optimizer = kind(model.parameters(), lr=0.01)
    return lambda: train(model, optimizer, x, y)


def figure(mesh: DeviceMesh, name: str) -> float:
    """Take one figure; all ranks run the same."""
    if name == "first":
        step = stepper(mesh, torch.optim.AdamW)
        dist.barrier()
        begin = time.perf_counter()
        whole(step())
        return time.perf_counter() - begin
    if name == "matmul":
        flat = init_device_mesh("cpu", (dist.get_world_size(),))
        x = distribute_tensor(torch.ones(WIDE, WIDE), flat, [Shard(0)])
        w = distribute_tensor(torch.ones(WIDE, WIDE), flat, [Replicate()])
        return 1e3 * median_of(lambda: whole((x @ w).sum()), 1)
    if name == "peak":
        before = reset_peak()
        step = stepper(mesh, torch.optim.AdamW, 3072)
        for _ in range(3):
            whole(step())
        return peak_mib(before)
    step = stepper(mesh, {"sharded_sgd": torch.optim.SGD, "sharded_adamw": torch.optim.AdamW}[name])
    return 1e3 * median_of(lambda: whole([step() for _ in range(10)][-1]), 10)


def work(rank: int, ranks: int, name: str, folder: str) -> None:
    """Be a rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = figure(init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES)), name)
    if rank == 0:
        with open(os.path.join(folder, "figure"), "w") as file:
            file.write(repr(found))
    dist.barrier()  # gloo ends a process that it leaves in a collective
    dist.destroy_process_group()


class Spmd:
    """Starts a script's processes for each figure."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def figure(self, name: str) -> float:
        """Take one figure."""
        if name not in SHARDED:
            raise no_such()
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(work, (self.ranks, name, folder), nprocs=self.ranks)
            with open(os.path.join(folder, "figure")) as file:
                return float(file.read())

    def stop(self) -> None:
        """End nothing: the processes of a figure have ended."""


if __name__ == "__main__":
    main(Spmd)
