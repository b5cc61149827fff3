"""Finds the shapes and dtypes of results without values, and says operations as plain data.

An operation that was not seen before runs on fake tensors (`FakeTensorMode`), which have no memory. So its errors are raised at
the user's line, before anything is sent. What it finds is kept, because it takes a hundred times as long as all else.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from monarch_kernel.errors import TensorError
from monarch_kernel.features.tensors.records import Slot, Wholes
from monarch_kernel.tensor.distributed_tensor import DistributedTensor, describe

__all__ = [
    "LAYOUTS",
    "LEAF",
    "NOTHING",
    "Argument",
    "Layout",
    "Layouts",
    "OpInfo",
    "Outcome",
    "Result",
    "changed_by",
    "check",
    "info_of",
    "is_literal",
    "is_view",
    "learned_outcome",
    "propagate",
    "propagate_by",
    "set_bits",
    "templates_of",
    "title_of",
]

_LITERAL_OPS = frozenset({"lerp_", "addcmul_", "addcdiv_", "fill_", "mul_", "add_", "sub_", "div_"})
"""Operations besides those with the tag ``pointwise`` whose numbers do not influence the shape or the dtype."""

_HIDDEN_VIEWS = ("aten::_unsafe_view",)
"""Operations whose results have the memory of an argument, although their schemas do not say so."""

_NAMES_OF_USERS = {
    "_local_scalar_dense": "item()",
    "_to_copy": "to()",
    "_unique2": "torch.unique",
}
"""Names of functions whose operations have others."""

_INT64 = range(-(2**63), 2**63)


class Layout(NamedTuple):
    """The shape of a tensor in memory.

    Attributes:
        bits: 1 for ``x.conj()``, 2 for ``x.conj().imag``: views whose elements torch conjugates or negates when it reads them.
        placements: Of a sharded tensor, along each axis of its mesh (`features.tensors.records.TensorLayout`); its shape is
            that of the whole.
        number: Unique in this process; equal layouts have the same.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    bits: int
    placements: tuple[str, ...]
    number: int


class Layouts:
    """All layouts of this process."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Layout] = {}
        self._by_number: dict[int, Layout] = {}
        self._numbers = itertools.count()  # threads may add layouts at once

    def of(self, tensor: torch.Tensor) -> Layout:
        """The layout of a tensor."""
        if isinstance(tensor, DistributedTensor):
            return self.numbered(tensor._part.layout)
        place = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return self.make(*place, tensor.dtype, tensor.device, tensor.is_conj() + 2 * tensor.is_neg())

    def make(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
        bits: int = 0,
        placements: tuple[str, ...] = (),
    ) -> Layout:
        """The layout with these properties."""
        key = (shape, stride, offset, dtype, device, bits, placements)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Layout(*key, next(self._numbers))
            self._by_number[found.number] = found
        return found

    def numbered(self, number: int) -> Layout:
        """The layout with a number."""
        return self._by_number[number]


LAYOUTS = Layouts()
"""The layouts of this process, which sessions share."""


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What the schema of an operation says.

    Attributes:
        number: Unique in this process.
        op: The operation; the reference keeps its address, by which it is found, from being used again.
        name: As in `DefineOp`.
        title: In errors, such as ``torch.add``.
        takes_literals: Whether its numbers do not influence the layout of results, so that they travel in records.
        is_factory: Whether it takes no tensor and makes one.
        is_from_data: Whether it takes the tensor that ``torch.tensor(data)`` has made.
        is_local: Whether it always runs in this process.
    """

    number: int
    op: Any
    name: str
    title: str
    takes_literals: bool
    is_factory: bool
    is_from_data: bool
    is_local: bool


_infos: dict[int, OpInfo] = {}
_numbers = itertools.count()


def info_of(op: Any) -> OpInfo:
    """The properties of an operation."""
    found = _infos.get(id(op))
    if found is None:
        found = _infos[id(op)] = _make_info(op)
    return found


def _make_info(op: Any) -> OpInfo:
    schema = op._schema
    base = schema.name.partition("::")[2]
    takes_tensors = any("Tensor" in str(arg.type) for arg in schema.arguments)
    makes_tensors = any("Tensor" in str(each.type) for each in schema.returns)
    return OpInfo(
        next(_numbers),
        op,
        f"{schema.name}.{schema.overload_name or 'default'}",
        _NAMES_OF_USERS.get(base) or f"torch.{base}" if op.namespace == "aten" else f"torch.ops.{op.namespace}.{base}",
        torch.Tag.pointwise in op.tags or base in _LITERAL_OPS,
        op.namespace == "aten" and makes_tensors and not takes_tensors,
        schema.name == "aten::lift_fresh",
        op.namespace == "profiler",
    )


