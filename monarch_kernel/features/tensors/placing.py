"""How sharded tensors are placed on a rank: other placements, the whole of a tensor, and the order of a part in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch_kernel.features.tensors.parts import is_sharded
from monarch_kernel.features.tensors.sums import SUMS

__all__ = ["as_whole", "is_laid_otherwise", "redistributed", "replicate", "whole_of", "write_whole"]


def replicate() -> Any:
    """The placement of a tensor that all ranks along an axis have."""
    from torch.distributed.tensor import Replicate

    return Replicate()


def redistributed(tensor: Any, placements: Sequence[Any]) -> Any:
    """Place a sharded tensor in another way; what all axes add up takes one collective, and not one for each axis."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed import group
    from torch.distributed.tensor import DTensor, Partial

    # A subclass adds up in another way: that of a norm squares first.
    is_sum = all(type(each) is Partial and each.reduce_op == "sum" for each in tensor.placements)
    if not (is_sum and len(placements) > 1 and all(each.is_replicate() for each in placements)):
        return tensor.redistribute(placements=placements)
    everyone: Any = group.WORLD
    added: Any = functional.all_reduce(tensor.to_local().contiguous(), "sum", everyone)
    part = functional.wait_tensor(added)  # type: ignore[no-untyped-call]
    return DTensor.from_local(
        part, tensor.device_mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def whole_of(tensor: Any) -> Any:
    """Gather a sharded tensor; the result has the strides of the whole, for views of it, and its memory is not shared."""
    import torch

    found, stride = tensor.full_tensor(), tensor.stride()
    if found.stride() == stride or 0 in stride:
        return found.clone()
    return torch.empty_strided(found.shape, stride, dtype=found.dtype).copy_(found)


def write_whole(tensor: Any, whole: Any) -> None:
    """Overwrite a sharded tensor with the elements of a plain one that all ranks have."""
    from torch.distributed.tensor import DTensor

    mesh = tensor.device_mesh
    made = DTensor.from_local(whole, mesh, [replicate()] * mesh.ndim, run_check=False)
    partial = [axis for axis, each in enumerate(tensor.placements) if each.is_partial()]
    kept = [replicate() if each.is_partial() else each for each in tensor.placements]
    part = made.redistribute(placements=kept).to_local()
    if any(tensor.placements[axis].reduce_op == "sum" and mesh.get_local_rank(axis) for axis in partial):
        part = part.new_zeros(part.shape)
    tensor.to_local().copy_(part)
    SUMS.note_write(tensor)


def as_whole(result: Any) -> Any:
    """Lay the parts of sharded tensors out in the order of dimensions that the whole has, so that views of it are possible."""
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda each: _in_order(each) if is_laid_otherwise(each) else each, result)


def is_laid_otherwise(tensor: Any) -> bool:
    """Whether the part of a sharded tensor has its dimensions in another order in memory than the whole."""
    if not is_sharded(tensor):
        return False
    strides = _strides_of_part(tensor)
    part = tensor.to_local()
    return strides is not None and any(
        size > 1 and here != there for size, here, there in zip(part.shape, part.stride(), strides)
    )


def _strides_of_part(tensor: Any) -> tuple[int, ...] | None:
    """The strides of a dense part with the order of dimensions of the whole; None if the whole is not dense."""
    shape, stride = tensor.shape, tensor.stride()
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim))
    size_of_whole, size_of_part, found = 1, 1, [0] * len(shape)
    part = tensor.to_local().shape
    for dim in order:
        if shape[dim] > 1 and stride[dim] != size_of_whole:
            return None
        found[dim] = size_of_part
        size_of_whole, size_of_part = size_of_whole * max(1, shape[dim]), size_of_part * max(1, part[dim])
    return tuple(found)


def _in_order(tensor: Any) -> Any:
    import torch
    from torch.distributed.tensor import DTensor

    part, strides = tensor.to_local(), _strides_of_part(tensor)
    assert strides is not None
    made = torch.empty_strided(part.shape, strides, dtype=part.dtype, device=part.device).copy_(part)
    return DTensor.from_local(
        made, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
