"""What a plan is asked for, and what there is to carry it out with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

__all__ = ["STRATEGIES", "Axes", "Strategy", "Terms", "Wish"]

Strategy = Literal["none", "ddp", "fsdp", "hsdp", "tp", "fsdp+tp"]
STRATEGIES: tuple[Strategy, ...] = ("none", "ddp", "fsdp", "hsdp", "tp", "fsdp+tp")

Axes = Mapping[str, int]
"""Named axes of a mesh with their sizes, in order."""


@dataclass(frozen=True)
class Terms:
    """What there is.

    Attributes:
        axes: of the mesh; the last ones are those of one host.
        hosts: how many there are.
        free_nbytes: memory that is free for the smallest rank; 0 if nobody knows.
        device: ``cpu`` or ``cuda``.
    """

    axes: Axes
    hosts: int = 1
    free_nbytes: int = 0
    device: str = "cpu"

    @property
    def ranks(self) -> int:
        """How many there are."""
        return prod(self.axes.values())


@dataclass(frozen=True)
class Wish:
    """What the user asks for.

    Attributes:
        strategy: ``auto``, or one of `STRATEGIES`.
        units: full names of modules to wrap by themselves; None: find them.
        replicate: full names of parameters that every rank is to hold whole.
        tensor: full names of linear layers and embeddings -> ``colwise`` or ``rowwise``; ``*`` stands for one part of a name.
        tensor_axis: the axis of the mesh along which these are split.
        checkpoint: whether blocks are to be computed again in the backward; None: where memory asks for it.
        precision: dtype of the arithmetic and of what is gathered, such as ``bfloat16``; empty: that of the parameters.
    """

    strategy: str = "auto"
    units: Sequence[str] | None = None
    replicate: Sequence[str] = ()
    tensor: Mapping[str, str] = field(default_factory=dict)
    tensor_axis: str = "tp"
    checkpoint: bool | None = None
    precision: str = ""
