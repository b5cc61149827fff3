"""`parallelize`: look, try, agree, plan, spread."""

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
from monarch_kernel.train.parallel.apply import apply_plan
from monarch_kernel.train.parallel.cross_rank import compare_models, group_of, names_in_words, spread
from monarch_kernel.train.parallel.meta_init import Initialise, Making, check_can_be_made, is_meta
from monarch_kernel.train.parallel.optimizers import check_fresh, found, nbytes_each, renew
from monarch_kernel.train.parallel.probe import Example, probe
from monarch_kernel.train.parallel.scan import module_names, named, scan
from monarch_kernel.train.parallel.tensor_parallel import prove
from monarch_kernel.train.planning.facts import Facts
from monarch_kernel.train.planning.plan import Plan
from monarch_kernel.train.planning.request import Terms, Wish
from monarch_kernel.train.planning.strategy import make_plan
from monarch_kernel.train.run_on_all import together

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
    """Spread a model over the ranks of a mesh so that training on parts of a batch equals training on the whole by one process.

    Collective: all ranks call it with the same model. It is changed in place, and trained as before: the loss of a rank is the
    mean over its own part of the batch.

    Args:
        model: on the CPU, on the device, or on ``meta``, where it takes no memory; then a rank makes it part by part.
        mesh: with named axes; None: all ranks along ``dp``.
        strategy: ``auto``, ``ddp``, ``fsdp``, ``hsdp``, ``tp``, ``fsdp+tp``, or a plan, such as `plan_of` or `plan_for` gives
            it, perhaps edited.
        example: what the forward is called with: a tensor, a tuple, a dict of keywords, or a function of the model, of the size
            of a rank's batch. By it is found where parameters are used, and what activations take.
        optimizer: one that exists already; it will train what the model has then. Others are found, too.
        units: modules that FSDP is to wrap by themselves; None: the blocks that repeat, and what is large.
        replicate: parameters that each rank is to hold whole.
        tensor: full names of linear layers and embeddings, with ``*`` for a part -> ``colwise`` or ``rowwise``.
        tensor_axis: the axis of the mesh along which these are split.
        checkpoint: whether blocks are computed again in the backward; None: if memory asks for it.
        precision: of the arithmetic and of what is gathered, such as ``bfloat16``; FSDP only.
        methods: of the model, besides its forward, by which it is used.
        init: gives a module of the meta device its first values, after its ``reset_parameters()``.
        seed: for a model on ``meta``: of its first values.
        memory_nbytes: how much a rank may use; None: what is free.
        checks: whether the ranks compare after each forward that they took the same way, and that outputs are finite; None: on
            CPUs, where it needs no wait for the device.
        quiet: whether to say nothing of the plan on rank 0.

    Returns:
        The model.

    Raises:
        PlanError: it can't be spread, or not so; the text says what to write. The model is as it was, unless torch itself
            refused.
    """
    if isinstance(mesh, nn.Module) or not isinstance(model, nn.Module):
        raise TypeError("parallelize(model, mesh, ...) takes an nn.Module and a DeviceMesh, in this order")
    if plan_of(model) is not None:
        raise PlanError("the model is parallelized already; make it anew to spread it in another way")
    if not dist.is_initialized():
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
    names = module_names(model)
    optimizers = _optimizers(model, optimizer)
    wish = Wish(
        strategy if isinstance(strategy, str) else strategy.strategy,
        None if units is None else tuple(units),
        tuple(replicate),
        dict(tensor or {}),
        tensor_axis,
        checkpoint,
        precision,
    )

    def look() -> tuple[Facts, int, Wish]:
        check_fresh(optimizers)
        if is_meta(model):
            check_can_be_made(names, init)
        facts = _facts(model, example, device, methods, optimizers)
        return facts, memory_nbytes if memory_nbytes is not None else _free_nbytes(device), wish

    seen = together(group, "parallelize", look, PlanError)
    compare_models([facts for facts, _, _ in seen])
    if any(theirs != seen[0][2] for _, _, theirs in seen):
        raise PlanError("the ranks ask for different things: call parallelize with the same arguments on all")
    facts, _, wish = seen[0]
    terms = Terms(_axes(mesh), _hosts(), min(free for _, free, _ in seen), device)
    plan = strategy if isinstance(strategy, Plan) else make_plan(facts, terms, wish)
    if dict(plan.axes) != dict(terms.axes):
        raise PlanError(f"the plan is for a mesh of {dict(plan.axes)}, and this one is {dict(terms.axes)}")
    if plan.precision and not plan.shard_axes:
        raise PlanError(f"precision= goes with FSDP; with {plan.strategy} write torch.autocast around the forward")

    notes = list(plan.notes)
    if not is_meta(model):
        values = {name: param.data for name, param in named(model).items()} | dict(model.named_buffers())
        if differ := spread(_once(values), group):
            notes.append(f"the ranks had different values of {names_in_words(differ)}: all have those of rank 0 now")
        if not plan.shard_axes:
            model.to(device)
    if plan.tensor and example is not None and not is_meta(model):
        together(group, "parallelize", lambda: prove(model, plan.tensor, mesh[plan.tensor_axis], example), PlanError)
    old = {id(param): name for name, param in named(model).items()}
    holds = list(named(model).values())  # else an id could become that of another
    making = Making(seed, init, device)
    apply_plan(model, plan, mesh, making, methods, checks if checks is not None else device == "cpu")
    if changed := renew(optimizers, old, named(model)):
        notes.append(f"{', '.join(changed)} was made before, and trains the new parameters now")
    del holds
    plan = plan.edit(notes=tuple(notes))
    model.__dict__["_monarch_plan"] = plan
    if not quiet and dist.get_rank() == 0:
        print(plan.summary(), *(f"  {note}" for note in notes), sep="\n", flush=True)
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """By which plan a model was spread; None if it was not."""
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
    **wishes: Any,
) -> Plan:
    """The plan that `parallelize` would make, without ranks; nothing is changed.

    Args:
        model: best on the meta device, where it takes no memory.
        axes: of the mesh, with their sizes.
        strategy: as for `parallelize`, and so are the rest.
        example: what the forward is called with; its tensors may be on the meta device, too.
        hosts: how many machines there are.
        device: ``cpu`` or ``cuda``.
        memory_nbytes: how much a rank may use; None: no limit.
        methods: of the model, besides its forward, by which it is used.
        optimizer: which will be used; None: one such as Adam.
        wishes: ``units``, ``replicate``, ``tensor``, ``tensor_axis``, ``checkpoint`` and ``precision``.

    Raises:
        PlanError: there is none; the text says why.
    """
    allowed = set(Wish.__dataclass_fields__) - {"strategy"}
    if wrong := sorted(set(wishes) - allowed):
        raise TypeError(f"plan_for takes no {', '.join(wrong)}; there is {', '.join(sorted(allowed))}")
    facts = _facts(model, example, device, methods, _optimizers(model, optimizer))
    return make_plan(facts, Terms(dict(axes), hosts, memory_nbytes or 0, device), Wish(strategy, **wishes))


def _facts(
    model: nn.Module, example: Example, device: str, methods: Sequence[str], optimizers: Sequence[Optimizer]
) -> Facts:
    for method in methods:
        if not callable(getattr(model, method, None)):
            raise PlanError(f"methods: the model has no method {method!r}")
    facts = scan(model, nbytes_each(optimizers))
    return facts if example is None else probe(model, example, facts, device, methods)


def _optimizers(model: nn.Module, given: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    named_ones = [] if given is None else [given] if isinstance(given, Optimizer) else list(given)
    return list({id(each): each for each in (*named_ones, *found(model))}.values())


def _check(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a torch DeviceMesh, as the variable mesh is on ranks, not a {type(mesh).__name__}")
    if not mesh.mesh_dim_names:
        raise PlanError("the mesh has no names for its axes: init_device_mesh(..., mesh_dim_names=('dp',))")


def _axes(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape))


def _hosts() -> int:
    """As torchrun and a mesh say it in the environment."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()
    return max(1, dist.get_world_size() // here)


def _free_nbytes(device: str) -> int:
    """What is free for this rank."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return room().nbytes // (int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size())


def _once(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor under one name."""
    return dict({tensor.data_ptr() or id(tensor): (name, tensor) for name, tensor in tensors.items()}.values())
