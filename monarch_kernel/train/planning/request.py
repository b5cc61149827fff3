"""The inputs of a plan besides the model: what the user requests, and the available ranks and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

__all__ = ["STRATEGIES", "Axes", "PlanRequest", "Resources", "Strategy"]

Strategy = Literal["none", "ddp", "fsdp", "hsdp", "tp", "fsdp+tp"]
STRATEGIES: tuple[Strategy, ...] = ("none", "ddp", "fsdp", "hsdp", "tp", "fsdp+tp")

Axes = Mapping[str, int]
"""Named axes of a mesh with their sizes, in order."""


@dataclass(frozen=True)
class Resources:
    """The resources for a model.

    Attributes:
        axes: axes of the mesh; the last ones are those within a host.
        hosts: number of hosts.
        free_nbytes: free memory of the rank with the least; 0 if unknown.
        device: ``cpu`` or ``cuda``.
    """

    axes: Axes
    hosts: int = 1
    free_nbytes: int = 0
    device: str = "cpu"

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return prod(self.axes.values())


@dataclass(frozen=True)
class PlanRequest:
    """The requests of the user.

    Attributes:
        strategy: ``auto``, or one of `STRATEGIES`.
        units: full names of modules to wrap separately; None: choose them.
        replicate: full names of parameters that every rank holds whole.
        tensor: full names of linear layers and embeddings -> ``colwise`` or ``rowwise``; ``*`` stands for one part of a name.
        tensor_axis: the axis of the mesh along which these are split.
        checkpoint: whether to recompute blocks in the backward; None: if memory requires it.
        precision: dtype of computation and of gathered parameters, such as ``bfloat16``; empty: that of the parameters.
    """

    strategy: str = "auto"
    units: Sequence[str] | None = None
    replicate: Sequence[str] = ()
    tensor: Mapping[str, str] = field(default_factory=dict)
    tensor_axis: str = "tp"
    checkpoint: bool | None = None
    precision: str = ""
