"""What meshes of processes do with distributed tensors: `ProcMesh.activate` and its neighbours."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.mesh import ValueMesh
from monarch_kernel.errors import RemoteError, TensorError
from monarch_kernel.features.tensors.messages import MeasureTensors
from monarch_kernel.features.tensors.records import MemoryUse
from monarch_kernel.net.wire.codec import pack
from monarch_kernel.runtime.rpc.gather import gather, read_value
from monarch_kernel.tensor import placements as placing
from monarch_kernel.tensor.crossing import adopt_variable
from monarch_kernel.tensor.device import MAIN, Device, device_of
from monarch_kernel.tensor.distributed_tensor import DistributedTensor
from monarch_kernel.tensor.inventory import Holdings, holdings_of
from monarch_kernel.tensor.issue import issue
from monarch_kernel.tensor.modules import Initialise
from monarch_kernel.tensor.modules import distribute as place_module
from monarch_kernel.tensor.propagation import LAYOUTS, info_of
from monarch_kernel.tensor.reading import values
from monarch_kernel.tensor.refilling import refill

__all__ = [
    "activate",
    "activated",
    "active_device",
    "active_stream_name",
    "distribute",
    "drawn",
    "filled",
    "from_local",
    "get_active_mesh",
    "manual_seed",
    "memory",
    "memory_by_line",
    "no_mesh",
    "put",
    "rank_tensor",
    "refill",
    "shard",
    "tensor",
    "values",
]


class _Active(threading.local):
    """The meshes that this thread has activated, the innermost last; None in ``no_mesh.activate()``."""

    def __init__(self) -> None:
        self.devices: list[Device | None] = []


_active = _Active()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes new tensors on the active mesh. Operations on tensors follow these, with or without it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps the method below, which costs more than all of it, and imports torch.compile."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True
        if DistributedTensor in types:
            return issue(func, args, kwargs)
        device = _active.devices[-1]
        if device is None:
            return func(*args, **(kwargs or {}))
        info = info_of(func)
        if info.is_factory and not _is_plain(func, args, kwargs):
            return issue(func, args, kwargs, device)
        if (
            info.is_from_data and args[0].dim()
        ):  # numbers without dimensions stay here: optimizers count steps with them
            return device.put(func(*args))
        return func(*args, **(kwargs or {}))


def _is_plain(func: Any, args: Any, kwargs: dict[str, Any] | None) -> bool:
    """Whether a new tensor is a plain one: on the device meta, or made by torch to unpickle one, which then gets memory."""
    device = (kwargs or {}).get("device")
    if device is None:
        return False
    return torch.device(device).type == "meta" or (func is torch.ops.aten.empty.memory_format and list(args[0]) == [0])


active_stream_name: ContextVar[str] = ContextVar("monarch_kernel_stream", default=MAIN)
"""The stream of new tensors."""


def _device(mesh: ProcMesh) -> Device:
    return device_of(mesh, active_stream_name.get())


@contextmanager
def activated(device: Device | None) -> Iterator[None]:
    """Activate a device; one mode serves all that a thread activates, as the innermost counts."""
    devices = _active.devices
    devices.append(device)
    try:
        if len(devices) > 1:
            yield
        else:
            with _Mode():  # type: ignore[no-untyped-call]
                yield
    finally:
        devices.pop()


def activate(mesh: ProcMesh) -> Any:
    """Return a context in which new tensors of this thread are made on a mesh.

    Raises:
        SupervisionError: A rank is dead or was stopped.
    """
    return activated(_device(mesh))


class NoMesh:
    """The place outside of all meshes: ``with no_mesh.activate():`` gives plain tensors, also within ``mesh.activate()``."""

    def activate(self) -> Any:
        """Return a context in which new tensors of this thread are plain ones of this process."""
        return activated(None)


no_mesh = NoMesh()


def get_active_mesh() -> ProcMesh | None:
    """The mesh on which new tensors of this thread are made; None if they are plain ones."""
    device = active_device()
    return None if device is None else device.mesh


def active_device() -> Device | None:
    """The device on which new tensors of this thread are made; None if they are plain ones."""
    return _active.devices[-1] if _active.devices else None


def put(mesh: ProcMesh, value: Any) -> DistributedTensor:
    """Copy a plain tensor, or an array of NumPy, to all ranks of a mesh.

    Raises:
        TypeError: It is neither.
        SupervisionError: A rank is dead or was stopped.
    """
    if isinstance(value, DistributedTensor):
        raise TypeError("put() takes a plain tensor; this one is on ranks already")
    with no_mesh.activate():
        return _device(mesh).put(value if isinstance(value, torch.Tensor) else _as_tensor(value, "put()"))


def tensor(mesh: ProcMesh, name: str) -> DistributedTensor:
    """Make a variable of all ranks a distributed tensor."""
    return adopt_variable(_device(mesh), name)


def _as_tensor(value: Any, what: str) -> torch.Tensor:
    if type(value).__module__.partition(".")[0] != "numpy":
        raise TypeError(f"{what} takes a tensor or an array of NumPy, not a {type(value).__name__}")
    return torch.as_tensor(value)


def rank_tensor(mesh: ProcMesh, axis: str | Sequence[str]) -> DistributedTensor:
    """Make a tensor without dimensions that is the index of each rank along an axis, or along several, the last one fastest.

    Raises:
        KeyError: The mesh has no such axis.
        ValueError: An axis is named twice.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if len(set(axes)) < len(axes):
        raise ValueError(f"an axis is named twice: {', '.join(axes)}")
    sizes = [mesh.size(each) for each in axes]
    indexes = []
    for place in range(len(mesh)):
        point, index = mesh.extent.point(place), 0
        for each, size in zip(axes, sizes):
            index = index * size + point[each]
        indexes.append(index)
    layout = LAYOUTS.make((), (), 0, torch.int64, torch.device("cpu"))
    return _device(mesh).make("monarch::rank_index", [_numbers(mesh.ranks), _numbers(indexes)], layout)


