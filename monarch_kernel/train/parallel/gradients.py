"""Clips gradients of a distributed model, some of which are sharded and others whole."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    params: nn.Module | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients to a maximum norm, like ``torch.nn.utils.clip_grad_norm_``, but for a distributed model; collective.

    The function in torch refuses a mix of sharded and whole gradients, and returns a sharded norm.

    Args:
        params: the model, or some of its parameters, the same on all ranks.
        max_norm: maximum norm of all gradients together, taken as one vector.
        norm_type: type of the norm; ``inf`` for the maximum of absolute values.
        error_if_nonfinite: whether a norm that is not finite is an error.

    Returns:
        The norm before scaling, a scalar tensor, the same on all ranks.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set; no gradient has changed.
    """
    params = list(params.parameters() if isinstance(params, nn.Module) else params)
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    groups: dict[object, list[torch.Tensor]] = {}
    for grad in grads:
        kind = grad.device_mesh if isinstance(grad, DTensor) else None
        groups.setdefault(kind, []).append(grad.coalesce() if grad.is_sparse else grad)
    norms = []
    for members in groups.values():
        dense = [grad._values() if grad.is_sparse else grad for grad in members]
        norm = torch.nn.utils.get_total_norm(dense, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(f"the norm of the gradients is {total.item()}; no gradient has changed")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for grad in grads:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(scale.to(local.device))
    return total
