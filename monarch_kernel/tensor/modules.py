"""Modules of torch on the ranks of a mesh: each parameter becomes a sharded tensor.

Parameters with values are copied to the ranks. Those on the device meta have none: the ranks make their parts, and then the
module's own ``reset_parameters()`` initialises them, as operations on sharded tensors. So no process holds all of such a model,
and its values do not depend on the placements (`features.tensors.drawing`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from monarch_kernel.errors import TensorError
from monarch_kernel.tensor.device import Device
from monarch_kernel.tensor.distributed_tensor import DistributedTensor
from monarch_kernel.tensor.placements import filled, shard, texts_of

__all__ = ["Initialise", "Plan", "distribute"]

Plan = Mapping[str, Mapping[str, Any]]
"""Pattern of names of parameters or modules -> placements by axis."""

Initialise = Callable[[nn.Module], object]


class _Place(NamedTuple):
    """A parameter or buffer of a module.

    Attributes:
        module: The module that has it itself.
        prefix: The name of that module.
        name: Its name there.
        tensor: It.
        placements: By axis.
    """

    module: nn.Module
    prefix: str
    name: str
    tensor: torch.Tensor
    placements: Mapping[str, Any]

    @property
    def path(self) -> str:
        return f"{self.prefix}.{self.name}" if self.prefix else self.name


def distribute(device: Device, module: nn.Module, plan: Plan, init: Initialise | None = None) -> nn.Module:
    """Place the parameters and buffers of a module; see `ProcMesh.distribute`."""
    places = list(_places(module, plan))
    _check(device, places, plan, init)
    made: dict[int, torch.Tensor] = {}  # a tensor that the module has twice is one tensor afterwards
    fresh: dict[int, nn.Module] = {}
    for each in places:
        if id(each.tensor) not in made:
            made[id(each.tensor)] = _placed(device, each)
        if each.tensor.is_meta:
            fresh[id(each.module)] = each.module
        table: Any = each.module._parameters if isinstance(each.tensor, nn.Parameter) else each.module._buffers
        table[each.name] = made[id(each.tensor)]
    with torch.no_grad():
        for child in fresh.values():
            if callable(reset := getattr(child, "reset_parameters", None)):
                reset()
            if init is not None:
                init(child)
    return module


def _places(module: nn.Module, plan: Plan) -> Iterator[_Place]:
    first: dict[int, Mapping[str, Any]] = {}  # a tensor that the module has twice is placed as its first name says
    for prefix, child in module.named_modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is None:
                continue
            path = f"{prefix}.{name}" if prefix else name
            found = next((plan[pattern] for pattern in plan if _matches(pattern, path, prefix)), {})
            yield _Place(child, prefix, name, tensor, first.setdefault(id(tensor), found))


def _check(device: Device, places: list[_Place], plan: Plan, init: Initialise | None) -> None:
    """Check all that can fail before anything is changed.

    Raises:
        TensorError: A parameter is on ranks already, a pattern names nothing, a placement is not possible, or a module on the
            device meta can't be initialised.
        KeyError: The mesh has no such axis.
    """
    unused = [pattern for pattern in plan if not any(_matches(pattern, each.path, each.prefix) for each in places)]
    if unused:
        raise TensorError(f"no parameter of the module matches {', '.join(map(repr, unused))} of the plan")
    for each in places:
        if isinstance(each.tensor, DistributedTensor):
            raise TensorError(f"{each.path} is on ranks already")
        try:
            texts = texts_of(device.mesh, each.placements, (), each.tensor.dim())
        except TensorError as error:
            raise TensorError(f"{each.path} {tuple(each.tensor.shape)} can't be placed: {error}") from None
        if any(text.startswith("P") for text in texts):
            raise TensorError(f"{each.path} can't be Partial: place it as Replicate() or Shard(...)")
        is_made_by_itself = callable(getattr(each.module, "reset_parameters", None))
        if each.tensor.is_meta and init is None and not is_made_by_itself:
            raise TensorError(
                f"{each.path} has no values, and {type(each.module).__name__} has no reset_parameters() to make them: add this "
                "method, pass init=, or build the module on the CPU"
            )


def _placed(device: Device, place: _Place) -> torch.Tensor:
    tensor = place.tensor
    if tensor.is_meta:
        placed = filled(device, None, tuple(tensor.shape), tensor.dtype, place.placements)
    else:
        placed = shard(device, tensor.detach(), place.placements)
    return nn.Parameter(placed, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else placed


def _matches(pattern: str, path: str, prefix: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", ".*")
    return any(re.fullmatch(expression, name) for name in (path, prefix))