def _numbers(numbers: Sequence[int]) -> list[Any]:
    return ["list", [["value", number] for number in numbers]]


def shard(mesh: ProcMesh, value: Any, placements: dict[str, Any]) -> DistributedTensor:
    """Place a plain tensor, or an array of NumPy, on the ranks of a mesh, as one tensor."""
    if isinstance(value, DistributedTensor):
        raise TypeError(
            "shard() takes a plain tensor; this one is on ranks already: use from_local() or redistribute()"
        )
    with no_mesh.activate():
        plain = value if isinstance(value, torch.Tensor) else _as_tensor(value, "shard()")
        return placing.shard(_device(mesh), plain, placements)


def filled(
    mesh: ProcMesh, value: float | None, shape: Sequence[Any], dtype: Any, placements: dict[str, Any]
) -> DistributedTensor:
    """Make a tensor of equal elements, or of undefined ones, as one tensor."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    return placing.filled(_device(mesh), value, sizes, dtype or torch.get_default_dtype(), placements)


def drawn(mesh: ProcMesh, kind: str, shape: Sequence[Any], dtype: Any, placements: dict[str, Any]) -> DistributedTensor:
    """Make a tensor of random numbers, as one tensor; ``kind`` is ``uniform_`` or ``normal_``."""
    made: DistributedTensor = getattr(filled(mesh, None, shape, dtype, placements), kind)()
    return made


def from_local(mesh: ProcMesh, tensor: DistributedTensor, placements: dict[str, Any]) -> DistributedTensor:
    """Make the tensors of all ranks of a mesh one tensor."""
    return placing.from_local(_device(mesh), tensor, placements)


def distribute(
    mesh: ProcMesh, module: torch.nn.Module, plan: dict[str, Any] | None, init: Initialise | None
) -> torch.nn.Module:
    """Place the parameters and buffers of a module on the ranks of a mesh."""
    with no_mesh.activate():
        return place_module(_device(mesh), module, plan or {}, init)


def manual_seed(seed: int, *, same: bool = False, mesh: ProcMesh | None = None) -> None:
    """Seed the random numbers of ranks, in order with operations.

    Args:
        seed: Rank n gets ``seed + n``. The numbers of sharded tensors depend on ``seed`` alone.
        same: Whether all ranks get the same seed.
        mesh: Their mesh; by default the active one.

    Raises:
        TensorError: There is no active mesh.
    """
    where = mesh or get_active_mesh()
    if where is None:
        raise TensorError(
            "manual_seed() seeds the ranks of the active mesh: call it in mesh.activate(), or name the mesh"
        )
    device = _device(where)
    device.do("monarch::manual_seed", [["value", int(seed)], ["value", bool(same)]])
    device.seed_draws(seed)


def memory_by_line(mesh: ProcMesh) -> Holdings:
    """List the distributed tensors of this program on a mesh by the lines that made them."""
    return holdings_of(_device(mesh))


def memory(mesh: ProcMesh) -> ValueMesh[MemoryUse]:
    """Return how many distributed tensors each rank holds, and how much memory they take, after dropping unused ones."""
    _device(mesh).stream.free_dropped()
    finish = gather(mesh.region, f"measuring {mesh.name} failed", RemoteError, read_value, mesh.spawned_extent)
    return mesh.runtime.request(
        mesh.procs, lambda id: pack(MeasureTensors(id)), "measuring tensors", finish, quiet=True
    ).get()
