"""The configuration of accelerate for a plan, with a warning where this machine has none of the GPUs that it is for."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from monarch_kernel.train.planning import other_tools
from monarch_kernel.train.planning.plan import Plan

__all__ = ["accelerate_config"]

_WITHOUT_GPUS = (
    "accelerate launch needs GPUs for this configuration, and this machine has none: its processes would not train together, "
    "and with --cpu it starts only one. On CPUs, ACCELERATE_USE_CPU=true accelerate launch ... trains with DDP"
)


def accelerate_config(plan: Plan, model: Any) -> dict[str, Any]:
    """Return what ``accelerate launch --config_file`` reads, as YAML or JSON; warn if this machine has no GPU.

    Args:
        plan: the plan.
        model: the model, whose classes the configuration names.

    Raises:
        TypeError: ``plan`` is no plan, or ``model`` is no module.
        PlanError: accelerate has no such strategy, or the plan was made for another model.
    """
    config = other_tools.accelerate_config(plan, model)
    if config["num_processes"] > 1 and not torch.cuda.is_available():
        warnings.warn(_WITHOUT_GPUS, stacklevel=2)
    return config
