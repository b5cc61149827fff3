"""A plan for distributing a model, and its explanation in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from monarch_kernel.base.text import format_nbytes, plain, plural
from monarch_kernel.train.planning.memory import MemoryEstimate, Sent
from monarch_kernel.train.planning.model_facts import ModelFacts
from monarch_kernel.train.planning.request import Axes, Resources, Strategy
from monarch_kernel.train.planning.wrapping import unit_of

__all__ = ["Option", "Plan", "axes_text", "does_not_fit", "nothing_fits", "reason_for", "several"]

_NAMES = {
    "none": "no parallelism",
    "ddp": "DDP",
    "fsdp": "FSDP",
    "hsdp": "HSDP",
    "tp": "tensor parallelism",
    "fsdp+tp": "FSDP and tensor parallelism",
}
_MAX_NAMES = 6


@dataclass(frozen=True)
class Option:
    """A strategy that was considered.

    Attributes:
        strategy: the strategy.
        checkpoint: whether blocks are recomputed in the backward.
        memory: memory that a rank needs for it.
        why_not: why it was not chosen; empty for the chosen one.
    """

    strategy: Strategy
    checkpoint: bool
    memory: MemoryEstimate
    why_not: str = ""


@dataclass(frozen=True)
class Plan:
    """How a model is distributed over the ranks of a mesh. Plain data: `edit` returns a changed plan, `explain` describes it.

    Attributes:
        strategy: ``none``, ``ddp``, ``fsdp``, ``hsdp``, ``tp`` or ``fsdp+tp``.
        axes: axes of the mesh.
        copy_axes: axes along which the model is replicated.
        shard_axes: axes along which FSDP shards it.
        tensor_axis: axis along which matrices are split; empty if none are.
        units: modules that are wrapped separately, each after the units in it.
        kept: parameters that each rank holds whole -> reason.
        tensor: modules that are split along ``tensor_axis`` -> ``colwise`` or ``rowwise``.
        checkpoint: modules that are recomputed in the backward.
        precision: dtype of computation and of gathered parameters; empty: that of the parameters.
        averaged: buffers that are averaged over the ranks after each step.
        unused: parameters that the forward of the example did not use; None without a probe.
        memory: estimate of the bytes that a rank needs.
        sent: estimate of the bytes that a rank sends in a step for parameters and gradients.
        free_nbytes: free memory of the rank with the least; 0 if unknown.
        flops: floating-point operations of one forward of the example on one rank, with its part of split matrices; 0 if
            unknown.
        reason: the reason for this strategy.
        options: all strategies that were considered.
        notes: reasons for other choices.
    """

    strategy: Strategy
    axes: Axes
    copy_axes: tuple[str, ...] = ()
    shard_axes: tuple[str, ...] = ()
    tensor_axis: str = ""
    units: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    tensor: Mapping[str, str] = field(default_factory=dict)
    checkpoint: tuple[str, ...] = ()
    precision: str = ""
    averaged: tuple[str, ...] = ()
    unused: tuple[str, ...] | None = None
    memory: MemoryEstimate = field(default_factory=MemoryEstimate)
    sent: Sent = field(default_factory=Sent)
    free_nbytes: int = 0
    flops: int = 0
    reason: str = ""
    options: tuple[Option, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def step_flops(self) -> int:
        """Floating-point operations of one rank for a step: those of the forward, and twice as many for the backward.

        Recomputation is not counted, as in the definition of model FLOP utilisation (Chowdhery et al. 2022, appendix B). 0 if
        unknown.
        """
        return 3 * self.flops

    def edit(self, **changes: Any) -> Plan:
        """A copy with some attributes changed; estimates are not updated.

        Raises:
            TypeError: there is no such attribute.
        """
        known = set(self.__dataclass_fields__)
        if wrong := sorted(set(changes) - known):
            raise TypeError(f"a plan has no {', '.join(wrong)}; it has {', '.join(sorted(known))}")
        return replace(self, **changes)

    def explain(self) -> str:
        """Explain in plain words, with figures, what was chosen and why, and what was not chosen."""
        return _explanation(self)

    def summary(self) -> str:
        """Summarise the plan in one line."""
        return _summary(self)

    def about(self, param: str) -> str:
        """Describe how the plan treats a parameter."""
        return _about(self, param)

    def __str__(self) -> str:
        return self.explain()

    def unit_of(self, param: str) -> str:
        """The full name of the unit that a parameter belongs to; empty for the model itself."""
        return unit_of(param.rpartition(".")[0], self.units)


def axes_text(sizes: Axes) -> str:
    """Format axes, such as ``dp=2, tp=4``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def several(names: Sequence[str], noun: str) -> str:
    """Format a count with its verb, such as ``1 buffer is`` or ``12 buffers are``."""
    return f"1 {noun} is" if len(names) == 1 else f"{len(names):,} {noun}s are"


def _summary(plan: Plan) -> str:
    """Summarise the plan in one line, such as ``FSDP over dp=4, 12 units; about 3.1 GiB a rank``."""
    parts = [_NAMES[plan.strategy]]
    if plan.strategy == "hsdp":
        parts.append(
            f"{axes_text(_some(plan, plan.copy_axes))} copies of {axes_text(_some(plan, plan.shard_axes))} shards"
        )
    elif plan.strategy != "none":
        parts.append(f"over {axes_text(plan.axes)}")
    said = " ".join(parts)
    if plan.units:
        said += f", {len(plan.units) + 1} units"
    if plan.kept:
        said += f", {len(plan.kept)} parameter{'s' * (len(plan.kept) > 1)} kept whole"
    if plan.checkpoint:
        said += f", {len(plan.checkpoint)} blocks recomputed"
    if plan.precision:
        said += f", {plan.precision}"
    return f"{said}; about {format_nbytes(plan.memory.total)} a rank"


