"""The class of distributed tensors: what Python sees of a tensor of which each rank of a mesh has a part."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, ClassVar, NoReturn, Protocol

import torch

from monarch_kernel.errors import TensorError

__all__ = ["DistributedTensor", "Holder", "Part", "describe"]


class Holder(Protocol):
    """The ranks that hold a tensor, as the tensor uses them (`device.Device`)."""

    frees: Any
    mesh: Any
    blocked: str
    """Why the tensor can't be used; empty if it can."""

    def describe_origin(self, op: int) -> str:
        """Say which line of the program made a tensor."""
        ...

    def describe_placements(self, tensor: DistributedTensor) -> str:
        """Say how a sharded tensor is placed; empty if each rank has its own tensor."""
        ...

    def picture_of(self, tensor: DistributedTensor) -> Any:
        """Return the picture of a sharded tensor; None if each rank has its own tensor."""
        ...

    def placed(self, tensor: DistributedTensor, what: str, placements: dict[str, Any]) -> DistributedTensor:
        """Return the tensor placed in another way."""
        ...

    def reduced(
        self, tensor: DistributedTensor, axes: Any, reduction: str, *, scatter: bool, in_place: bool, mesh: Any = None
    ) -> DistributedTensor:
        """Return the tensor reduced along axes of the mesh, on a part of that mesh."""
        ...

    def fetched_whole(self, tensor: DistributedTensor) -> torch.Tensor:
        """Return the whole of a sharded tensor as a plain one."""
        ...

    def slice_of(self, tensor: DistributedTensor, axes: dict[str, Any]) -> DistributedTensor:
        """Return the tensor on some of the ranks."""
        ...

    def moved(self, tensor: DistributedTensor, mesh: Any, placements: dict[str, Any]) -> DistributedTensor:
        """Return a copy of the tensor on another mesh."""
        ...


class Part:
    """What is behind a distributed tensor: the name under which ranks know it. When it is dropped, the ranks drop theirs.

    It is a separate object because autograd can bring a tensor back to life that Python has dropped.

    Attributes:
        id: Unique in the session.
        layout: The number of its shape, strides and dtype (`propagation.Layout`).
        device: The ranks that hold it.
        op: The number of the operation that made it; -1 for a tensor of the program.
        lent: Why no operation may write to it; empty if one may.
    """

    __slots__ = ("__weakref__", "device", "id", "layout", "lent", "op")

    def __init__(self, id: int, layout: int, device: Holder, op: int) -> None:
        self.id = id
        self.layout = layout
        self.device = device
        self.op = op
        self.lent = ""

    def __del__(self) -> None:
        try:
            self.device.frees.append(self.id)
        except AttributeError:  # torch.compile makes objects without attributes
            return


def _without_memory(what: str) -> Any:
    """Make a method that refuses what needs memory in this process."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the memory is on the ranks."""
        raise TensorError(
            f"a distributed tensor has no {what} here: its memory is on the ranks; use fetch_shard(x).result(), a plain tensor"
        )

    return refuse


