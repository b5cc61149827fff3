"""Chooses the plan: the first strategy that fits into memory, or the requested one, with the alternatives considered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from monarch_kernel.errors import PlanError
from monarch_kernel.train.planning.memory import Split, needed, sent
from monarch_kernel.train.planning.model_facts import ModelFacts
from monarch_kernel.train.planning.plan import Option, Plan, axes_text, does_not_fit, nothing_fits, reason_for, several
from monarch_kernel.train.planning.request import STRATEGIES, Axes, PlanRequest, Resources, Strategy
from monarch_kernel.train.planning.tensor_split import has_partner, matched
from monarch_kernel.train.planning.wrapping import SPARSE, Wrapping, blocks, wrap

__all__ = ["make_plan"]

_FITS: Mapping[Strategy, float] = {"none": 0.85, "ddp": 0.75, "hsdp": 0.8, "fsdp": 0.85, "tp": 0.8, "fsdp+tp": 0.85}
"""Fraction of the free memory that a strategy may use: the estimate does not include fragmentation, buffers of collectives or
caches, and replication leaves less space for these."""

_PRECISIONS = ("", "bfloat16", "float16", "float32")


def make_plan(facts: ModelFacts, resources: Resources, request: PlanRequest | None = None) -> Plan:
    """Choose how to distribute a model.

    Args:
        facts: facts about the model.
        resources: the available resources.
        request: the requests of the user; by default, everything is chosen here.

    Raises:
        PlanError: the request is impossible, or nothing fits into memory; the message has the figures.
    """
    request = request or PlanRequest()
    _check(request, resources)
    parts = resources.axes.get(request.tensor_axis, 1) if request.tensor else 1
    tensor = matched(facts, request.tensor, parts)
    wrapping = wrap(facts, request.units, request.replicate)
    repeated = tuple(name for name in blocks(facts) if facts.modules[name].calls != 0)
    options: list[Option] = []
    plans: list[Plan] = []
    for strategy, checkpoint in _candidates(request, resources, bool(tensor), bool(repeated)):
        plan = _draft(facts, resources, request, strategy, wrapping, tensor, repeated if checkpoint else ())
        plans.append(plan)
        room = _FITS[strategy] * resources.free_nbytes
        is_too_big = resources.free_nbytes > 0 and plan.memory.total > room
        why_not = does_not_fit(plan, room) if is_too_big else ""
        options.append(Option(strategy, checkpoint, plan.memory, why_not))
    at = next((i for i, option in enumerate(options) if not option.why_not), None)
    if at is None and request.strategy == "auto":
        raise PlanError(nothing_fits(plans, resources, facts))
    chosen = plans[at or 0]
    reason = reason_for(chosen, options[: at or 0], asked=request.strategy != "auto")
    if at is None:
        reason += f"; {options[0].why_not}"
    later = [option if i <= (at or 0) else replace(option, why_not="not needed") for i, option in enumerate(options)]
    return replace(chosen, reason=reason, options=tuple(later))


def _check(request: PlanRequest, resources: Resources) -> None:
    if request.strategy not in ("auto", *STRATEGIES):
        raise PlanError(f"strategy={request.strategy!r} must be one of auto, {', '.join(STRATEGIES)}")
    if request.precision not in _PRECISIONS:
        raise PlanError(f"precision={request.precision!r} must be one of {', '.join(filter(None, _PRECISIONS))}")
    if empty := [name for name, size in resources.axes.items() if size < 1]:
        raise PlanError(f"an axis of the mesh must have 1 rank or more, not {empty[0]}={resources.axes[empty[0]]}")
    wants_tensor = bool(request.tensor) or request.strategy in ("tp", "fsdp+tp")
    if wants_tensor and request.tensor_axis not in resources.axes:
        raise PlanError(
            f"the mesh has no axis {request.tensor_axis!r} along which to split matrices; it has "
            f"{axes_text(resources.axes)}: start a mesh with --axes dp=…,{request.tensor_axis}=…, or name another axis with "
            "tensor_axis="
        )
    if request.strategy in ("tp", "fsdp+tp") and not request.tensor:
        raise PlanError(
            f"strategy={request.strategy!r} needs the layers to split: "
            'tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'
        )
    if request.tensor and request.strategy in ("ddp", "hsdp", "none"):
        raise PlanError(f"strategy={request.strategy!r} splits no matrices; remove tensor=, or use 'tp' or 'fsdp+tp'")
    if request.strategy == "hsdp" and len([size for size in resources.axes.values() if size > 1]) < 2:
        raise PlanError(
            f"strategy='hsdp' needs a mesh with two axes, copies along the first and shards along the others; this one has "
            f"{axes_text(resources.axes)}: start a mesh with --axes copies=2,shards=…"
        )
    if request.strategy == "none" and resources.ranks > 1:
        raise PlanError(
            f"strategy='none' is for one rank, but there are {resources.ranks}: each would train a separate model; "
            "use 'ddp', or leave strategy out"
        )


def _candidates(
    request: PlanRequest, resources: Resources, has_tensor: bool, has_blocks: bool
) -> list[tuple[Strategy, bool]]:
    """The strategies to consider, in order: the simplest ones, which send the least, come first."""
    strategies: list[Strategy]
    if request.strategy != "auto":
        strategies = [request.strategy]  # type: ignore[list-item]
    elif has_tensor:
        others = resources.ranks // resources.axes[request.tensor_axis]
        strategies = ["tp", "fsdp+tp"] if others > 1 else ["tp"]
    elif resources.ranks == 1:
        strategies = ["none"]
    else:
        strategies = ["ddp", "hsdp", "fsdp"] if resources.hosts > 1 and len(resources.axes) > 1 else ["ddp", "fsdp"]
    recompute = [request.checkpoint] if request.checkpoint is not None else [False, True] if has_blocks else [False]
    if request.checkpoint and not has_blocks:
        raise PlanError(
            "checkpoint=True: the model has no repeated blocks; apply torch.utils.checkpoint in the model instead"
        )
    if request.strategy != "auto" and request.checkpoint is None and not resources.free_nbytes:
        recompute = [False]
    return [(strategy, checkpoint) for checkpoint in recompute for strategy in strategies]


def _draft(
    facts: ModelFacts,
    resources: Resources,
    request: PlanRequest,
    strategy: Strategy,
    wrapping: Wrapping,
    tensor: Mapping[str, str],
    checkpoint: Sequence[str],
) -> Plan:
    """The plan for one strategy, with its estimates."""
    splits_matrices = strategy in ("tp", "fsdp+tp")
    others = [axis for axis in resources.axes if not (splits_matrices and axis == request.tensor_axis)]
    copy_axes, shard_axes = _axes_of(strategy, others, resources.axes)
    split = Split(
        _size(resources.axes, copy_axes),
        _size(resources.axes, shard_axes),
        resources.axes[request.tensor_axis] if splits_matrices else 1,
    )
    has_shards = strategy in ("fsdp", "hsdp", "fsdp+tp")
    if not has_shards:  # DDP concatenates gradients, which is impossible for sparse ones
        wrapping = Wrapping(
            (), {name: why for name, why in wrapping.kept.items() if why == SPARSE and strategy == "ddp"}
        )
    notes = list(wrapping.notes)
    if splits_matrices:
        linears = {name: style for name, style in tensor.items() if facts.modules[name].kind == "Linear"}
        notes += [
            f"{name} is split {style} and no layer beside it the other way: its "
            f"{'output' if style == 'colwise' else 'input'} is whole on each rank"
            for name, style in linears.items()
            if not has_partner(name, linears)
        ]
    if facts.averaged and resources.ranks > 1:
        notes.append(
            f"{several(facts.averaged, 'buffer')} averaged over the ranks after each step; for statistics of the whole batch, "
            "use torch.nn.SyncBatchNorm"
        )
    if not facts.probed:
        notes.append(f"the model was not probed: {facts.why_not or 'there is no example='}")
    return Plan(
        strategy=strategy,
        axes=dict(resources.axes),
        copy_axes=copy_axes,
        shard_axes=shard_axes,
        tensor_axis=request.tensor_axis if splits_matrices else "",
        units=wrapping.units,
        kept=dict(wrapping.kept),
        tensor=dict(tensor) if splits_matrices else {},
        checkpoint=tuple(checkpoint),
        precision=request.precision,
        averaged=facts.averaged if resources.ranks > 1 else (),
        unused=tuple(param.name for param in facts.params if param.is_unused and param.trains)
        if facts.probed
        else None,
        memory=needed(facts, split, wrapping, tensor=tensor, checkpoint=checkpoint, precision=request.precision),
        sent=sent(facts, strategy, split, wrapping, tensor=tensor, precision=request.precision),
        free_nbytes=resources.free_nbytes,
        flops=facts.flops // (resources.axes[request.tensor_axis] if splits_matrices else 1),
        notes=tuple(notes),
    )


def _axes_of(strategy: Strategy, others: Sequence[str], axes: Axes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes along which the model is replicated, and those along which FSDP shards it."""
    if strategy in ("fsdp", "fsdp+tp"):
        return (), tuple(others)
    if strategy == "hsdp":
        wide = [axis for axis in others if axes[axis] > 1]
        return tuple(others[: others.index(wide[0]) + 1]), tuple(others[others.index(wide[0]) + 1 :])
    return tuple(others), ()


def _size(axes: Axes, names: Sequence[str]) -> int:
    size = 1
    for name in names:
        size *= axes[name]
    return size