def title_of(info: OpInfo, args: Sequence[Any]) -> str:
    """The name of a call in errors; a check has the name of the function that it belongs to."""
    return f"torch.{args[1]}" if info.name == "aten::_linalg_check_errors.default" else info.title


# Results.


class Argument(NamedTuple):
    """A place in the arguments of an operation: by position, or by name if it is given so."""

    position: int
    name: str

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The argument there."""
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)


class Result(NamedTuple):
    """A part of the result of an operation: a new tensor, one of its arguments, or anything else, which is constant."""

    layout: Layout | None = None
    argument: Argument | None = None
    constant: Any = None


class Outcome(NamedTuple):
    """The result of an operation.

    Attributes:
        parts: Its parts; None if only the ranks can tell.
        tree: How the parts make up the result; None if there are none.
        is_value: Whether the result is no tensor, and depends on the values of tensors.
        relaid: The arguments whose shapes the operation changes, as ``squeeze_`` does, and their new layouts.
    """

    parts: tuple[Result, ...] | None
    tree: Any = None
    is_value: bool = False
    relaid: tuple[tuple[Argument, Layout], ...] = ()


LEAF = pytree.tree_flatten(0)[1]
"""The structure of a result that is one value."""

NOTHING = Outcome(())
"""The outcome of an operation that returns nothing."""

_FAKE = FakeTensorMode()
_ONLY_RANKS_KNOW = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    NotImplementedError,
    UnsupportedOperatorException,
)
"""Errors that say nothing about the arguments."""

_LOCK = threading.Lock()  # one thread at a time can be in a mode
_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def _fake() -> Iterator[None]:
    """Context in which operations run on fake tensors; torch would log each error with 30 lines, though it is raised, too."""
    was_disabled, _LOG.disabled = _LOG.disabled, True
    try:
        with _FAKE:
            yield
    finally:
        _LOG.disabled = was_disabled


def propagate(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
    """Run an operation on fake tensors.

    Raises:
        TensorError: The operation is wrong for these arguments, or is not possible on distributed tensors.
    """
    with _LOCK:
        return _propagate(info, args, kwargs)


def _propagate(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
    fakes = _Fakes()
    fake_args, fake_kwargs = pytree.tree_map(fakes.of, (tuple(args), dict(kwargs)))
    try:
        with _fake():
            result = info.op(*fake_args, **fake_kwargs)
    except (DynamicOutputShapeException, UnsupportedOperatorException):
        return _unknown(info)
    except DataDependentOutputException:
        return Outcome(None, is_value=True)
    except Exception as error:
        raise _error_of_op(error, fakes.tensors) from None
    relaid = tuple(fakes.relaid(info, args, kwargs))
    if not info.op._schema.returns:
        return NOTHING
    flat, tree = pytree.tree_flatten(result)
    returned = _returned(info.op)
    returned = returned if len(returned) == len(flat) else [None] * len(flat)
    parts = tuple(_result(info, part, argument) for part, argument in zip(flat, returned))
    return Outcome(parts, tree, relaid=relaid)


def check(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Wholes | None]:
    """Raise the error that shapes and dtypes decide, for an operation on sharded tensors: fake tensors stand for the wholes.

    Returns:
        Whether the shapes of results do not depend on values, and the wholes of the results if they are known.

    Raises:
        TensorError: The operation is wrong for these arguments.
    """
    fakes = _Fakes()
    with _LOCK:
        fake_args, fake_kwargs = pytree.tree_map(fakes.of, (tuple(args), dict(kwargs)))
        try:
            with _fake():
                result = info.op(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return False, None
        except _ONLY_RANKS_KNOW:
            return torch.Tag.dynamic_output_shape not in info.op.tags, None
        except Exception as error:
            if "size and stride" not in str(error):  # the parts of ranks may have strides that suit
                raise _error_of_op(error, fakes.tensors) from None
            return True, None
    for part in pytree.tree_leaves(result):
        _result_of(info.title, part)
    return True, _wholes(result)


def _wholes(result: Any) -> Wholes | None:
    if isinstance(result, torch.Tensor):
        return "tensor", [_whole(result)]
    return (type(result).__name__, [_whole(each) for each in result]) if type(result) in (list, tuple) else None


def _whole(part: Any) -> tuple[tuple[int, ...], tuple[int, ...], str] | None:
    return (tuple(part.shape), tuple(part.stride()), str(part.dtype)[6:]) if isinstance(part, torch.Tensor) else None


def propagate_by(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
    """Find the results of a function with another one, which runs on fake tensors and returns tensors of the same shapes.

    Raises:
        TensorError: It is wrong for these arguments, or needs values.
    """
    fakes = _Fakes()
    with _LOCK, _disable_current_modes():  # in mesh.activate() each new tensor would be issued
        fake_args, fake_kwargs = pytree.tree_map(fakes.of, (tuple(args), dict(kwargs)))
        try:
            with _fake():
                result = function(*fake_args, **fake_kwargs)
        except Exception as error:
            raise _error_of_user(error, fakes.tensors) from error
    flat, tree = pytree.tree_flatten(result)
    return Outcome(tuple(_result_of(name, part) for part in flat), tree)


def _result(info: OpInfo, part: Any, argument: Argument | None) -> Result:
    if argument is not None:
        return Result(argument=argument)
    return _result_of(info.title, part)


def _result_of(title: str, part: Any) -> Result:
    if not isinstance(part, torch.Tensor):
        return Result(constant=part)
    if part.layout != torch.strided:
        raise TensorError(f"{title} makes a tensor with the layout {part.layout}; distributed tensors are strided")
    if part.device.type != "cpu":
        raise TensorError(
            f"{title} makes a tensor on the device {part.device}, but distributed tensors are on the CPU of their ranks: "
            "leave the device out"
        )
    return Result(layout=LAYOUTS.of(part))


def _unknown(info: OpInfo) -> Outcome:
    """The outcome of an operation whose results have shapes that depend on values."""
    kinds = [str(each.type) for each in info.op._schema.returns]
    if changed_by(info.op) or not kinds or any(kind != "Tensor" for kind in kinds):
        raise TensorError(f"{info.title} is not possible on distributed tensors: what it returns depends on values")
    _, tree = pytree.tree_flatten(0 if len(kinds) == 1 else tuple(kinds))
    return Outcome(None, tree)


def learned_outcome(op: Any, structure: Any, layouts: Sequence[Layout]) -> Outcome | None:
    """Make the outcome of an operation from its first result; None if that has numbers which another call may not have.

    Args:
        op: The operation.
        structure: The result, with a `Slot` in place of each tensor.
        layouts: Those of the tensors.
    """
    flat, tree = pytree.tree_flatten(structure)
    returned = _returned(op)
    returned = returned if len(returned) == len(flat) else [None] * len(flat)
    if not op._schema.returns:
        return NOTHING
    parts = tuple(
        Result(argument=argument)
        if argument is not None
        else Result(layout=layouts[each.index])
        if type(each) is Slot
        else Result(constant=each)
        for each, argument in zip(flat, returned)
    )
    return Outcome(parts, tree) if all(type(each) is Slot or each is None for each in flat) else None


def changed_by(op: Any) -> list[Argument]:
    """The arguments that an operation changes."""
    return [Argument(i, arg.name) for i, arg in enumerate(op._schema.arguments) if _is_written(arg)]


def is_view(op: Any) -> bool:
    """Whether the results of an operation have the memory of a tensor that it takes, and are not this tensor."""
    returns = [each.alias_info for each in op._schema.returns]
    return op._schema.name in _HIDDEN_VIEWS or any(each is not None and not each.is_write for each in returns)


def _returned(op: Any) -> list[Argument | None]:
    """For each result of an operation, the argument that it is."""
    found: list[Argument | None] = []
    for each in op._schema.returns:
        names = set(each.alias_info.before_set) if _is_written(each) and str(each.type) == "Tensor" else set()
        same = (arg for arg in changed_by(op) if names & set(op._schema.arguments[arg.position].alias_info.before_set))
        found.append(next(same, None) if names else None)
    return found


def _is_written(part: Any) -> bool:
    return part.alias_info is not None and part.alias_info.is_write


class _Fakes:
    """The fake tensors that stand for the arguments of one operation."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}
        self.tensors: list[torch.Tensor] = []

    def of(self, arg: Any) -> Any:
        """The fake tensor of an argument; anything else stays as it is."""
        if not isinstance(arg, torch.Tensor):
            return arg
        found = self._made.get(id(arg))
        if found is None:
            with _fake():
                found = self._made[id(arg)] = _like(arg)
        self.tensors.append(arg)
        return found

    def relaid(self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Argument, Layout]]:
        """Yield the arguments whose layouts the operation has changed.

        Raises:
            TensorError: One would get another number of elements, and perhaps other memory.
        """
        for argument in changed_by(info.op):
            arg = argument.of(args, kwargs)
            if not isinstance(arg, torch.Tensor) or _place(self._made[id(arg)]) == _place(arg):
                continue
            made = self._made[id(arg)]
            if made.numel() != arg.numel():
                raise TensorError(
                    f"{info.title} would change the size of a distributed tensor in place, from {tuple(arg.shape)} to "
                    f"{tuple(made.shape)}: use an operation that returns a new tensor"
                )
            yield argument, LAYOUTS.of(made)


