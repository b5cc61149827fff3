"""Estimates the memory that a rank needs for training, and the bytes that it sends, by strategy.

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, for parameters,
gradients and optimizer; Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005,
for the bytes that a rank sends in a ring. Activations are those that one forward of the example saved in the probe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monarch_kernel.train.planning.model_facts import ModelFacts, ParamFacts
from monarch_kernel.train.planning.request import Strategy
from monarch_kernel.train.planning.wrapping import Wrapping, unit_of

__all__ = ["MemoryEstimate", "Sent", "Split", "needed", "sent"]

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Split:
    """The number of ranks along each dimension of parallelism.

    Attributes:
        copies: replicas of the whole model.
        shards: ranks among which FSDP splits one replica.
        parts: ranks among which matrices are split.
    """

    copies: int = 1
    shards: int = 1
    parts: int = 1


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a rank needs.

    Attributes:
        parameters: parameters that the rank keeps.
        gradients: gradients that the rank keeps.
        optimizer: state of the optimizer.
        gathered: the two largest units, which can be whole at the same time, with gradients.
        activations: activations saved for the backward.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The sum of all these."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.activations


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in a step, by collective."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0

    @property
    def total(self) -> int:
        """The sum of all collectives."""
        return self.all_gather + self.reduce_scatter + self.all_reduce


def needed(
    facts: ModelFacts,
    split: Split,
    wrapping: Wrapping,
    *,
    tensor: Mapping[str, str],
    checkpoint: Sequence[str] = (),
    precision: str = "",
) -> MemoryEstimate:
    """Estimate the memory of a rank; activations are those of the example on each rank."""

    def here(param: ParamFacts) -> float:
        whole = param.nbytes / _parts(param, split, tensor)
        return whole if param.name in wrapping.kept else whole / split.shards

    trains = [param for param in facts.params if param.trains]
    by_unit: dict[str, float] = {}
    gathered = 0.0
    if split.shards > 1:
        for param in facts.params:
            if param.name not in wrapping.kept:
                unit = unit_of(param.owners[0], wrapping.units)
                nbytes = param.numel * _ITEMSIZES.get(precision, param.itemsize) / _parts(param, split, tensor)
                by_unit[unit] = by_unit.get(unit, 0.0) + nbytes
        gathered = 2 * sum(sorted(by_unit.values())[-2:])  # with the gradient of each before it is reduced
    recomputed = [facts.modules[name] for name in checkpoint if name in facts.modules]
    saved = sum(module.activation_nbytes - module.input_nbytes for module in recomputed)
    again = max((module.activation_nbytes for module in recomputed), default=0)
    return MemoryEstimate(
        parameters=round(sum(map(here, facts.params))),
        gradients=round(sum(map(here, trains))),
        optimizer=round(sum(here(param) / param.itemsize * facts.optimizer_nbytes for param in trains)),
        gathered=round(gathered),
        activations=max(0, facts.activation_nbytes - saved + again),
    )


def sent(
    facts: ModelFacts,
    strategy: Strategy,
    split: Split,
    wrapping: Wrapping,
    *,
    tensor: Mapping[str, str],
    precision: str = "",
) -> Sent:
    """Estimate the bytes that a rank sends in a step for parameters and gradients, without those for split matrices."""
    everyone = split.copies * split.shards
    gathers = scatters = reduces = 0.0
    for param in facts.params:
        whole = param.nbytes / _parts(param, split, tensor)
        if strategy == "ddp" or param.name in wrapping.kept or split.shards == 1:
            reduces += _ring(everyone) * 2 * whole * param.trains
            continue
        moved = param.numel * _ITEMSIZES.get(precision, param.itemsize) / _parts(param, split, tensor)
        is_roots = not unit_of(param.owners[0], wrapping.units)  # stays gathered between forward and backward
        gathers += _ring(split.shards) * moved * (1 if is_roots else 2)
        scatters += _ring(split.shards) * whole * param.trains
        reduces += _ring(split.copies) * 2 * whole / split.shards * param.trains
    return Sent(round(gathers), round(scatters), round(reduces))


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _parts(param: ParamFacts, split: Split, tensor: Mapping[str, str]) -> int:
    """The number of ranks that split a parameter by tensor parallelism; the bias of a rowwise layer is not split."""
    style = tensor.get(param.owners[0], "")
    is_whole = not style or (style == "rowwise" and len(param.shape) == 1)
    return 1 if is_whole else split.parts
