"""Resets the state that an interrupted forward or backward leaves in FSDP and DDP.

FSDP and DDP track the progress of a step. After a step that an error or an interrupt has cut off, they take the next step for
the rest of it: FSDP silently stops reducing gradients. So their state is reset before the next forward, and before a snapshot
is restored. Gradients that such a step leaves in parameters belong to the program, which clears them as before any step.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FSDPModule

__all__ = ["ddp_of", "forget_step", "is_in_backward"]

_GROUPS = ("shard_process_group", "replicate_process_group")


def is_in_backward() -> bool:
    """Whether this thread is in a backward, for example when it recomputes a part of a forward."""
    number: int = torch._C._current_graph_task_id()
    return number != -1


def forget_step(model: nn.Module) -> None:
    """Reset FSDP and DDP, so that they take the next forward for the start of a step, and free gathered parameters.

    Raises:
        RuntimeError: the model is distributed over a process group that no longer exists, or this version of torch can't reset.
    """
    if _is_of_former_group(model):
        raise RuntimeError(
            "the model belongs to a process group that no longer exists, because the group was formed again after an interrupt "
            "or a death: run the cells again that create the model and its optimizer"
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _forget(module)
        elif (ddp := ddp_of(module)) is not None:
            ddp.reducer._reset_state()


def _forget(fsdp: Any) -> None:
    state = fsdp._get_fsdp_state()
    if not state._is_root:  # it has had no forward, or its root resets it
        fsdp.reshard()
    elif hasattr(fsdp, "reset_iter_state"):
        fsdp.reset_iter_state()
        for each in state._state_ctx.all_states:
            _drop_gathered_gradients(each)
    elif state._state_ctx.post_backward_final_callback_queued or state._state_ctx.iter_forward_root is not None:
        raise RuntimeError(
            f"an error or an interrupt cut off a step, and FSDP of torch {torch.__version__} can't recover from that: run the "
            "cells again that create the model and its optimizer (or use torch 2.13 or later)"
        )
    else:
        fsdp.reshard()


def _is_of_former_group(model: nn.Module) -> bool:
    known = dist.distributed_c10d._world.pg_map
    groups = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            fsdp: Any = module
            for part in _groups(fsdp._get_fsdp_state()):  # its mesh looks groups up by name, and finds new ones, too
                groups += [getattr(part.mesh_info, name, None) for name in _GROUPS]
        elif (ddp := ddp_of(module)) is not None:
            groups.append(ddp.process_group)
    return any(group is not None and group not in known for group in groups)


def _groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP unit; older torch versions have at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _drop_gathered_gradients(state: Any) -> None:
    for group in _groups(state):
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def ddp_of(module: nn.Module) -> Any:
    """The DDP wrapper that averages the gradients of a module, if any."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return module
    state = cast("Any", replicate).state(module)
    found = None if state is None else getattr(state, "_ddp_weakref", None)
    return None if found is None else found()
