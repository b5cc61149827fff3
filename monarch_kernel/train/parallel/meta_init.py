"""Initialises a model on the meta device, module by module, with values that depend neither on the rank nor on the plan."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from monarch_kernel.errors import PlanError

__all__ = ["Initialise", "Making", "check_can_be_made", "is_meta", "materialise"]

Initialise = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Making:
    """How to initialise a model on the meta device.

    Attributes:
        seed: seed of all random numbers, the same on all ranks.
        init: called with each module, after its ``reset_parameters()`` if it has one.
        device: device of the initialised model.
    """

    seed: int
    init: Initialise | None
    device: str


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter of a model is on the meta device."""
    return any(param.is_meta for param in model.parameters())


def check_can_be_made(names: Mapping[nn.Module, str], init: Initialise | None) -> None:
    """Check that each module can initialise its own parameters.

    Raises:
        PlanError: a module can't.
    """
    for module, name in names.items():
        has_meta = any(
            each is not None and each.is_meta for each in (*module._parameters.values(), *module._buffers.values())
        )
        if has_meta and init is None and not callable(getattr(module, "reset_parameters", None)):
            raise PlanError(
                f"{name or 'the model'} ({type(module).__name__}) is on the meta device and has no reset_parameters() to "
                "initialise its own parameters and buffers: add this method, pass init=, or build the model on the CPU"
            )


def materialise(
    modules: Iterable[nn.Module],
    names: Mapping[nn.Module, str],
    making: Making,
    made: dict[int, nn.Parameter],
) -> None:
    """Allocate and initialise the direct parameters and buffers of modules; those that have values stay unchanged.

    The seed of each module depends on its name, so that values depend neither on the rank nor on the order of modules, which
    is that of the plan.

    Args:
        modules: the modules, without their submodules.
        names: full names of all modules.
        making: how to initialise them.
        made: id of a parameter without values -> the parameter that replaced it, in all calls for a model.
    """
    for module in modules:
        if not _allocate(module, making.device, made):
            continue
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(making.seed ^ zlib.crc32(names[module].encode()))
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            if making.init is not None:
                making.init(module)


def _allocate(module: nn.Module, device: str, made: dict[int, nn.Parameter]) -> bool:
    """Allocate a module's tensors that are on the meta device, and keep ties; returns False if there were none."""
    has_any = False
    for key, param in module._parameters.items():
        if param is not None and param.is_meta:
            has_any = True
            if id(param) not in made:
                made[id(param)] = nn.Parameter(
                    torch.empty_like(param, device=device), requires_grad=param.requires_grad
                )
            module._parameters[key] = made[id(param)]
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            has_any = True
            module._buffers[key] = torch.empty_like(buffer, device=device)
    return has_any
