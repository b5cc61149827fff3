"""`parallelize`: scans and probes a model, compares it across ranks, makes a plan, and applies it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from monarch_kernel.errors import PlanError
from monarch_kernel.net.memory.limits import room
from monarch_kernel.train.parallel.apply_plan import apply_plan
from monarch_kernel.train.parallel.cross_rank import compare_models, group_of, names_in_words, spread
from monarch_kernel.train.parallel.meta_init import Initialise, Making, check_can_be_made, is_meta
from monarch_kernel.train.parallel.optimizers import check_fresh, found, nbytes_each, renew
from monarch_kernel.train.parallel.probe import Example, probe
from monarch_kernel.train.parallel.scan_model import module_names, named, scan
from monarch_kernel.train.parallel.tensor_parallel import prove
from monarch_kernel.train.planning.model_facts import ModelFacts
from monarch_kernel.train.planning.plan import Plan
from monarch_kernel.train.planning.request import PlanRequest, Resources
from monarch_kernel.train.planning.strategy import make_plan
from monarch_kernel.train.run_on_all import run_on_all_ranks

__all__ = ["parallelize", "plan_for", "plan_of"]

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    mesh: DeviceMesh | None = None,
    strategy: str | Plan = "auto",
    *,
    example: Example = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    units: Sequence[str] | None = None,
    replicate: Sequence[str] = (),
    tensor: Mapping[str, str] | None = None,
    tensor_axis: str = "tp",
    checkpoint: bool | None = None,
    precision: str = "",
    methods: Sequence[str] = (),
    init: Initialise | None = None,
    seed: int = 0,
    memory_nbytes: int | None = None,
    checks: bool | None = None,
    quiet: bool = False,
) -> M:
    """Distribute a model over the ranks of a mesh, so that training on parts of a batch equals training in a single process.

    Collective: all ranks call this with the same model. The model changes in place, and is trained as before: the loss of a
    rank is the mean over its own part of the batch.

    Args:
        model: on the CPU, on the device, or on ``meta``, where it takes no memory; then each rank initialises it part by part.
        mesh: a device mesh with named axes; None: all ranks along ``dp``.
        strategy: ``auto``, ``ddp``, ``fsdp``, ``hsdp``, ``tp``, ``fsdp+tp``, or a plan from `plan_of` or `plan_for`, which may
            be edited.
        example: arguments of the forward: a tensor, a tuple, a dict of keywords, or a function of the model, with the size of a
            rank's batch. It shows where parameters are used, and how much memory activations take.
        optimizer: an existing optimizer; it will train the new parameters. Other optimizers of the model are found, too.
        units: modules that FSDP wraps separately; None: repeated blocks, and large modules.
        replicate: parameters that each rank holds whole.
        tensor: full names of linear layers and embeddings, with ``*`` for one part of a name -> ``colwise`` or ``rowwise``.
        tensor_axis: the axis of the mesh along which these are split.
        checkpoint: whether to recompute blocks in the backward; None: if memory requires it.
        precision: dtype of computation and of gathered parameters, such as ``bfloat16``; FSDP only.
        methods: methods of the model that the program calls besides its forward.
        init: initialises a module on the meta device, after its ``reset_parameters()``.
        seed: seed of the initial values of a model on ``meta``.
        memory_nbytes: memory that a rank may use; None: the free memory.
        checks: whether to check after each forward that all ranks entered the same units and that outputs are finite; None: on
            CPUs only, where this needs no wait for the device.
        quiet: whether rank 0 prints nothing about the plan.

    Returns:
        The model.

    Raises:
        PlanError: the model can't be distributed, or not in this way; the message says what to change. The model is unchanged,
            unless torch itself refused.
    """
    if isinstance(mesh, nn.Module) or not dist.is_initialized():
        _check_model(model, mesh)
        raise PlanError(
            "there is no process group here: call this on the ranks of a mesh (in a %%remote cell or an endpoint), or after "
            "torch.distributed.init_process_group(); plan_for(model, ...) plans without ranks"
        )
    if mesh is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("dp",))
    _check(mesh)
    device = mesh.device_type
    group = group_of(mesh)
    optimizers: list[Optimizer] = []

    def look() -> tuple[ModelFacts, int, PlanRequest]:
        _check_model(model, mesh)
        optimizers.extend(_optimizers(model, optimizer))
        request = PlanRequest(
            strategy if isinstance(strategy, str) else strategy.strategy,
            None if units is None else tuple(units),
            tuple(replicate),
            dict(tensor or {}),
            tensor_axis,
            checkpoint,
            precision,
        )
        check_fresh(optimizers)
        if is_meta(model):
            check_can_be_made(module_names(model), init)
        facts = _facts(model, example, device, methods, optimizers)
        return facts, memory_nbytes if memory_nbytes is not None else _free_nbytes(device), request

    seen = run_on_all_ranks(group, "parallelize", look, PlanError)
    compare_models([facts for facts, _, _ in seen])
    if any(theirs != seen[0][2] for _, _, theirs in seen):
        raise PlanError("the ranks request different plans: call parallelize with the same arguments on all ranks")
    facts, _, request = seen[0]
    resources = Resources(_axes(mesh), _hosts(), min(free for _, free, _ in seen), device)
    plan = strategy if isinstance(strategy, Plan) else make_plan(facts, resources, request)
    if dict(plan.axes) != dict(resources.axes):
        raise PlanError(
            f"the plan is for a mesh of {dict(plan.axes)}, but this one is {dict(resources.axes)}: make a plan for these axes, "
            "or start such a mesh"
        )
    if plan.precision and not plan.shard_axes:
        raise PlanError(f"precision= needs FSDP; with {plan.strategy} use torch.autocast around the forward")

    notes = list(plan.notes)
    if not is_meta(model):
        values = {name: param.data for name, param in named(model).items()} | dict(model.named_buffers())
        if differ := spread(_once(values), group):
            notes.append(f"the ranks had different values of {names_in_words(differ)}: all now have those of rank 0")
        if not plan.shard_axes:
            model.to(device)
    if plan.tensor and example is not None and not is_meta(model):
        run_on_all_ranks(
            group, "parallelize", lambda: prove(model, plan.tensor, mesh[plan.tensor_axis], example), PlanError
        )
    old = {id(param): name for name, param in named(model).items()}
    holds = list(named(model).values())  # else an id could be reused
    making = Making(seed, init, device)
    apply_plan(model, plan, mesh, making, methods, checks if checks is not None else device == "cpu")
    if changed := renew(optimizers, old, named(model)):
        notes.append(f"{', '.join(changed)} was created before, and now trains the new parameters")
    del holds
    plan = plan.edit(notes=tuple(notes))
    model.__dict__["_monarch_plan"] = plan
    if not quiet and dist.get_rank() == 0:
        print(plan.summary(), *(f"  {note}" for note in notes), sep="\n", flush=True)
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """The plan by which a model was parallelized; None if it was not."""
    plan: Plan | None = model.__dict__.get("_monarch_plan")
    return plan


def plan_for(
    model: nn.Module,
    axes: Mapping[str, int],
    strategy: str = "auto",
    *,
    example: Example = None,
    hosts: int = 1,
    device: str = "cpu",
    memory_nbytes: int | None = None,
    methods: Sequence[str] = (),
    optimizer: Optimizer | None = None,
    **requests: Any,
) -> Plan:
    """The plan that `parallelize` would make; needs no ranks, and changes nothing.

    Args:
        model: the model; preferably on the meta device, where it takes no memory.
        axes: axes of the mesh, with their sizes.
        strategy: as for `parallelize`; so are the other arguments unless noted.
        example: arguments of the forward; its tensors may be on the meta device, too.
        hosts: number of machines.
        device: ``cpu`` or ``cuda``.
        memory_nbytes: memory that a rank may use; None: no limit.
        methods: methods of the model that the program calls besides its forward.
        optimizer: the optimizer that will be used; None: one like Adam.
        requests: ``units``, ``replicate``, ``tensor``, ``tensor_axis``, ``checkpoint`` and ``precision``.

    Raises:
        PlanError: there is no such plan; the message says why.
    """
    allowed = set(PlanRequest.__dataclass_fields__) - {"strategy"}
    if wrong := sorted(set(requests) - allowed):
        raise TypeError(f"plan_for has no argument {', '.join(wrong)}; it has {', '.join(sorted(allowed))}")
    facts = _facts(model, example, device, methods, _optimizers(model, optimizer))
    return make_plan(facts, Resources(dict(axes), hosts, memory_nbytes or 0, device), PlanRequest(strategy, **requests))


def _facts(
    model: nn.Module, example: Example, device: str, methods: Sequence[str], optimizers: Sequence[Optimizer]
) -> ModelFacts:
    for method in methods:
        if not callable(getattr(model, method, None)):
            raise PlanError(f"methods: the model has no method {method!r}")
    facts = scan(model, nbytes_each(optimizers))
    return facts if example is None else probe(model, example, facts, device, methods)


def _optimizers(model: nn.Module, given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    named_ones = [] if given is None else [given] if isinstance(given, Optimizer) else list(given)
    return list({id(each): each for each in (*named_ones, *found(model))}.values())


def _check_model(model: object, mesh: object) -> None:
    if isinstance(mesh, nn.Module) or not isinstance(model, nn.Module):
        raise TypeError("parallelize(model, mesh, ...) takes an nn.Module and a DeviceMesh, in this order")
    if plan_of(model) is not None:
        raise PlanError("the model is parallelized already; create it again to parallelize it differently")


def _check(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a torch DeviceMesh, like the variable mesh on ranks, not a {type(mesh).__name__}"
        )
    if not mesh.mesh_dim_names:
        raise PlanError("the mesh has no names for its axes: init_device_mesh(..., mesh_dim_names=('dp',))")


def _axes(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape))


def _hosts() -> int:
    """The number of hosts, from the environment that torchrun or a mesh sets."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()
    return max(1, dist.get_world_size() // here)


def _free_nbytes(device: str) -> int:
    """The memory that is free for this rank."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return room().nbytes // (int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size())


def _once(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor under one name."""
    return dict({tensor.data_ptr() or id(tensor): (name, tensor) for name, tensor in tensors.items()}.values())
