"""A plan, and what it says of itself in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.train.planning.facts import Facts
from monarch_kernel.train.planning.memory import Memory, Sent
from monarch_kernel.train.planning.request import Axes, Strategy, Terms
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
    """A strategy that was thought of.

    Attributes:
        strategy: which.
        checkpoint: whether blocks are computed again in the backward.
        memory: that a rank needs for it.
        why_not: why it was not chosen; empty for the one that was.
    """

    strategy: Strategy
    checkpoint: bool
    memory: Memory
    why_not: str = ""


@dataclass(frozen=True)
class Plan:
    """How a model is spread over the ranks of a mesh. Plain data: `edit` gives another, `explain` says all of it in words.

    Attributes:
        strategy: ``none``, ``ddp``, ``fsdp``, ``hsdp``, ``tp`` or ``fsdp+tp``.
        axes: of the mesh.
        copy_axes: those along which the model is replicated.
        shard_axes: those along which FSDP splits it.
        tensor_axis: the one along which matrices are split; empty if none are.
        units: modules that are wrapped by themselves, each after those below it.
        kept: parameters that each rank holds whole -> why.
        tensor: modules that are split along ``tensor_axis`` -> ``colwise`` or ``rowwise``.
        checkpoint: modules that are computed again in the backward.
        precision: dtype of the arithmetic and of what is gathered; empty: that of the parameters.
        averaged: buffers that are averaged over the ranks after each step.
        unused: parameters that the forward of the example did not use; None if there was none.
        memory: bytes that a rank needs, as far as is known.
        sent: bytes that a rank sends in a step for parameters and gradients.
        free_nbytes: memory that was free for the smallest rank; 0 if nobody knows.
        flops: of one forward of the example on one rank, of split matrices its part of the whole; 0 if nobody knows.
        reason: why this strategy.
        options: all that were thought of.
        notes: what else is as it is for a reason, in words.
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
    memory: Memory = field(default_factory=Memory)
    sent: Sent = field(default_factory=Sent)
    free_nbytes: int = 0
    flops: int = 0
    reason: str = ""
    options: tuple[Option, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def step_flops(self) -> int:
        """Floating-point operations of one rank for a step: of the forward, and twice as many of the backward.

        What is computed again to save memory is not counted, so that this is what model FLOP utilisation counts (Chowdhery et
        al. 2022, appendix B). 0 if nobody knows.
        """
        return 3 * self.flops

    def edit(self, **changes: Any) -> Plan:
        """The same with some attributes changed; its figures stay those of before.

        Raises:
            TypeError: an attribute is none.
        """
        known = set(self.__dataclass_fields__)
        if wrong := sorted(set(changes) - known):
            raise TypeError(f"a plan has no {', '.join(wrong)}; it has {', '.join(sorted(known))}")
        return replace(self, **changes)

    def explain(self) -> str:
        """In plain words, with figures: what was chosen, why, and what was not."""
        return _explanation(self)

    def summary(self) -> str:
        """In a line."""
        return _summary(self)

    def about(self, param: str) -> str:
        """What becomes of a parameter, in words."""
        return _about(self, param)

    def __str__(self) -> str:
        return self.explain()

    def unit_of(self, param: str) -> str:
        """The unit that a parameter belongs to, by their full names; empty for the model itself."""
        return unit_of(param.rpartition(".")[0], self.units)


def axes_text(sizes: Axes) -> str:
    """``dp=2, tp=4``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def several(names: Sequence[str], noun: str) -> str:
    """``1 buffer is``, ``12 buffers are``."""
    return f"1 {noun} is" if len(names) == 1 else f"{len(names):,} {noun}s are"


def _summary(plan: Plan) -> str:
    """The plan in a line: ``FSDP over dp=4, 12 units; 3.1 GiB a rank``."""
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
        said += f", {len(plan.checkpoint)} blocks computed again"
    if plan.precision:
        said += f", {plan.precision}"
    return f"{said}; about {format_nbytes(plan.memory.total)} a rank"


def _explanation(plan: Plan) -> str:
    """The plan with its reasons and figures, in lines."""
    free = f"; free: {format_nbytes(plan.free_nbytes)}" if plan.free_nbytes else ""
    lines = [_summary(plan), f"  why: {plan.reason}", f"  memory of a rank: {_sizes(plan.memory)}{free}"]
    if plan.sent.total:
        lines.append(f"  sent by a rank in a step: {_sizes(plan.sent)}")
    if plan.units:
        lines.append(f"  wrapped by themselves: {_list(plan.units)}; the rest is one unit")
    for why, names in _by_reason(plan.kept.items()):
        lines.append(f"  kept whole on each rank: {_list(names)}: {why}")
    for style, names in _by_reason(plan.tensor.items()):
        lines.append(f"  split {style} along {plan.tensor_axis}: {_list(names)}")
    if plan.checkpoint:
        lines.append(f"  computed again in the backward (about a third more arithmetic): {_list(plan.checkpoint)}")
    if plan.unused:
        lines.append(f"  not used by the forward of the example, so without gradient: {_list(plan.unused)}")
    lines += [f"  note: {note}" for note in plan.notes]
    for option in plan.options:
        if option.why_not:
            name = _NAMES[option.strategy] + (" with blocks computed again" if option.checkpoint else "")
            lines.append(f"  not {name} ({format_nbytes(option.memory.total)} a rank): {option.why_not}")
    return "\n".join(lines)


def _about(plan: Plan, param: str) -> str:
    """What becomes of a parameter: ``split by FSDP along dp, in the unit blocks.3``."""
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
    """Why a strategy is none."""
    return f"needs {format_nbytes(plan.memory.total)} a rank, and {format_nbytes(round(room))} can be used"


def reason_for(plan: Plan, before: Sequence[Option], *, asked: bool) -> str:
    """Why this strategy."""
    if asked:
        return "you ask for it"
    said = {
        "none": "there is one rank",
        "ddp": "all of the training's state fits on each rank, and DDP sends least",
        "hsdp": "the ranks of a host hold one copy together, and only gradients travel between hosts",
        "fsdp": f"the training's state is split over {axes_text(_some(plan, plan.shard_axes))}",
        "tp": f"you name the layers to split along {plan.tensor_axis}",
        "fsdp+tp": f"you name the layers to split along {plan.tensor_axis}; FSDP splits what is left over the other axes",
    }[plan.strategy]
    if not plan.free_nbytes and plan.strategy == "ddp":
        said = "how much memory is free is not known"
    if plan.checkpoint and before:
        said += "; it fits if blocks are computed again"
    return said


def nothing_fits(plans: Sequence[Plan], terms: Terms, facts: Facts) -> str:
    """Why there is no plan: a table, and what would help."""
    free = format_nbytes(terms.free_nbytes)
    lines = [
        f"the training of {facts.numel / 1e6:,.1f} M parameters does not fit into the {free} that are free for the smallest of "
        f"{terms.ranks} ranks:"
    ]
    for plan in plans:
        name = _NAMES[plan.strategy] + (" with blocks computed again" if plan.checkpoint else "")
        lines.append(f"  {name}: {format_nbytes(plan.memory.total)} a rank ({_sizes(plan.memory)})")
    least = min(plans, key=lambda plan: plan.memory.total).memory
    state = (least.parameters + least.gradients + least.optimizer) * terms.ranks
    left = 0.85 * terms.free_nbytes - least.gathered - least.activations
    if left > 0:
        lines.append(f"about {-(-state // int(left)):,} ranks of this size would do; or take a smaller batch")
    else:
        lines.append("more ranks do not help: take a smaller batch, or smaller blocks, or split them (tensor=)")
    return "\n".join(lines)


def _some(plan: Plan, names: Iterable[str]) -> dict[str, int]:
    return {name: plan.axes[name] for name in names}


def _sizes(figures: Memory | Sent) -> str:
    """``parameters 1.2 GiB, gradients 1.2 GiB``."""
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