def set_bits(tensor: torch.Tensor, bits: int) -> None:
    """Mark a new tensor as conjugated or negated (`Layout`)."""
    if bits & 1:
        torch._C._set_conj(tensor, True)
    if bits & 2:
        torch._C._set_neg(tensor, True)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor with the layout of another one."""
    made = _empty_like(tensor)
    set_bits(made, tensor.is_conj() + 2 * tensor.is_neg())
    return made


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    if not offset:
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
    size = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride) if n > 1)
    return torch.empty(size, dtype=tensor.dtype, device=tensor.device).as_strided(shape, stride, offset)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype


_KEPT = (IndexError, NotImplementedError, ValueError)
"""Errors that programs expect of torch; torch itself turns a TypeError of an operator into another one."""


def _error_of_op(error: Exception, tensors: Sequence[torch.Tensor]) -> Exception:
    """Make the error of an operation, whose tensors are all fake unless torch.compile has put its own mode in between."""
    if "convert all Tensors to FakeTensors" in str(error):
        return TensorError(
            "torch.compile can't compile functions of distributed tensors: use record(function), or compile it on the ranks, "
            "with remote(torch.compile(function))(x)"
        )
    return _error_of_user(error, tensors)


def _error_of_user(error: Exception, tensors: Sequence[torch.Tensor]) -> Exception:
    """Make the error that a plain tensor would have raised, with the shapes of the tensors."""
    text = str(error).strip() or type(error).__name__
    shapes = ", ".join(_described(each) for each in tensors)
    text += f"\n  of {shapes}" if shapes else ""
    return type(error)(text) if type(error) in _KEPT else TensorError(text)


def _described(tensor: torch.Tensor) -> str:
    placed = tensor._part.device.describe_placements(tensor) if isinstance(tensor, DistributedTensor) else ""
    return describe(tensor) + (f" {placed}" if placed else "")


# Arguments as plain data.


class Templates(NamedTuple):
    """The arguments of an operation as templates (`features.tensors.records`).

    Attributes:
        tensors: For each argument, by position and then by name, the indexes of its tensors in a record.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    tensors: dict[int | str, list[int]]


