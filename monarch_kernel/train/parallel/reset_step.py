"""A forward or a backward that an error or an interrupt has cut off, and what it left behind.

FSDP and DDP note how far a step has come. After one that did not come to its end they take the next one for the rest of it:
FSDP reduces gradients no more, and says nothing. So that is forgotten before the next forward, and before something is put
back. Gradients that such a step has left with parameters are the program's: it clears them as it does before any step.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FSDPModule

__all__ = ["forget_step", "is_in_backward"]

_GROUPS = ("shard_process_group", "replicate_process_group")


def is_in_backward() -> bool:
    """Whether this thread computes gradients now, as where a part of a forward is computed again."""
    number: int = torch._C._current_graph_task_id()
    return number != -1


def forget_step(model: nn.Module) -> None:
    """Have FSDP and DDP take the next forward for the first one of a step, and give up parameters that are gathered.

    Raises:
        RuntimeError: they spread it over a process group that is no more; or this version of torch can't do that.
    """
    if _is_of_former_group(model):
        raise RuntimeError(
            "the model belongs to a process group that is no more, for it was formed anew after an interrupt or a death: run "
            "the cells again that make the model and its optimizer"
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _forget(module)
        elif (ddp := _ddp(module)) is not None:
            ddp.reducer._reset_state()


def _forget(fsdp: Any) -> None:
    state = fsdp._get_fsdp_state()
    if not state._is_root:  # it has had no forward, or its root sees to it
        fsdp.reshard()
    elif hasattr(fsdp, "reset_iter_state"):
        fsdp.reset_iter_state()
        for each in state._state_ctx.all_states:
            _drop_gathered_gradients(each)
    elif state._state_ctx.post_backward_final_callback_queued or state._state_ctx.iter_forward_root is not None:
        raise RuntimeError(
            f"a step was cut off, by an error or an interrupt, and FSDP of torch {torch.__version__} does not stand that: run "
            "the cells again that make the model and its optimizer (or use torch 2.13 or later)"
        )
    else:
        fsdp.reshard()


def _is_of_former_group(model: nn.Module) -> bool:
    known = dist.distributed_c10d._world.pg_map
    groups = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            fsdp: Any = module
            for part in _groups(fsdp._get_fsdp_state()):  # its mesh finds groups by name, also new ones
                groups += [getattr(part.mesh_info, name, None) for name in _GROUPS]
        elif (ddp := _ddp(module)) is not None:
            groups.append(ddp.process_group)
    return any(group is not None and group not in known for group in groups)


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of an FSDP unit, which torch once had one of."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _drop_gathered_gradients(state: Any) -> None:
    for group in _groups(state):
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def _ddp(module: nn.Module) -> Any:
    """What averages the gradients of a module, if that is DDP."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module
    state = cast("Any", replicate).state(module)
    found = None if state is None else getattr(state, "_ddp_weakref", None)
    return None if found is None else found()
