"""Updates optimizers that were created before the model was distributed; they would silently train the old parameters."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from monarch_kernel.errors import PlanError

__all__ = ["check_fresh", "found", "nbytes_each", "renew"]

_KINDS = {"SGD": 0, "Adagrad": 4, "RMSprop": 4, "Lion": 4, "Muon": 4, "Adafactor": 0}
"""Bytes of optimizer state per element; other optimizers are assumed to need as many as Adam."""


def found(model: nn.Module) -> list[Optimizer]:
    """All optimizers of this process that train a parameter of the model."""
    own = {id(param) for param in model.parameters()}
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), Optimizer)  # isinstance() would read __class__ of all objects, at which some warn
        and any(id(param) in own for group in each.param_groups for param in group["params"])
    ]


def nbytes_each(optimizers: Sequence[Optimizer]) -> float:
    """Bytes of state that optimizers keep per element of a parameter."""
    sizes = []
    for each in optimizers:
        size = _KINDS.get(type(each).__name__, 8)
        if size == 0 and any(group.get("momentum") for group in each.param_groups):
            size = 4
        sizes.append(size)
    return float(max(sizes, default=8))


def check_fresh(optimizers: Sequence[Optimizer]) -> None:
    """Check that no optimizer has made a step.

    Raises:
        PlanError: an optimizer has made a step.
    """
    for each in optimizers:
        if each.state:
            raise PlanError(
                f"the optimizer ({type(each).__name__}) has made steps already, with state for whole parameters; parallelize "
                "the model first, then create the optimizer, or load its state from a checkpoint"
            )


def renew(optimizers: Sequence[Optimizer], old: Mapping[int, str], new: Mapping[str, nn.Parameter]) -> list[str]:
    """Replace the old parameters of optimizers by the new ones; returns the types of the optimizers that changed.

    Args:
        optimizers: optimizers without state.
        old: id of an old parameter -> its name.
        new: name -> new parameter.
    """
    changed = []
    for each in optimizers:
        has_old = False
        for group in each.param_groups:
            replaced: list[torch.Tensor] = []
            for param in group["params"]:
                now = new.get(old.get(id(param), ""), param)
                has_old |= now is not param
                replaced.append(now)
            group["params"] = replaced
        if has_old:
            changed.append(type(each).__name__)
    return changed
