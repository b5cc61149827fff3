"""Methods of distributed tensors as functions of nested dicts, lists and tuples of them, with the names of Monarch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from monarch_kernel.tensor.distributed_tensor import DistributedTensor

__all__ = ["reduce", "reduce_", "slice_mesh", "to_mesh"]


def reduce(
    tensors: Any, dims: str | Sequence[str], reduction: str = "sum", scatter: bool = False, mesh: Any = None
) -> Any:
    """Reduce tensors along axes of their mesh; see `DistributedTensor.reduce`."""
    return _each(tensors, "reduce", lambda tensor: tensor.reduce(dims, reduction, scatter, mesh))


def reduce_(tensors: Any, dims: str | Sequence[str], reduction: str = "sum") -> Any:
    """Reduce tensors in place along axes of their mesh; see `DistributedTensor.reduce_`."""
    return _each(tensors, "reduce_", lambda tensor: tensor.reduce_(dims, reduction))


def slice_mesh(tensors: Any, /, **axes: Any) -> Any:
    """Return tensors on a slice of their mesh; see `DistributedTensor.slice_mesh`."""
    return _each(tensors, "slice_mesh", lambda tensor: tensor.slice_mesh(**axes))


def to_mesh(tensors: Any, mesh: Any, /, **placements: Any) -> Any:
    """Copy tensors to another mesh; see `DistributedTensor.to_mesh`."""
    return _each(tensors, "to_mesh", lambda tensor: tensor.to_mesh(mesh, **placements))


def _each(tensors: Any, name: str, change: Callable[[DistributedTensor], Any]) -> Any:
    flat, tree = pytree.tree_flatten(tensors)
    for each in flat:
        if not isinstance(each, DistributedTensor):
            raise TypeError(f"{name}() takes distributed tensors, not a {type(each).__name__}")
    return pytree.tree_unflatten([change(each) for each in flat], tree)