def _explanation(plan: Plan) -> str:
    """Explain the plan in several lines, with reasons and figures."""
    free = f"; free: {format_nbytes(plan.free_nbytes)}" if plan.free_nbytes else ""
    lines = [_summary(plan), f"  why: {plan.reason}", f"  memory of a rank: {_sizes(plan.memory)}{free}"]
    if plan.sent.total:
        lines.append(f"  sent by a rank in a step: {_sizes(plan.sent)}")
    if plan.units:
        lines.append(f"  wrapped separately: {_list(plan.units)}; the rest is one unit")
    for why, names in _by_reason(plan.kept.items()):
        lines.append(f"  kept whole on each rank: {_list(names)}: {why}")
    for style, names in _by_reason(plan.tensor.items()):
        lines.append(f"  split {style} along {plan.tensor_axis}: {_list(names)}")
    if plan.checkpoint:
        lines.append(f"  recomputed in the backward (about a third more arithmetic): {_list(plan.checkpoint)}")
    if plan.unused:
        lines.append(f"  not used by the forward of the example, so without a gradient: {_list(plan.unused)}")
    lines += [f"  note: {note}" for note in plan.notes]
    for option in plan.options:
        if option.why_not:
            name = _NAMES[option.strategy] + (" with blocks recomputed" if option.checkpoint else "")
            lines.append(f"  not {name} ({format_nbytes(option.memory.total)} a rank): {option.why_not}")
    return "\n".join(map(plain, lines))


def _about(plan: Plan, param: str) -> str:
    """Describe how a plan treats a parameter, such as ``split by FSDP along dp, in the unit blocks.3``."""
    if param in plan.kept:
        return f"whole on each rank: {plan.kept[param]}"
    said = []
    if style := plan.tensor.get(param.rpartition(".")[0], ""):
        said.append(f"split {style} along {plan.tensor_axis}")
    if plan.strategy in ("fsdp", "hsdp", "fsdp+tp"):
        unit = plan.unit_of(param)
        said.append(f"split by FSDP along {', '.join(plan.shard_axes)}, in the unit {unit or 'of the model itself'}")
    return ", ".join(said) or "whole on each rank"


def does_not_fit(plan: Plan, room: float) -> str:
    """Explain why a strategy is not possible."""
    return f"needs {format_nbytes(plan.memory.total)} a rank, but {format_nbytes(round(room))} can be used"


def reason_for(plan: Plan, before: Sequence[Option], *, asked: bool) -> str:
    """Explain why this strategy was chosen."""
    if asked:
        return "you requested it"
    said = {
        "none": "there is one rank",
        "ddp": "the whole training state fits on each rank, and DDP sends the least",
        "hsdp": "the ranks of a host hold one copy together, and only gradients travel between hosts",
        "fsdp": f"the training state is sharded over {axes_text(_some(plan, plan.shard_axes))}",
        "tp": f"you name the layers to split along {plan.tensor_axis}",
        "fsdp+tp": f"you name the layers to split along {plan.tensor_axis}; FSDP shards the rest over the other axes",
    }[plan.strategy]
    if not plan.free_nbytes and plan.strategy == "ddp":
        said = "the amount of free memory is unknown"
    if plan.checkpoint and before:
        said += "; it fits if blocks are recomputed"
    return said


def nothing_fits(plans: Sequence[Plan], resources: Resources, facts: ModelFacts) -> str:
    """Explain why there is no plan, with a table, and suggest what would help."""
    free = format_nbytes(resources.free_nbytes)
    lines = [
        f"training {facts.numel / 1e6:,.1f} M parameters does not fit into the {free} that the smallest of "
        f"{plural(resources.ranks, 'rank')} has free:"
    ]
    for plan in plans:
        name = _NAMES[plan.strategy] + (" with blocks recomputed" if plan.checkpoint else "")
        lines.append(f"  {name}: {format_nbytes(plan.memory.total)} a rank ({_sizes(plan.memory)})")
    least = min(plans, key=lambda plan: plan.memory.total).memory
    state = (least.parameters + least.gradients + least.optimizer) * resources.ranks
    left = 0.85 * resources.free_nbytes - least.gathered - least.activations
    if left > 0:
        lines.append(
            f"about {plural(-(-state // int(left)), 'rank')} of this size would suffice; or use a smaller batch"
        )
    else:
        lines.append("more ranks do not help: use a smaller batch or smaller blocks, or split the blocks (tensor=)")
    return "\n".join(lines)


def _some(plan: Plan, names: Iterable[str]) -> dict[str, int]:
    return {name: plan.axes[name] for name in names}


def _sizes(figures: MemoryEstimate | Sent) -> str:
    """Format figures, such as ``parameters 1.2 GiB, gradients 1.2 GiB``."""
    sizes = {name.replace("_", "-"): nbytes for name, nbytes in asdict(figures).items() if nbytes}
    return ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in sizes.items())


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    return f"{shown} and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else shown


def _by_reason(items: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for name, why in items:
        found.setdefault(why, []).append(name)
    return list(found.items())
