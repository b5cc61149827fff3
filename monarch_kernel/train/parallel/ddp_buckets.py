"""The order in which DistributedDataParallel sums gradients, which a restored run must have, too.

Theory of operation. DDP concatenates gradients in buckets, and sums each by an all_reduce. In its first step a bucket has the
parameters in the order of the module. Before the second step DDP builds the buckets again, in the order in which the gradients
of the first step became ready. The position in a bucket decides in which order the values of the ranks are added, so with more
than two ranks another order gives other last bits. A model that was created again to go on at step 40 would sum that step with
the buckets of a first step. So a snapshot has the order, and a restored model gets it by a backward of zeros, in which the
gradients become ready in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate

from monarch_kernel.train.parallel.reset_step import ddp_of

__all__ = ["order_of_buckets", "set_order_of_buckets", "started_ddp"]

_ORDER = "_monarch_order_of_buckets"


def order_of_buckets(ddp: Any) -> list[str]:
    """Return the names of the parameters in the order of the buckets; empty if these are still those of the first step.

    If the buckets are due to be built again, that happens here and not in the next forward. All ranks call it.
    """
    found: list[str] | None = getattr(ddp, _ORDER, None)
    if found is not None:
        return found
    if not _has_usual_buckets(ddp):
        return []
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
    if not getattr(ddp, "_has_rebuilt_buckets", False):
        return []
    names = {id(param): name for name, param in ddp.module.named_parameters()}
    buckets = sorted(ddp.reducer._get_zeros_like_grad_buckets(), key=lambda bucket: bucket.index())
    order = [names[id(param)] for bucket in buckets for param in bucket.parameters()]
    setattr(ddp, _ORDER, order)  # it does not change again
    return order


def started_ddp(module: nn.Module) -> Any:
    """Return the DDP wrapper of a module, or None; a wrapper that `replicate` makes with the first forward is made now."""
    state = cast("Any", replicate).state(module)
    if state is not None and (getattr(state, "_init_args", None) or getattr(state, "_init_kwargs", None)):
        state.lazy_init()
    return ddp_of(module)


def set_order_of_buckets(ddp: Any, order: Sequence[str]) -> bool:
    """Build the buckets of a model that has made no step in this order; returns whether that was possible. Collective.

    Args:
        ddp: the model, with the same parameters on all ranks.
        order: what `order_of_buckets` returned; empty for the buckets of the first step.
    """
    params = {name: param for name, param in ddp.module.named_parameters() if param.requires_grad}
    if not order or getattr(ddp, "_has_rebuilt_buckets", False):
        return False
    if not _has_usual_buckets(ddp) or params.keys() != set(order) or any(map(_has_hooks, params.values())):
        return False
    ordered = [params[name] for name in order]
    if len({param.device for param in ordered}) != 1:
        return False
    grads = [param.grad for param in ordered]
    for param in ordered:
        param.grad = None
    with torch.enable_grad():
        chain = torch.zeros((), device=ordered[0].device, requires_grad=True)
        for param in reversed(ordered):
            chain = _Chain.apply(chain, param)  # type: ignore[no-untyped-call]
        ddp.reducer.prepare_for_forward()
        ddp.reducer.prepare_for_backward([])
        chain.backward()  # type: ignore[no-untyped-call]
    for param, grad in zip(ordered, grads):
        param.grad = grad
    ddp._has_rebuilt_buckets = bool(ddp.reducer._rebuild_buckets())
    return bool(ddp._has_rebuilt_buckets)


class _Chain(torch.autograd.Function):
    """Its backward gives a parameter a gradient of zeros, and goes on with the next parameter then."""

    @staticmethod
    def forward(ctx: Any, chain: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(param)
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (param,) = ctx.saved_tensors
        return grads[0], torch.zeros_like(param)


def _has_usual_buckets(ddp: Any) -> bool:
    """Whether DDP builds its buckets again after a step, in which nothing but an all_reduce happens to gradients."""
    return not (
        ddp.find_unused_parameters
        or ddp.static_graph
        or ddp.mixed_precision is not None
        or ddp._comm_hooks
        or ddp._delay_all_reduce_params
        or ddp._use_python_reducer
        or any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse for part in ddp.module.modules())
        or any(getattr(param, "_has_sparse_gradient", False) for param in ddp.module.parameters())
    )


def _has_hooks(param: torch.Tensor) -> bool:
    """Whether code of the user runs when a parameter gets its gradient, such as a step of an optimizer."""
    return bool(param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None))
