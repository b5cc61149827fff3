"""Reads the calls of collectives as data: the operation, its tensors, reduction and root, and the user's line that calls it.

Torch has three ways to call a collective: a method of ``ProcessGroup`` with options, one with their values one by one, and the
functional collectives, which call C++ without these methods. Values of tensors are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple

from monarch_kernel.errors import CollectiveError
from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user
from monarch_kernel.runtime.diagnostics.source_names import is_of_notebook, short_cell
from monarch_kernel.train.process_group.collective_calls import Arguments, Tensor, is_dense

__all__ = [
    "FUNCTIONS",
    "METHODS",
    "Method",
    "caller_of",
    "check_memory",
    "given_to_function",
    "given_to_message",
    "given_to_method",
    "key_of",
    "line_of",
]

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")


class Method(NamedTuple):
    """A method, and which positional arguments are its tensors and numbers of rows; -1 if it has none.

    Attributes:
        memory: what gloo takes of a tensor. ``elements``: it copies tensors that are not contiguous. ``dense``: as much of the
            memory as the tensor has elements, so that all ranks must have equal strides. ``dense inputs``: the same, but it
            copies inputs that have gaps. ``contiguous``: the same as ``dense``, but in the order of other tensors of the call.
    """

    operation: str
    outputs: int = -1
    inputs: int = -1
    received: int = -1
    sent: int = -1
    memory: str = "elements"


METHODS = {
    "allreduce": Method("all_reduce", inputs=0, memory="dense"),
    "allreduce_coalesced": Method("all_reduce", inputs=0),
    "broadcast": Method("broadcast", inputs=0, memory="dense"),
    "reduce": Method("reduce", inputs=0, memory="dense"),
    "allgather": Method("all_gather", 0, 1),
    "_allgather_base": Method("all_gather", 0, 1),
    "all_gather_single": Method("all_gather", 0, 1),
    "all_gather_single_coalesced": Method("all_gather", 0, 1),
    "allgather_coalesced": Method("all_gather", -1, 1),
    "allgather_into_tensor_coalesced": Method("all_gather", 0, 1),
    "gather": Method("gather", 0, 1),
    "scatter": Method("scatter", 0, 1, memory="contiguous"),
    "reduce_scatter": Method("reduce_scatter", 0, 1, memory="contiguous"),
    "_reduce_scatter_base": Method("reduce_scatter", 0, 1, memory="dense inputs"),
    "reduce_scatter_single": Method("reduce_scatter", 0, 1, memory="dense inputs"),
    "reduce_scatter_single_coalesced": Method("reduce_scatter", 0, 1),
    "reduce_scatter_tensor_coalesced": Method("reduce_scatter", 0, 1),
    "alltoall": Method("all_to_all", 0, 1),
    "alltoall_base": Method("all_to_all", 0, 1, 2, 3),
    "all_to_all_single": Method("all_to_all", 0, 1, 2, 3),
    "barrier": Method("barrier"),
}
"""Collectives among the methods of a process group."""

FUNCTIONS = {
    "broadcast": Method("broadcast", inputs=0),
    "all_reduce": Method("all_reduce", inputs=0),
    "all_gather_single": Method("all_gather", inputs=0),
    "all_gather_single_autograd": Method("all_gather", inputs=0),
    "all_gather_tensor": Method("all_gather", inputs=0),
    "all_gather_tensor_autograd": Method("all_gather", inputs=0),
    "reduce_scatter_single": Method("reduce_scatter", inputs=0),
    "reduce_scatter_single_autograd": Method("reduce_scatter", inputs=0),
    "reduce_scatter_tensor": Method("reduce_scatter", inputs=0),
    "reduce_scatter_tensor_autograd": Method("reduce_scatter", inputs=0),
    "all_reduce_coalesced": Method("all_reduce", inputs=0),
    "all_gather_single_coalesced": Method("all_gather", inputs=0),
    "all_gather_into_tensor_coalesced": Method("all_gather", inputs=0),
    "reduce_scatter_single_coalesced": Method("reduce_scatter", inputs=0),
    "reduce_scatter_tensor_coalesced": Method("reduce_scatter", inputs=0),
    "all_to_all_single": Method("all_to_all", -1, 0, 1, 2),
    "all_to_all_single_autograd": Method("all_to_all", -1, 0, 1, 2),
}
"""Functional collectives, which call C++ without the methods above. Some call others of them."""


def key_of(value: Any) -> Any:
    """What of an argument determines the description of a call; hashable."""
    kind = type(value)
    if kind is list or kind is tuple:
        return tuple(map(key_of, value))
    if kind is int or kind is str:
        return value
    read = _reader(kind)  # type: ignore[arg-type]
    return None if read is None else read(value)


@cache
def _reader(kind: type) -> Callable[[Any], Any] | None:
    """Reads what matters of a tensor, of a reduction, or of the options of a collective; None for other types."""
    import torch

    if issubclass(kind, torch.Tensor):
        return lambda tensor: (tensor.dtype, tensor.shape, tensor.layout, _strides(tensor))
    if kind.__name__ == "ReduceOp":
        return attrgetter("op")
    names = [name for name in ("reduceOp.op", "rootRank") if hasattr(kind, name.partition(".")[0])]
    return attrgetter(*names) if names else None


def check_memory(method: Method, args: Sequence[Any]) -> None:
    """Refuse tensors of which gloo would take other elements than theirs.

    Raises:
        CollectiveError: there is one.
    """
    if method.memory not in ("dense", "contiguous"):
        return
    for at in (method.inputs,) if method.memory == "dense" else (method.outputs, method.inputs):
        for tensor in _each_tensor(args[at]):
            strides = _strides(tensor)
            if strides and not (method.memory == "dense" and is_dense(tensor.shape, strides)):
                raise CollectiveError(
                    f"{method.operation} of {_tensors(tensor)[0]}, which is not contiguous: gloo would take other elements of "
                    "its memory, so it was refused; use a contiguous copy, x = x.contiguous()"
                )


@cache
def _strided() -> Any:
    import torch

    return torch.strided


def _strides(tensor: Any) -> tuple[int, ...]:
    """The strides of a tensor; empty if it is contiguous, or sparse."""
    if tensor.layout is not _strided() or tensor.is_contiguous():
        return ()
    return tuple(map(int, tensor.stride()))


def _each_tensor(value: Any) -> Iterator[Any]:
    """The tensors in nested lists."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _each_tensor(each)
    elif hasattr(value, "layout"):
        yield value


