"""Distributed tensors in messages to ranks, and tensors of ranks as distributed tensors.

A distributed tensor that is pushed, is an argument of a call, or is anywhere in such a value, arrives as the part that the
receiving rank has (`features.tensors.parts`). What is pickled is a reference: the bytes stay where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.actor.tensors import Ranks, move_parts
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.errors import MoveError, TensorError, format_ranks
from monarch_kernel.features.resharding.plan import Box, Part, common
from monarch_kernel.features.resharding.reading import Held, Plain
from monarch_kernel.features.resharding.worker import Leaves
from monarch_kernel.features.tensors.parts import adopt, lend_part, read_box, read_part, take_part
from monarch_kernel.features.tensors.records import Poison, TensorLayout
from monarch_kernel.features.tensors.sending import SENDING
from monarch_kernel.features.tensors.stream import OpStream, Target
from monarch_kernel.net.wire.tensor_frames import REDUCERS, find_torch
from monarch_kernel.runtime.rpc.gather import check_name
from monarch_kernel.tensor.distributed_tensor import DistributedTensor
from monarch_kernel.tensor.lines import Lines
from monarch_kernel.tensor.propagation import LAYOUTS, Layout
from monarch_kernel.tensor.reading import error_of

__all__ = ["adopt_variable", "move_boxes", "ranks_of", "to_mesh"]


T = TypeVar("T")


class HoldingDevice(Protocol):
    """The ranks that hold tensors (`device.Device`)."""

    mesh: ProcMesh
    lines: Lines
    stream: OpStream
    target: Target
    frees: deque[int]
    places: dict[tuple[tuple[str, int], ...], ProcMesh]

    def new(self, layout: Layout, id: int, op: int) -> DistributedTensor:
        """Make the wrapper of a tensor on the ranks."""
        ...

    def refuse_lost(self) -> NoReturn:
        """Raise the error about parts that are lost."""
        ...


def _reduce(tensor: DistributedTensor) -> tuple[Any, ...]:
    """Reduce a distributed tensor, for messages to ranks.

    Raises:
        SupervisionError: A rank is dead, and with it its part.
    """
    part: Any = tensor._part
    device: HoldingDevice = part.device
    if device.target.lost:
        device.refuse_lost()
    if SENDING.parts is not None:
        SENDING.parts.append(part)
    requires_grad = tensor.requires_grad and tensor.is_leaf
    target = device.target
    return take_part, (
        device.mesh.name,
        _compact(target.procs),
        part.id,
        target.number,
        target.issued,
        requires_grad,
        isinstance(tensor, torch.nn.Parameter),
    )


def _compact(procs: tuple[int, ...]) -> Sequence[int]:
    """Numbers that are evenly spaced as a range, which is small in a message."""
    step = procs[1] - procs[0] if len(procs) > 1 else 1
    even = range(procs[0], procs[0] + step * len(procs), step)
    return even if tuple(even) == procs else procs


find_torch()  # it fills an empty table
REDUCERS[DistributedTensor] = _reduce


def adopt_variable(device: HoldingDevice, name: str) -> DistributedTensor:
    """Make a variable of all ranks a distributed tensor; see `ProcMesh.tensor`."""
    check_name(name)
    id = device.stream.new_id()
    try:
        found = ranks_of(device.mesh).call(partial(adopt, name, id), f"making {name!r} a distributed tensor").get()
        return _made(device, id, found, repr(name))
    except BaseException:
        device.frees.append(id)  # the ranks that have it
        raise


def to_mesh(source: DistributedTensor, there: HoldingDevice, here: HoldingDevice) -> DistributedTensor:
    """Copy a tensor from its ranks to others; see `DistributedTensor.to_mesh`."""
    if here is there:
        return source
    if torch.is_grad_enabled() and source.requires_grad:
        raise TensorError("to_mesh() has no gradient: move x.detach(), or call it in torch.no_grad()")
    places = _places(there.mesh, here.mesh)
    id = here.stream.new_id()
    try:
        found = _move(source, there, here, partial(read_part, id), lambda lent: [lent[place] for place in places])
        return _made(here, id, found, "the tensor")
    except BaseException:
        here.frees.append(id)
        raise


def move_boxes(
    source: DistributedTensor,
    there: HoldingDevice,
    here: HoldingDevice,
    held: Sequence[Box],
    wanted: Sequence[Box],
) -> int:
    """Copy boxes of a sharded tensor to ranks of another mesh; return the id under which each rank has its box.

    Args:
        source: The tensor.
        there: The ranks that hold it.
        here: The ranks that get it.
        held: The box that each rank has.
        wanted: The box that each rank gets.

    Raises:
        TensorError: An operation that the tensor depends on has failed.
    """

    def sources_of(lent: Sequence[Leaves]) -> list[tuple[Box, list[Leaves]]]:
        leaves = [_as_box(each[""], box, source.shape) for each, box in zip(lent, held)]
        near = [[leaf for leaf, theirs in zip(leaves, held) if common(theirs, box)] for box in wanted]
        return [(box, found or leaves[:1]) for box, found in zip(wanted, near)]

    id = here.stream.new_id()
    try:
        _move(source, there, here, partial(read_box, id), sources_of)
    except BaseException:
        here.frees.append(id)
        raise
    return id


def _as_box(lent: Held | Plain, box: Box, shape: Sequence[int]) -> Leaves:
    assert isinstance(lent, Held)
    return {"": lent._replace(shape=tuple(shape), parts=(Part(box, (0,) * len(box)),))}


def _move(
    source: DistributedTensor,
    there: HoldingDevice,
    here: HoldingDevice,
    read: Callable[..., T],
    sources_of: Callable[[Sequence[Leaves]], Sequence[Any]],
) -> ValueMesh[T]:
    from_id = source._part.id

    def checked(lent: Sequence[Leaves]) -> Sequence[Any]:
        poisons = {
            rank: leaf.value
            for rank, leaves in zip(there.mesh.ranks, lent)
            if isinstance(leaf := leaves[""], Plain) and isinstance(leaf.value, Poison)
        }
        if poisons:
            raise error_of(there, poisons)
        return sources_of(lent)

    lend: Callable[[int], Callable[[], Leaves]] = lambda owner: partial(lend_part, from_id, owner)  # noqa: E731
    return move_parts(ranks_of(here.mesh), ranks_of(there.mesh), lend, read, checked, "moving a tensor")


def _places(there: ProcMesh, here: ProcMesh) -> list[int]:
    """For each rank of a mesh, the place in another mesh from which its part comes.

    Raises:
        MoveError: The axes do not fit.
    """
    for axis, size in there.extent.items():
        if axis not in here.extent:
            raise MoveError(
                f"to_mesh(): {here.name} {dict(here.extent)} has no axis {axis!r} of {there.name}: take one index of it, "
                f"x.slice_mesh({axis}=0).to_mesh(...), or reduce along it first"
            )
        if here.extent[axis] != size:
            raise MoveError(
                f"to_mesh(): axis {axis!r} has size {size} on {there.name} and {here.extent[axis]} on {here.name}"
            )
    points = [there.extent.point(place) for place in range(len(there))]
    index = {tuple(point[axis] for axis in there.extent): place for place, point in enumerate(points)}
    return [index[tuple(here.extent.point(place)[axis] for axis in there.extent)] for place in range(len(here))]


def ranks_of(mesh: ProcMesh) -> Ranks:
    """The ranks of a mesh as targets of requests, which they handle in order with operations."""
    return Ranks(mesh.runtime, mesh.procs, mesh.ranks, mesh.region, mesh.spawned_extent, mesh.name)


def _made(device: HoldingDevice, id: int, found: ValueMesh[TensorLayout], what: str) -> DistributedTensor:
    """Make the tensor whose parts the ranks have, if they have one shape."""
    groups: dict[TensorLayout, list[int]] = {}
    for rank, each in zip(device.mesh.ranks, found.values()):
        groups.setdefault(TensorLayout(*each), []).append(rank)
    layout = next(iter(groups))
    if len(groups) > 1:
        listed = "; ".join(f"{format_ranks(ranks)} {each.shape} {each.dtype}" for each, ranks in groups.items())
        if len({each[::3] for each in groups}) == 1:  # shapes and dtypes
            listed += f"; make {what} contiguous on all ranks, x.contiguous()"
        raise TensorError(
            f"{what} differs on the ranks of {device.mesh.name}, and a distributed tensor has one shape: {listed}"
        )
    if layout.device != "cpu":
        raise TensorError(
            f"{what} is on {layout.device}, but distributed tensors are on the CPU of their ranks: use x.cpu()"
        )
    where = torch.device(layout.device)
    dtype = getattr(torch, layout.dtype)
    place = layout.shape, layout.stride, layout.offset
    return device.new(LAYOUTS.make(*place, dtype, where, 0, layout.placements), id, -1)
