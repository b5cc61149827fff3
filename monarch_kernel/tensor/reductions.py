"""Reductions of distributed tensors along axes of their mesh: collectives between ranks, in the order of all operations.

The ranks use the process group of their cells, and groups of some of its ranks, which they make when they first need them. The
first reduction of a mesh forms the process group if no cell has done so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.errors import TensorError
from monarch_kernel.tensor.distributed_tensor import DistributedTensor
from monarch_kernel.tensor.propagation import LAYOUTS, Layout
from monarch_kernel.train.process_group.worker import GroupStore

__all__ = ["REDUCTIONS", "form_group", "reduce"]

REDUCTIONS = ("avg", "max", "min", "product", "stack", "sum")

_NO_NUMBERS = (torch.bool, torch.complex32, torch.complex64, torch.complex128)


def reduce(
    tensor: DistributedTensor, axes: str | Sequence[str], reduction: str, *, scatter: bool, in_place: bool
) -> DistributedTensor:
    """Reduce a tensor; see `DistributedTensor.reduce`."""
    device: Any = tensor._part.device
    if LAYOUTS.of(tensor).placements:
        raise TensorError(
            "reduce() is for tensors of which each rank has its own; this one is sharded: add what is Partial with "
            "x.redistribute(axis=Replicate()), or reduce x.local()"
        )
    if device.target.lost:
        device.refuse_lost()
    mesh: ProcMesh = device.mesh
    names = _checked_axes(mesh, axes)
    groups = groups_along(mesh, names)
    layout = _layout_of_result(tensor, reduction, scatter, len(groups[0]), names)
    if in_place and layout.shape != tuple(tensor.shape):
        raise TensorError(f"reduce_() can't change the shape of a tensor, from {tuple(tensor.shape)} to {layout.shape}")
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise TensorError("reduce() has no gradient: reduce x.detach(), or call it in torch.no_grad()")
    if mesh.size() > 1:
        form_group(mesh.whole)
    how = [
        _list(_list(("value", rank) for rank in group) for group in groups),
        ["value", reduction],
        ["value", scatter],
    ]
    what = [_list(("value", size) for size in tensor.shape), ["dtype", str(tensor.dtype).removeprefix("torch.")]]
    made: DistributedTensor = device.make("monarch::reduce", [*how, *what], layout, tensor)
    return tensor.copy_(made) if in_place else made  # type: ignore[return-value]


def groups_along(mesh: ProcMesh, axes: Sequence[str]) -> list[list[int]]:
    """The ranks, in the mesh as spawned, that differ only along some axes, for each set of such ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, rank in enumerate(mesh.ranks):
        point = mesh.extent.point(place)
        groups.setdefault(tuple(point[axis] for axis in mesh.extent if axis not in axes), []).append(rank)
    return list(groups.values())


def _list(items: Any) -> list[Any]:
    return ["list", [list(item) for item in items]]


def _checked_axes(mesh: ProcMesh, axes: str | Sequence[str]) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else tuple(axes) or tuple(mesh.extent)
    for name in names:
        mesh.size(name)
    if len(set(names)) < len(names):
        raise ValueError(f"an axis is named twice: {names}")
    return names


def _layout_of_result(
    tensor: DistributedTensor, reduction: str, scatter: bool, count: int, axes: Sequence[str]
) -> Layout:
    if reduction not in REDUCTIONS:
        raise ValueError(f"there is no reduction {reduction!r}; there are {', '.join(REDUCTIONS)}")
    if reduction != "stack" and tensor.dtype in _NO_NUMBERS:
        raise TensorError(f"{reduction!r} is not possible for {tensor.dtype}: convert it, such as by x.int()")
    if reduction == "avg" and not tensor.dtype.is_floating_point:
        raise TensorError(f"'avg' needs floating-point numbers, not {tensor.dtype}: convert it by x.float()")
    shape = tuple(tensor.shape)
    if scatter and (not shape or shape[0] != count):
        raise TensorError(
            f"with scatter=True the first dimension is the index along {', '.join(axes)}, of size {count}, but the shape is "
            f"{shape}"
        )
    if scatter:
        shape = shape if reduction == "stack" else shape[1:]
    elif reduction == "stack":
        shape = (count, *shape)
    stride = torch.empty(shape, device="meta").stride()
    return LAYOUTS.make(shape, stride, 0, tensor.dtype, torch.device("cpu"))


def form_group(mesh: ProcMesh) -> None:
    """Form the process group of a mesh, unless its ranks have a usable one."""
    queries = mesh.runtime.queries
    if queries.has_group(mesh.procs):
        return
    mesh.initialized.get()  # the answers say whether they have
    if not queries.has_group(mesh.procs):
        GroupStore().form(mesh).get()