class DistributedTensor(torch.Tensor):
    """A tensor of which each rank of a mesh has a part of one shape; here it is only metadata.

    Operations return at once: the ranks do them, in order. `fetch_shard`, `show` and ``item()`` wait for values.
    """

    _part: Part
    dispatch: ClassVar[Callable[..., Any]]
    """Issues an operation (`issue`)."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        __tracebackhide__ = True
        return cls.dispatch(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        part, grad = self._part, ", requires_grad=True" if self.requires_grad else ""
        if part.device.blocked:
            return f"DistributedTensor(shape={tuple(self.shape)}, {part.device.blocked})"
        mesh = part.device.mesh
        dtype = str(self.dtype).removeprefix("torch.")
        where = f"{mesh.name} {dict(mesh.extent)}" if mesh.extent else mesh.name
        placed = part.device.describe_placements(self)
        read = "x.full_tensor()" if placed else "show(x) or fetch_shard(x).result()"
        return (
            f"DistributedTensor(shape={tuple(self.shape)}, dtype={dtype}, device={self.device.type}, mesh={where}, "
            f"{placed or 'one per rank'}{grad})\n  {part.device.describe_origin(part.op)}; values: {read}"
        )

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 and spec else format(repr(self), spec)

    def _repr_html_(self) -> str | None:
        picture = None if self._part.device.blocked else self._part.device.picture_of(self)
        return None if picture is None else f"<pre>{escape(repr(self))}</pre>{picture._repr_html_()}"

    def placements_picture(self) -> Any:
        """Return a picture of a sharded tensor that says which ranks have which part, as text and as HTML.

        Raises:
            TensorError: The tensor is not sharded.
        """
        picture = self._part.device.picture_of(self)
        if picture is None:
            raise TensorError("placements_picture() is for sharded tensors; each rank has a whole tensor here")
        return picture

    @property
    def mesh(self) -> Any:
        """The mesh whose ranks hold it."""
        return self._part.device.mesh

    def slice_mesh(self, /, **axes: Any) -> DistributedTensor:
        """Return the tensor on a slice of its mesh, without a copy: an int drops an axis, a slice keeps it."""
        return self._part.device.slice_of(self, axes)

    def redistribute(self, **placements: Any) -> DistributedTensor:
        """Place a sharded tensor in another way: ``x.redistribute(tp=Replicate())``; axes that are left out stay as they are.

        Raises:
            KeyError: There is no such axis.
            TensorError: The tensor is not sharded, or the placement is not possible.
        """
        return self._part.device.placed(self, "redistribute", placements)

    def local(self) -> DistributedTensor:
        """The parts of a sharded tensor, as a tensor of which each rank has its own, without a copy.

        Raises:
            TensorError: The tensor is not sharded, or the parts have different shapes.
        """
        return self._part.device.placed(self, "local", {})

    def full_tensor(self) -> torch.Tensor:
        """Fetch the whole of a sharded tensor, as a plain tensor, and wait for it.

        Raises:
            TensorError: The tensor is not sharded, or an operation that it depends on has failed.
        """
        return self._part.device.fetched_whole(self)

    def to_mesh(self, mesh: Any, /, **placements: Any) -> DistributedTensor:
        """Copy the tensor to another mesh, from rank to rank, and wait until it is there.

        Each rank gets the part of the rank with the same indexes. Along axes that only the other mesh has, all ranks get the
        same.

        A sharded tensor may be placed in another way there, on an axis of any size: each rank gets its part from the ranks that
        have it. What is Partial is added first.

        Args:
            mesh: The other mesh; for a sharded tensor all of its ranks.
            placements: Of a sharded tensor, by axis of the other mesh: ``x.to_mesh(servers, gpus=Shard(0))``. Axes that are
                left out have the placement along the axis of this name here, and replicate if there is none.

        Raises:
            KeyError: The other mesh has no axis of that name.
            MoveError: The other mesh lacks an axis of this one, or has another size along it; for a sharded tensor, it lacks
                an axis along which the tensor is sharded, and no placement says what to do.
            TensorError: An operation that the tensor depends on has failed, a gradient would be needed, or a placement is not
                possible.
            SupervisionError: A rank is dead or was stopped.
        """
        return self._part.device.moved(self, mesh, placements)

    def reduce(
        self,
        dims: str | Sequence[str],
        reduction: str = "sum",
        scatter: bool = False,
        mesh: Any = None,
        out: DistributedTensor | None = None,
    ) -> DistributedTensor:
        """Reduce along axes of the mesh: each rank gets the result of the ranks that differ only in these axes.

        Args:
            dims: An axis of the mesh or several; ``()`` for all.
            reduction: ``sum``, ``avg``, ``max``, ``min`` or ``product`` of the elements, or ``stack``: a tensor with a new
                first dimension for the ranks.
            scatter: Whether the first dimension of the tensor is an index along these axes. Each rank keeps only its own part
                of the result; with ``stack``, rank i gets part i of each rank.
            mesh: A slice of the mesh; only its ranks keep the result.
            out: A tensor that gets the result, and is returned.

        Raises:
            KeyError: There is no such axis.
            ValueError: There is no such reduction, or an axis is named twice.
            TensorError: The shape or the dtype does not fit, or a gradient would be needed.
        """
        made = self._part.device.reduced(self, dims, reduction, scatter=scatter, in_place=False, mesh=mesh)
        if out is None:
            return made
        if not isinstance(out, DistributedTensor) or (out.shape, out.dtype) != (made.shape, made.dtype):
            kind = describe(out) if isinstance(out, torch.Tensor) else type(out).__name__
            raise TensorError(f"out has to be a distributed tensor {describe(made)} for this reduction, not {kind}")
        return out.copy_(made)  # type: ignore[return-value]

    def reduce_(self, dims: str | Sequence[str], reduction: str = "sum") -> DistributedTensor:
        """Reduce along axes of the mesh (see `reduce`), and write the result into this tensor."""
        return self._part.device.reduced(self, dims, reduction, scatter=False, in_place=True)

    @property
    def data(self) -> torch.Tensor:
        """The same tensor without its history; an assignment makes this tensor refer to another one."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, DistributedTensor):
            raise TensorError(f"the data of a distributed tensor can't be {_kind_of(value)}: {_MOVE}")
        there, here = value._part, self._part
        if there.device is not here.device:
            raise TensorError("x.data = y needs two tensors of one mesh: fetch y, and put it on the mesh of x")
        made = value.detach()
        if there.layout != here.layout:
            _DATA.__set__(self, made)
        self._part = made._part  # type: ignore[attr-defined]

    def backward(
        self, gradient: torch.Tensor | None = None, retain_graph: bool | None = None, create_graph: bool = False,
        inputs: Any = None,
    ) -> None:  # fmt: skip
        """Compute gradients; see `torch.Tensor.backward`.

        Raises:
            TensorError: ``gradient`` is on another mesh, or in this process.
        """
        if isinstance(gradient, torch.Tensor) and not isinstance(gradient, DistributedTensor) and not gradient.dim():
            gradient = torch.full_like(self.detach(), gradient.item(), dtype=gradient.dtype)  # a number
        self._check_gradient(gradient, "x.backward(y)")
        super().backward(gradient, retain_graph, create_graph, inputs)  # type: ignore[no-untyped-call]

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, on the same mesh; see `torch.Tensor.grad`."""
        found: torch.Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._check_gradient(value, "x.grad = y")
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def _check_gradient(self, value: object, what: str) -> None:
        if not isinstance(value, torch.Tensor):  # None, or what torch refuses
            return
        if not isinstance(value, DistributedTensor):
            raise TensorError(f"{what} of a distributed tensor can't take {_kind_of(value)}: {_MOVE}")
        here, there = self._part.device, value._part.device
        if there is not here and not (here.blocked or there.blocked):
            names = " and ".join(f"{each.mesh.name} {dict(each.mesh.extent)}" for each in (here, there))
            raise TensorError(f"{what} needs tensors of one mesh and one stream, not of {names}")

    # -- what needs the values, or memory, in this process

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: the values are on the ranks."""
        self._refuse("numpy()")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("an array of NumPy")

    def tolist(self) -> NoReturn:
        """Refuse: the values are on the ranks."""
        self._refuse("tolist()")

    data_ptr = _without_memory("address")
    storage = _typed_storage = untyped_storage = _without_memory("storage")
    __dlpack__ = _without_memory("memory to share by DLPack")
    pin_memory = _without_memory("memory to pin")
    share_memory_ = _without_memory("memory to share")

    def to_mkldnn(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: such a tensor has no strides."""
        raise TensorError(
            "to_mkldnn() makes a tensor without strides, which distributed tensors have: use fetch_shard(x).result(), a plain "
            "tensor"
        )

    def apply_(self, function: Any) -> NoReturn:
        """Refuse: a Python function would need the elements here."""
        self._refuse_function("apply_()")

    def map_(self, tensor: Any, function: Any) -> NoReturn:
        """Refuse: a Python function would need the elements here."""
        self._refuse_function("map_()")

    def cuda(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the tensors are on the CPU of the ranks."""
        self._refuse_device("cuda")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert to another dtype; see `torch.Tensor.to`.

        Raises:
            TensorError: The device is not the CPU.
        """
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, (str, torch.device)) and torch.device(device).type not in ("cpu", "meta"):
            self._refuse_device(str(device))  # torch would look for the device in this process
        return super().to(*args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Do an operator of NumPy with a number, such as ``np.float32(2) * x``; refuse arrays."""
        given = [each.item() if _is_number_of_numpy(each) else each for each in inputs]
        if any(type(each).__module__ == "numpy" for each in given):
            raise TensorError(
                "an array of NumPy can't be used with distributed tensors: move it to the ranks with mesh.put(array)"
            )
        operation = _OPERATORS.get(ufunc.__name__) if method == "__call__" and not kwargs else None
        if operation is None:
            self._refuse(f"np.{ufunc.__name__}")
        return operation(*given)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TensorError(
            "a distributed tensor can't be pickled: its values are on the ranks; pickle fetch_shard(x).result(), or a dict of "
            "these"
        )

    def __copy__(self) -> DistributedTensor:
        """Return another tensor with the same memory, as `copy.copy` does for plain ones."""
        copied: DistributedTensor = self.detach().requires_grad_(self.requires_grad)  # type: ignore[assignment]
        copied.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_part"})
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that the user has made can be copied with deepcopy; use x.detach().clone()"
            )
        if id(self) in memo:
            copied: DistributedTensor = memo[id(self)]
            return copied
        copied = self.detach().clone().requires_grad_(self.requires_grad)  # type: ignore[assignment]
        copied.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_part"})
        memo[id(self)] = copied
        return copied

    def _refuse_function(self, what: str) -> NoReturn:
        raise TensorError(f"{what} calls a Python function for each element: use remote(function)(x) of this package")

    def _refuse_device(self, device: str) -> NoReturn:
        raise TensorError(
            f"a distributed tensor can't move to {device}: it is on the CPU of its ranks; leave the device out, or take a "
            "plain tensor from fetch_shard(x).result()"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise TensorError(
            f"{what} needs the values of a distributed tensor here: use fetch_shard(x).result(), a plain tensor"
        )


_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data

_MOVE = "it is in this process; move it to the ranks: mesh.put(x)"


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "true_divide": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod, "power": operator.pow,
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge,
    "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip
"""Functions of NumPy behind its operators."""


def _is_number_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and not getattr(value, "shape", None) and hasattr(value, "item")


def _kind_of(value: object) -> str:
    return "a plain tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def describe(tensor: torch.Tensor) -> str:
    """Describe a tensor in an error: ``(3, 4) float32``."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