def templates_of(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Templates:
    """Make templates of arguments; tensors and literals are left out."""
    count = 0
    tensors: dict[int | str, list[int]] = {}
    made: dict[int | str, Any] = {}
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, arg in places:
        made[place] = template = _literal(arg) if info.takes_literals and is_literal(arg) else template_of(arg)
        n = sum(1 for each in ([template] if template[0] != "list" else template[1]) if each[0] == "tensor")
        tensors[place] = list(range(count, count + n))
        count += n
    return Templates([made[i] for i in range(len(args))], {name: made[name] for name in kwargs}, tensors)


def is_literal(arg: Any) -> bool:
    """Whether an argument is a number that can travel in a record."""
    return type(arg) is float or (type(arg) is int and arg in _INT64)


def _literal(arg: Any) -> list[Any]:
    return [type(arg).__name__]


_NAMED = ((torch.dtype, "dtype"), (torch.layout, "layout"), (torch.memory_format, "memory_format"))


def template_of(arg: Any) -> list[Any]:
    """Make the template of an argument.

    Raises:
        TensorError: It can't be sent to ranks.
    """
    if isinstance(arg, DistributedTensor):
        return ["tensor"]
    if isinstance(arg, torch.Tensor):
        value = arg.item()
        return ["scalar", [value.real, value.imag] if isinstance(value, complex) else value, _name(arg.dtype)]
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return ["value", arg]
    if isinstance(arg, complex):
        return ["complex", arg.real, arg.imag]
    if isinstance(arg, (list, tuple)):
        return ["list", [template_of(item) for item in arg]]
    if isinstance(arg, torch.device):
        return ["device", str(arg)]
    for kind, name in _NAMED:
        if isinstance(arg, kind):
            return [name, _name(arg)]
    if isinstance(arg, torch.Generator):
        raise TensorError(
            "a generator of this process can't be used on ranks: seed those with tensor.manual_seed(seed)"
        )
    raise TensorError(f"an operation on distributed tensors can't take a {type(arg).__name__}")


def _name(arg: Any) -> str:
    return str(arg).removeprefix("torch.")
