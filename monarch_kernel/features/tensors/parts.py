"""The parts of distributed tensors that a rank holds, in other code of the rank: variables of cells, arguments, other meshes.

The functions run on the rank. A variable and the tensor of the same part share memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from monarch_kernel.errors import TensorError
from monarch_kernel.features.resharding.plan import Box, Part, whole
from monarch_kernel.features.resharding.reading import Held, Plain
from monarch_kernel.features.resharding.worker import Leaves, take_box
from monarch_kernel.features.tensors.records import Poison, TensorLayout
from monarch_kernel.net.memory.layout import memory_of
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.function_calls import APPLIED_IN

__all__ = ["PARTS", "adopt", "is_sharded", "layout_of", "lend_part", "local_part", "read_box", "read_part", "take_part"]


class PartTable(Protocol):
    """The tensors of a rank (`worker.TensorWorker`).

    Attributes:
        mesh: The name of the mesh that the rank belongs to.
        proc: The number of its process.
    """

    mesh: str
    proc: int

    def take(self, id: int, target: int, count: int) -> Any:
        """Return a tensor, a `Poison` or None, after so many operations of a target."""
        ...

    def put(self, id: int, value: Any) -> None:
        """Add a tensor; on the main thread."""
        ...


class _Parts:
    """The parts of this process; ``table`` is None unless it is a rank."""

    def __init__(self) -> None:
        self.table: PartTable | None = None


PARTS = _Parts()


def _table() -> PartTable:
    if PARTS.table is None:
        raise TensorError("this process is no rank of a mesh, so it has no part of a distributed tensor")
    return PARTS.table


def take_part(
    mesh: str, procs: Collection[int], id: int, target: int, count: int, requires_grad: bool, is_parameter: bool
) -> Any:
    """Return this rank's part of a distributed tensor that came in a message. It shares memory with the part.

    Args:
        mesh: The name of the mesh that holds it.
        procs: The processes that hold it.
        id: Its id.
        target: The group of ranks for which its operations were issued.
        count: The number of these.
        requires_grad: Of the tensor.
        is_parameter: Whether it is a parameter of a module.

    Raises:
        TensorError: The rank has none, or an operation that it depends on has failed.
    """
    import torch

    table = _table()
    found = table.take(id, target, count) if table.mesh == mesh and table.proc in procs else None
    if found is None:
        raise TensorError(
            f"this process has no part of a distributed tensor of mesh {mesh!r}: send it to ranks that hold it, or send "
            "fetch_shard(x).result()"
        )
    if isinstance(found, Poison):
        raise TensorError(
            f"an operation that this distributed tensor depends on has failed: {found.failure.headline()}"
        )
    part = found.detach()
    return torch.nn.Parameter(part, requires_grad) if is_parameter else part.requires_grad_(requires_grad)


def adopt(name: str, id: int) -> TensorLayout:
    """Make a variable of this rank a part of a distributed tensor, without a copy.

    Raises:
        NameError: There is no such variable.
        TypeError: It is no tensor that can be one.
    """
    import torch

    namespace = APPLIED_IN.get()
    if name not in namespace:
        raise NameError(f"name {name!r} is not defined on this rank")
    value = namespace[name]
    if is_sharded(value):
        part = value.detach()
        _table().put(id, part)
        return layout_of(part)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        kind = f"tensor with the layout {value.layout}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{name!r} is a {kind}: only dense tensors can be distributed tensors")
    part = _from_its_start(value.detach().resolve_conj().resolve_neg())
    _table().put(id, part)
    return layout_of(part)


_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def _from_its_start(tensor: Any) -> Any:
    """Return a tensor as a view of memory that starts with its first element: ranks may have different offsets."""
    import torch

    if not tensor.storage_offset() or tensor.device.type != "cpu":
        return tensor
    as_integers = tensor.view(getattr(torch, _INTEGERS[tensor.element_size()]))  # NumPy lacks some dtypes
    return torch.from_numpy(as_integers.numpy()).view(tensor.dtype)


def layout_of(tensor: Any) -> TensorLayout:
    """Describe how a tensor is in memory."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if is_sharded(tensor):
        return TensorLayout(shape, stride, 0, dtype, tensor.device.type, tuple(map(str, tensor.placements)))
    return TensorLayout(shape, stride, tensor.storage_offset(), dtype, tensor.device.type)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which this rank has a part."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Any) -> Any:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def lend_part(id: int, owner: int) -> Leaves:
    """Lend this rank's part of a tensor, until all leases of ``owner`` end; a part that is lost comes as its `Poison`."""
    part = local_part(_table().take(id, 0, 0))
    if isinstance(part, Poison):
        return {"": Plain(part)}
    memory = memory_of(part.resolve_conj().resolve_neg())
    shape = memory.layout.shape
    pieces = (Part(whole(shape), (0,) * len(shape)),)
    return {"": Held(memory.layout.dtype, shape, pieces, PROCESS.client.exports.lend(memory, owner))}


def read_part(id: int, source: Leaves, turn: int) -> TensorLayout:
    """Copy the part that another rank has lent into a new part of a tensor here."""
    held = source[""]
    assert isinstance(held, Held)
    part, _ = take_box(PROCESS.client, [source], whole(held.shape), turn)
    _table().put(id, part)
    return layout_of(part)


def read_box(id: int, source: tuple[Box, Sequence[Leaves]], turn: int) -> None:
    """Copy a box of a tensor whose parts other ranks have lent into a new tensor here."""
    box, sources = source
    part, _ = take_box(PROCESS.client, sources, box, turn)
    _table().put(id, part)
