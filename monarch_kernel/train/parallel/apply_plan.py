"""Applies a plan: splits matrices first, then marks blocks for recomputation, then wraps units."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Mapping, Sequence
from math import prod

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from monarch_kernel.errors import PlanError
from monarch_kernel.train.parallel.cross_rank import group_of
from monarch_kernel.train.parallel.meta_init import Making, is_meta, materialise
from monarch_kernel.train.parallel.scan_model import module_names, named
from monarch_kernel.train.parallel.steps import AfterBackward, Averages, Checks, same_batches
from monarch_kernel.train.parallel.tensor_parallel import split_modules
from monarch_kernel.train.planning.plan import Plan

__all__ = ["apply_plan"]

# torch 2.13 renamed this option, and warns about the old name.
_DDP_TAKES = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS = {"forward_sync_buffers" if "forward_sync_buffers" in _DDP_TAKES else "broadcast_buffers": False}


def apply_plan(
    model: nn.Module, plan: Plan, mesh: DeviceMesh | None, making: Making, methods: Sequence[str], checks: bool
) -> None:
    """Distribute a model in place; collective. All ranks must have the same plan and the same values.

    Raises:
        PlanError: torch refuses a part of the plan.
    """
    names = module_names(model)
    by_name = {name: module for module, name in names.items()}
    for name in [*plan.units, *plan.checkpoint]:
        if name not in by_name:
            raise PlanError(
                f"the plan names {name!r}, but the model has no module of this name: make a plan for this model"
            )
    if plan.tensor:
        if is_meta(model):  # only whole modules can be split
            materialise(names, names, making, {})
        assert mesh is not None
        split_modules(model, plan.tensor, mesh[plan.tensor_axis])
        group = group_of(mesh, (plan.tensor_axis,))
        if group is not None:
            same_batches(model, group)
    for name in plan.checkpoint:
        checkpoint(by_name[name])
    for param in model.parameters():
        if not isinstance(param, DTensor) and not param.is_contiguous():  # neither FSDP nor DDP supports these
            param.data = param.data.contiguous()
    units = [by_name[name] for name in plan.units]
    if plan.shard_axes:
        assert mesh is not None
        _shard(model, plan, mesh, making, names, units, methods)
    elif is_meta(model):
        materialise(names, names, making, {})
    if mesh is None or mesh.size() == 1:
        return
    _average_the_rest(model, plan, mesh)
    everybody = group_of(mesh)
    if checks and everybody is not None:
        Checks(model, names, units, everybody)


def _shard(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    making: Making,
    names: Mapping[nn.Module, str],
    units: Sequence[nn.Module],
    methods: Sequence[str],
) -> None:
    """Wrap the units, inner ones first, each as soon as it has its values, so that no rank ever holds the whole model."""
    part = _submesh(mesh, plan)
    dtype = getattr(torch, plan.precision) if plan.precision else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype is not None else None)
    kept = set(plan.kept)
    done: set[nn.Module] = set()
    made: dict[int, nn.Parameter] = {}
    for unit in [*units, model]:
        inside = [module for module in unit.modules() if module not in done]
        done.update(inside)
        materialise(inside, names, making, made)
        own = {param for name, param in named(model).items() if name in kept}
        for param in own:
            if param.device.type not in ("meta", making.device):  # FSDP moves only what it manages
                param.data = param.data.to(making.device)
        try:
            fully_shard(unit, mesh=part, mp_policy=policy, ignored_params=own)
        except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
            raise PlanError(
                f"FSDP refuses {names[unit] or 'the model itself'}: {error}\nremove it from units=, or name the parameter in "
                "replicate=[...]"
            ) from error
    for method in methods:
        register_fsdp_forward_method(model, method)


def _submesh(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """The device mesh for FSDP: shards along one dim, or copies along the first dim and shards along the second."""
    shards = _one_dim(mesh, plan.shard_axes)
    if not plan.copy_axes or all(plan.axes[axis] == 1 for axis in plan.copy_axes):
        return shards
    if mesh.ndim == 2 and len(plan.copy_axes) == len(plan.shard_axes) == 1:
        return mesh
    ranks = mesh.mesh.reshape(prod(plan.axes[axis] for axis in plan.copy_axes), -1)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("copies", "shards"))


def _one_dim(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    if len(axes) == mesh.ndim == 1:
        return mesh
    part = mesh[tuple(axes)] if len(axes) < mesh.ndim else mesh
    return part if part.ndim == 1 else part._flatten()


def _average_the_rest(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Average over the ranks what FSDP does not manage: without FSDP, set up DDP, or with split matrices average everything."""
    params = named(model)
    others = tuple(axis for axis in plan.axes if axis != plan.tensor_axis)
    group = group_of(mesh, others)
    if group is None:
        return
    buffers = dict(model.named_buffers())
    averaged = [buffers[name] for name in plan.averaged if name in buffers]
    if plan.strategy == "ddp":
        kept = {params[name] for name in plan.kept}
        if any(param.requires_grad and param not in kept for param in params.values()):
            _replicate(model, plan, kept, _one_dim(mesh, others))
        whole = list(kept)
    elif plan.strategy == "tp":
        whole = list(dict.fromkeys(params.values()))
    else:
        whole = list(dict.fromkeys(params[name] for name in plan.kept))
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            module.weight._has_sparse_gradient = True  # type: ignore[attr-defined]
    AfterBackward(model, Averages(whole, averaged, group) if whole or averaged else lambda: None)


def _replicate(model: nn.Module, plan: Plan, kept: Collection[nn.Parameter], mesh: DeviceMesh) -> None:
    """Let DDP average all gradients except those of kept parameters."""
    if plan.unused is None:  # unknown, so DDP has to look for unused parameters, without a warning if there are none
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    replicate(
        model,
        ignored_modules=[each for each in model.modules() if not set(kept).isdisjoint(each.parameters(recurse=False))],
        device_mesh=mesh,
        find_unused_parameters=plan.unused is None or bool(plan.unused),
        **_NO_BUFFERS,
    )
