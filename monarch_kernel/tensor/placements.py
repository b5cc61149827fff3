"""Sharded tensors: one logical tensor whose parts the ranks of a mesh have, as torch's DTensor.

Each rank holds a DTensor on a device mesh with the axes of the mesh, and torch's rules say how results are placed. The program
keeps the shape of the whole, and a placement for each axis. When an operation is done for the first time with such shapes and
placements, the program waits for a rank to say how the result is placed; later ones wait for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.text import plural
from monarch_kernel.errors import MoveError, TensorError
from monarch_kernel.features.tensors.functions import MAX_RESULTS
from monarch_kernel.tensor.crossing import move_boxes
from monarch_kernel.tensor.device import Device
from monarch_kernel.tensor.distributed_tensor import DistributedTensor
from monarch_kernel.tensor.picture import boxes_of
from monarch_kernel.tensor.propagation import LAYOUTS, LEAF, Outcome, Result
from monarch_kernel.tensor.reading import described_result
from monarch_kernel.tensor.reductions import form_group

__all__ = [
    "about",
    "filled",
    "from_local",
    "full",
    "local",
    "redistribute",
    "renew_groups",
    "shard",
    "spelled",
    "strings",
    "texts_of",
    "to_mesh",
]


def shard(device: Device, tensor: torch.Tensor, placements: Mapping[str, Any]) -> DistributedTensor:
    """Place a plain tensor on the ranks of a device; axes without a placement replicate it."""
    texts = texts_of(device.mesh, placements, (), tensor.dim())
    if any(text.startswith("P") for text in texts):
        raise TensorError("a tensor of this process can't be placed as Partial: each rank would add all of it")
    whole = device.put(tensor)
    return _do(device, "monarch::shard", "mesh.shard()", [*about(device.mesh), strings(texts)], whole)


def filled(
    device: Device, value: float | None, shape: Sequence[int], dtype: torch.dtype, placements: Mapping[str, Any]
) -> DistributedTensor:
    """Make a tensor of equal elements, or of undefined ones, of which each rank makes its part."""
    texts = texts_of(device.mesh, placements, (), len(shape))
    if any(text.startswith("P") for text in texts):
        raise TensorError("a new tensor can't be Partial: place it as Replicate() or Shard(...)")
    numbers = ["list", [["value", int(size)] for size in shape]]
    args = [["value", value], numbers, ["dtype", str(dtype).removeprefix("torch.")]]
    return _do(device, "monarch::filled", "a new tensor", [*args, *about(device.mesh), strings(texts)])


def from_local(device: Device, tensor: DistributedTensor, placements: Mapping[str, Any]) -> DistributedTensor:
    """Make the parts that ranks have one tensor."""
    if tensor._part.device is not device:
        raise TensorError(
            f"from_local() takes a tensor on {device.mesh.name} {dict(device.mesh.extent)}, with all its ranks"
        )
    if LAYOUTS.of(tensor).placements:
        raise TensorError("from_local() takes a tensor of which each rank has its own; this one is sharded already")
    texts = texts_of(device.mesh, placements, (), tensor.dim())
    _refuse_gradient(tensor, "from_local()")
    return _do(device, "monarch::from_local", "from_local()", [*about(device.mesh), strings(texts)], tensor)


def local(tensor: DistributedTensor) -> DistributedTensor:
    """The parts of a sharded tensor, as a tensor of which each rank has its own."""
    _check_sharded(tensor, "local()")
    _refuse_gradient(tensor, "local()")
    return _do(_device_of(tensor), "monarch::local", "local()", [], tensor)


def full(tensor: DistributedTensor) -> DistributedTensor:
    """The whole of a sharded tensor, on each rank."""
    _check_sharded(tensor, "full_tensor()")
    return _do(_device_of(tensor), "monarch::full", "full_tensor()", [], tensor.detach())  # type: ignore[arg-type]


def redistribute(tensor: DistributedTensor, placements: Mapping[str, Any]) -> DistributedTensor:
    """Place a sharded tensor in another way; axes that are not named keep their placements."""
    _check_sharded(tensor, "redistribute()")
    before = LAYOUTS.of(tensor).placements
    texts = texts_of(tensor.mesh, placements, before, tensor.dim())
    for axis, text, there in zip(tensor.mesh.extent, texts, before):
        if text.startswith("P") and text != there:
            raise TensorError(
                f"{axis}={spelled_one(text)} is not possible from {spelled_one(there)}: only operations make a tensor Partial, "
                "and from_local() does"
            )
    made: DistributedTensor = _Redistribute.apply(tensor, texts)  # type: ignore[no-untyped-call]
    return made


class _Redistribute(torch.autograd.Function):
    """Gradients are placed as the tensor was; those of a partial tensor are replicated."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, texts: tuple[str, ...]) -> Any:
        ctx.before = tuple("R" if text.startswith("P") else text for text in LAYOUTS.of(tensor).placements)
        return _place(tensor, texts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _place(gradients[0], ctx.before), None


def _place(tensor: DistributedTensor, texts: Sequence[str]) -> DistributedTensor:
    return _do(_device_of(tensor), "monarch::redistribute", "redistribute()", [strings(texts)], tensor)


def to_mesh(tensor: DistributedTensor, here: Device, placements: Mapping[str, Any]) -> DistributedTensor:
    """Copy a sharded tensor to the ranks of another mesh; see `DistributedTensor.to_mesh`."""
    there = _device_of(tensor)
    if here is there:
        return redistribute(tensor, placements) if placements else tensor
    _refuse_gradient(tensor, "to_mesh()")
    before = dict(zip(there.mesh.extent, LAYOUTS.of(tensor).placements))
    lacking = {axis: text for axis, text in before.items() if text.startswith("S") and axis not in here.mesh.extent}
    if lacking and not placements:
        raise MoveError(
            f"to_mesh(): {here.mesh.name} {dict(here.mesh.extent)} has no axis {next(iter(lacking))!r}, and the tensor is "
            f"{spelled(tuple(lacking.values()), lacking)}: say how to place it there, such as "
            f"x.to_mesh(..., {next(iter(here.mesh.extent))}={spelled_one(next(iter(lacking.values())))})"
        )
    kept = [before.get(axis, "R") for axis in here.mesh.extent]
    texts = texts_of(here.mesh, placements, ["R" if text.startswith("P") else text for text in kept], tensor.dim())
    if any(text.startswith("P") for text in texts):
        raise TensorError("to_mesh() can't place a tensor as Partial: each rank would add all of it")
    args = [*about(here.mesh), strings(texts)]
    if partial := {axis: "R" for axis, text in before.items() if text.startswith("P")}:
        tensor = redistribute(tensor, partial)
    layout = LAYOUTS.of(tensor)
    held, wanted = (
        boxes_of(layout.shape, each, tuple(mesh.extent.values()))
        for each, mesh in ((layout.placements, there.mesh), (texts, here.mesh))
    )
    id = move_boxes(tensor, there, here, held, wanted)
    strides = torch.empty(layout.shape, device="meta").stride()
    parts = here.new(LAYOUTS.make(layout.shape, strides, 0, layout.dtype, layout.device), id, -1)
    numbers = [["list", [["value", each] for each in sizes]] for sizes in (layout.shape, strides)]
    return _do(here, "monarch::rewrap", "to_mesh()", [*args, *numbers], parts)


# -- placements as text


def spelled(placements: Sequence[str], axes: Iterable[str]) -> str:
    """Write placements as users do: ``dp=Shard(0), tp=Partial(sum)``."""
    return ", ".join(f"{axis}={spelled_one(text)}" for axis, text in zip(axes, placements))


def spelled_one(text: str) -> str:
    """Write one placement as users do."""
    words = {"S": "Shard", "P": "Partial", "R": "Replicate()"}
    return words["R"] if text == "R" else re.sub(r"^([SP])(?=\()", lambda match: words[match[1]], text)


def texts_of(mesh: ProcMesh, placements: Mapping[str, Any], before: Sequence[str], n_dims: int) -> tuple[str, ...]:
    """Return the placement along each axis, as text.

    Raises:
        KeyError: The mesh has no such axis.
        TensorError: It is no placement, or of a dimension that the tensor lacks.
    """
    for axis in placements:
        mesh.size(axis)
    texts = []
    for place, axis in enumerate(mesh.extent):
        text = str(placements[axis]) if axis in placements else before[place] if before else "R"
        if re.fullmatch(r"S\(-?\d+\)|P\(\w+\)|R", text) is None:
            raise TensorError(f"{axis}={placements[axis]!r} is no placement: use Shard(dim), Replicate() or Partial()")
        if text.startswith("S"):
            dim = int(text[2:-1])
            if not -n_dims <= dim < n_dims:
                raise TensorError(f"{axis}=Shard({dim}) is not possible: the tensor has {plural(n_dims, 'dimension')}")
            text = f"S({dim % n_dims})"
        texts.append(text)
    return tuple(texts)


# -- operations


def _device_of(tensor: DistributedTensor) -> Device:
    device: Device = tensor._part.device  # type: ignore[assignment]
    return device


def _check_sharded(tensor: DistributedTensor, what: str) -> None:
    if not LAYOUTS.of(tensor).placements:
        raise TensorError(
            f"{what} is for sharded tensors; each rank has its own of this one: use reduce() or fetch_shard()"
        )


def _refuse_gradient(tensor: DistributedTensor, what: str) -> None:
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise TensorError(f"{what} has no gradient: use x.detach(), or call it in torch.no_grad()")


def about(mesh: ProcMesh) -> list[Any]:
    """Arguments that say which device mesh is meant, after the ranks have their process group.

    Raises:
        TensorError: It is a part of the mesh.
    """
    if len(mesh) != len(mesh.whole):
        raise TensorError(f"sharded tensors need all ranks of a mesh, and {mesh!r} is a part: use the whole mesh")
    form_group(mesh.whole)
    return [["list", [["value", size] for size in mesh.extent.values()]], strings(tuple(mesh.extent))]


def renew_groups(device: Device) -> None:
    """Give the sharded tensors of a device the groups of a process group that was formed again, as by a cell."""
    device.do("monarch::device_mesh", about(device.mesh))
    device.n_groups = device.queries.n_groups_formed


def strings(texts: Sequence[str]) -> list[Any]:
    """The template of a list of texts."""
    return ["list", [["value", text] for text in texts]]


def _do(device: Device, name: str, title: str, args: list[Any], *tensors: DistributedTensor) -> DistributedTensor:
    """Do an operation of this package; the ranks say how the result is placed when it is done for the first time."""
    key = (name, repr(args), *[tensor._part.layout for tensor in tensors])
    ids = [tensor._part.id for tensor in tensors]
    entry = device.entries.get(key)
    if entry is not None and entry.single is not None:
        return device.new(entry.single, *device.record_here(entry, ids))
    templates = [*[["tensor"] for _ in tensors], *args]
    entry = device.define(key, name, title, Outcome(None, LEAF), templates, {}, [], is_learned=True)
    first, op = device.record_here(entry, ids)
    try:
        _, (found,) = described_result(device, first, title)
    except BaseException:
        device.frees.extend(range(first, first + MAX_RESULTS))
        raise
    layout = LAYOUTS.make(*found)
    device.define(key, name, title, Outcome((Result(layout),), LEAF), templates, {}, [])
    return device.new(layout, first, op)
