"""Distributes a model over the ranks of a mesh: `parallelize` and related functions.

In a remote cell, an endpoint, or any torch.distributed program::

    from monarch_kernel.train.parallel import parallelize, plan_of

    model = parallelize(GPT(config), mesh, example=batch)
    optimizer = torch.optim.AdamW(model.parameters())
    print(plan_of(model).explain())
"""

from __future__ import annotations

from monarch_kernel.errors import PlanError
from monarch_kernel.train.parallel.for_accelerate import accelerate_config
from monarch_kernel.train.parallel.gradients import clip_grad_norm_
from monarch_kernel.train.parallel.parallelize import parallelize, plan_for, plan_of
from monarch_kernel.train.planning.model_facts import Needs
from monarch_kernel.train.planning.other_tools import deepspeed_config
from monarch_kernel.train.planning.plan import Plan

__all__ = [
    "Needs",
    "Plan",
    "PlanError",
    "accelerate_config",
    "clip_grad_norm_",
    "deepspeed_config",
    "parallelize",
    "plan_for",
    "plan_of",
]