def given_to_method(method: Method, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a method of ProcessGroup, whose overloads have options, or their values one by one."""
    op, root = "", -1
    for each in (*args, *kwargs.values()):
        if type(each) is int and method.operation in _ROOTED:
            root = each
        elif hasattr(each, "rootRank"):
            root = int(each.rootRank)
        if method.operation in _REDUCING:
            op = _reduction(each) or op
    outputs = _without_strides(_tensors(args[method.outputs])) if method.outputs >= 0 else ()
    inputs = _tensors(args[method.inputs]) if method.inputs >= 0 else ()
    if method.memory == "dense inputs":
        inputs = tuple(each if is_dense(each.shape, each.strides) else each._replace(strides=()) for each in inputs)
    elif method.memory != "dense":
        inputs = _without_strides(inputs)
    received, sent = (tuple(args[at]) if 0 <= at < len(args) else () for at in (method.received, method.sent))
    return Arguments(inputs, outputs, op, root, sent, received)


def given_to_function(method: Method, given: Mapping[str, Any]) -> Arguments:
    """The arguments of a functional collective, by name."""
    first = next(iter(given.values()))
    op = str(given.get("reduceOp", "")).lower()
    rows = [tuple(given.get(name) or ()) for name in ("input_split_sizes", "output_split_sizes")]
    return Arguments(_without_strides(_tensors(first)), (), op, int(given.get("src", -1)), *rows)


def given_to_message(tensors: Any) -> Arguments:
    """The arguments of a message between two ranks that matter to both."""
    return Arguments(_without_strides(_tensors(tensors)))


def _reduction(value: Any) -> str:
    """The name of a reduction, or of that in options; empty for other values."""
    value = getattr(value, "reduceOp", value)
    value = getattr(value, "op", value)
    return str(value.name).lower() if type(value).__name__ == "RedOpType" else ""


def _tensors(value: Any) -> tuple[Tensor, ...]:
    """The tensors in nested lists."""
    if isinstance(value, (list, tuple)):
        return tuple(tensor for each in value for tensor in _tensors(each))
    layout = str(value.layout).removeprefix("torch.").removeprefix("strided")
    return (Tensor(str(value.dtype).removeprefix("torch."), tuple(map(int, value.shape)), layout, _strides(value)),)


def _without_strides(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(each._replace(strides=()) for each in tensors)


_is_user: dict[str, bool] = {}


def caller_of(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own code; None if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        found = _is_user.get(file)
        if found is None:
            found = _is_user[file] = is_user(frame) and not is_machinery(file)
        if found:
            return frame
        frame = frame.f_back
    return None


def line_of(frame: FrameType | None) -> str:
    """Name the line of a call. A file of the notebook stays as it is: the notebook puts the number of its cell there."""
    if frame is None:
        return ""
    file = frame.f_code.co_filename
    return f"{file if is_of_notebook(file) else short_cell(file)}, line {frame.f_lineno}"
