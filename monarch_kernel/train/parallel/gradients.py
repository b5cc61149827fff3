"""Gradients of a model that is spread, of which some are split and others whole."""

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
    """Scale all gradients so that their norm is at most this; as ``torch.nn.utils.clip_grad_norm_``, of the whole model.

    That one refuses gradients of which some are split and others are not, and gives a norm that is split, too. Collective.

    Args:
        params: the model, or parameters of it, the same on all ranks.
        max_norm: of all gradients, as if they were one vector.
        norm_type: which norm; ``inf`` for the largest of their elements.
        error_if_nonfinite: whether a norm that is no number is an error.

    Returns:
        The norm before, a tensor of no dims, the same on all ranks.

    Raises:
        RuntimeError: the norm is no number, and that was to be an error; no gradient has changed.
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
        raise RuntimeError(f"the norm of the gradients is {total.item()}, and no gradient has changed")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for grad in grads:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(scale.to(local.device))
    return total
