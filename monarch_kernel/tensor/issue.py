"""Issues operations on distributed tensors: turns each into a record for the ranks, and makes the tensors that it returns.

Theory of operation
===================

`issue` runs for each ATen operation that has a distributed tensor among its arguments, below autograd. It must be quick, so it

- makes a key of the operation, the layouts of the tensors and the other arguments,
- looks up the `Entry` of the key, which has the layouts of the results,
- adds a record of integers to the open batch (`features.tensors.stream`), and
- makes wrappers for the results.

If there is no such entry, `propagation` finds the results, and the ranks get a definition. Numbers that can't influence a
layout (a learning rate) are no part of the key, but travel in the record.

Operations follow their arguments; where a new tensor is made is the business of `on_mesh.activate`. All tensors of an operation
are on the same ranks, a `Device`.

If the result is a number (``item()``) or has a shape that depends on values (``nonzero``), the thread waits for the ranks,
which must agree.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch_kernel.errors import TensorError
from monarch_kernel.features.tensors.functions import MAX_RESULTS
from monarch_kernel.features.tensors.records import Slot
from monarch_kernel.tensor.device import Device, Entry, ForgottenError, common_device, placing
from monarch_kernel.tensor.distributed_tensor import DistributedTensor
from monarch_kernel.tensor.drawing import is_random
from monarch_kernel.tensor.lines import user_place
from monarch_kernel.tensor.propagation import (
    LAYOUTS,
    LEAF,
    NOTHING,
    Layout,
    OpInfo,
    Outcome,
    Result,
    changed_by,
    check,
    info_of,
    learned_outcome,
)
from monarch_kernel.tensor.reading import agreed_layouts, agreed_value, described_result

__all__ = ["issue", "result_of"]


def issue(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, device: Device | None = None) -> Any:
    """Issue an ATen operation, and return its result.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: The others.
        device: Where to make the tensors of an operation that takes none.

    Raises:
        TensorError: It is wrong for these arguments, or not possible on distributed tensors.
        SupervisionError: A rank is dead or was stopped.
    """
    __tracebackhide__ = True
    info = info_of(func)
    if info.is_local:
        return func(*args, **(kwargs or {}))
    key: list[Any] = [info.number]
    ids: list[int] = []
    ints: list[int] = []
    floats: list[float] = []
    takes_literals = info.takes_literals
    values = args
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        key.append(dtype)
    if kwargs:
        key.append(tuple(kwargs))
        values = (*args, *kwargs.values())
    try:
        for arg in values:
            kind = type(arg)
            if kind is DistributedTensor:
                part = arg._part
                there = part.device
                if there is not device:
                    device = there if device is None and not there.blocked else common_device(device, there)
                ids.append(part.id)
                key.append(part.layout)
            elif takes_literals and kind is float:
                floats.append(arg)
                key.append(float)
            elif takes_literals and kind is int and -(2**63) <= arg < 2**63:
                ints.append(arg)
                key.append(int)
            else:
                device = _add_to_key(key, ids, arg, device)
    except _PlainTensorError as error:
        if error.refusal and not _has_plain_only_at(_PUT.get(info.name, ()), args):
            raise TensorError(error.refusal) from None
        return issue(func, *_with_plain_ones_put(info, args, kwargs or {}))
    assert device is not None
    full_key = tuple(key)
    entry = device.entries.get(full_key)
    if entry is None:
        if device.has_sharded and is_any_sharded(values):
            return learn(device, full_key, info, args, kwargs or {}, (ids, ints, floats))
        entry = device.entry_for(full_key, info, args, kwargs or {})
    if entry.changed:
        for each in entry.changed:
            written = each.of(args, kwargs or {})
            if type(written) is not DistributedTensor:
                _count_writes(info, written)
            elif written._part.lent:
                raise TensorError(f"{entry.title} can't write to a tensor: {written._part.lent}")
    if entry.number < 0:
        parts = entry.outcome.parts or ()
        return pytree.tree_unflatten([part.constant for part in parts], entry.outcome.tree)
    try:
        first, op = device.record(entry, ids, ints, floats, user_place(sys._getframe(2)))
    except ForgottenError:
        return issue(func, args, kwargs, device)
    for argument, layout in entry.outcome.relaid:
        _lay_out(argument.of(args, kwargs or {}), layout)
    if entry.single is not None:
        return device.new(entry.single, first, op)
    if entry.argument is not None:
        return entry.argument.of(args, kwargs or {})
    return result_of(device, entry, first, op, args, kwargs or {})


def is_any_sharded(values: Sequence[Any]) -> bool:
    """Whether there is a sharded tensor among arguments."""
    return any(
        bool(LAYOUTS.numbered(each._part.layout).placements)
        for each in pytree.tree_leaves(list(values))
        if type(each) is DistributedTensor
    )


def learn(
    device: Device,
    key: tuple[Any, ...],
    info: OpInfo,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    taken: tuple[Sequence[int], Sequence[int], Sequence[float]],
) -> Any:
    """Do an operation on sharded tensors for the first time: the ranks say what its result is.

    They have the sharded tensors of torch, whose rules say what is redistributed and how results are placed. The rules are not
    applied here: it would cost more than to wait for the ranks once. But what shapes and dtypes decide is an error before that.
    """
    if torch.Tag.inplace_view in info.op.tags:
        return _reshape_in_place(info, args, kwargs)
    is_kept, wholes = check(info, args, kwargs)
    for each in changed_by(info.op):
        _count_writes(info, each.of(args, kwargs))
    placing().form_group(device.mesh.whole)  # it may have been aborted
    is_drawn = is_random(info, args, kwargs)
    if is_drawn and not device.has_seed:
        device.seed_draws(torch.initial_seed() + device.target.number)  # a mesh that was healed goes on with others
    if info.name == "aten::_local_scalar_dense.default":
        return issue(info.op, (args[0].detach().redistribute(**dict.fromkeys(device.mesh.extent, "R")).local(),))
    unknown = Outcome(None, LEAF)
    if not is_kept and device.session.recorder is not None:
        device.session.recorder.refuse_wait(info.title)
    entry = device.entry_with(key, info, args, kwargs, unknown, is_learned=True, is_drawn=is_drawn, wholes=wholes)
    first, op = device.record(entry, *taken, user_place(sys._getframe(3)))
    if device.session.recorder is None:
        device.stream.drop_entry(device.target, entry.number)
    try:
        structure, found = described_result(device, first, entry.title)
    except BaseException:
        device.frees.extend(range(first, first + MAX_RESULTS))
        raise
    layouts = [LAYOUTS.make(*each) for each in found]
    made = [device.new(layout, first + place, op) for place, layout in enumerate(layouts)]
    outcome = learned_outcome(info.op, structure, layouts)
    if outcome is not None and is_kept:
        device.entry_with(key, info, args, kwargs, outcome, is_drawn=is_drawn)
    flat, tree = pytree.tree_flatten(structure)
    parts = outcome.parts if outcome is not None and outcome.parts else [Result()] * len(flat)
    results = [
        part.argument.of(args, kwargs) if part.argument else made[each.index] if type(each) is Slot else each
        for part, each in zip(parts, flat)
    ]
    return pytree.tree_unflatten(results, tree)


def _count_writes(info: OpInfo, written: Any) -> None:
    """Count the writes of an operation on lists of tensors for autograd; torch's kernels do it below, where these are plain."""
    if isinstance(written, (list, tuple)) and info.name.startswith("aten::_foreach_"):
        torch.autograd.graph.increment_version(written)


def _reshape_in_place(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make a sharded tensor refer to another view of its memory, as ``x.squeeze_()`` does.

    Raises:
        TensorError: There is no operation that makes such a view.
    """
    base, written = info.op._schema.name.partition("::")[2], args[0]
    overloads = getattr(torch.ops.aten, base[:-1], None) if base in _RESHAPES else None
    if overloads is None:
        raise TensorError(
            f"{info.title} is not possible on sharded tensors: use an operation that returns a new tensor"
        )
    overload = getattr(overloads, "int" if base == "transpose_" else info.op._overloadname)
    made = issue(overload, args, kwargs)
    written._part = made._part
    _lay_out(written, LAYOUTS.of(made))
    return written


_RESHAPES = frozenset(("squeeze_", "unsqueeze_", "transpose_", "t_"))


def _lay_out(tensor: Any, layout: Layout) -> None:
    """Give a wrapper the layout that its tensor on the ranks has now; it has no memory, so no operation need run."""
    with torch._C._DisableTorchDispatch():
        torch.ops.aten.as_strided_.default(tensor, layout.shape, layout.stride, layout.offset)
    tensor._part.layout = layout.number


class _PlainTensorError(Exception):
    """There is a plain tensor among the arguments.

    Attributes:
        refusal: What is wrong with it; empty if torch has made it for this operation, such as of the list in ``x[[0, 2]]``.
    """

    def __init__(self, refusal: str = "") -> None:
        super().__init__(refusal)
        self.refusal = refusal


_PUT = {
    "aten::copy_.default": (0, 1),  # data for a tensor comes from anywhere, as on a GPU
    "aten::_embedding_bag.default": (2,),  # the offsets, which torch makes for rows of equal length
    "aten::_embedding_bag_forward_only.default": (2,),
}
"""The places of arguments whose plain tensors are put on the ranks."""

_BORN_INSIDE = 5
"""Number of references to such a tensor in `_add_to_key`: only this code has any, while the program holds its own tensors. To
mistake one for the other does no harm: it is put on the ranks, or refused with the hint to put it."""


def _with_plain_ones_put(
    info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of an operation with plain tensors put on the device of the others.

    Raises:
        TensorError: The operation would change a plain tensor.
    """
    flat, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    device: Any = next(each._part.device for each in flat if type(each) is DistributedTensor)
    if any(_is_plain(argument.of(args, kwargs)) for argument in changed_by(info.op)):
        raise TensorError(
            f"{info.title} is not possible with distributed tensors: torch would write to a plain tensor; write "
            "fetch_shard(x).result() to it, or, if a function has made it, call that function in mesh.activate()"
        )
    put = (lambda each: placing().shard(device, each, {})) if is_any_sharded(flat) else device.put
    moved = [put(each) if _is_plain(each) else each for each in flat]
    there: tuple[Sequence[Any], Mapping[str, Any]] = pytree.tree_unflatten(moved, tree)
    return there


def _has_plain_only_at(places: Collection[int], args: Sequence[Any]) -> bool:
    return bool(places) and not any(_is_plain(each) for at, each in enumerate(args) if at not in places)


def _is_plain(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dim() > 0 and not isinstance(arg, DistributedTensor)


def result_of(device: Device, entry: Entry, first: int, op: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Make the result of an operation that returns anything else than one tensor."""
    outcome = entry.outcome
    if outcome is NOTHING:
        return None
    ids = range(first, first + entry.n_new)
    if outcome.parts is None and device.session.recorder is not None:
        device.frees.extend(ids)
        device.session.recorder.refuse_wait(entry.title)
    if outcome.parts is not None:
        new = iter(ids)
        flat = [
            device.new(part.layout, next(new), op)
            if part.layout is not None
            else part.argument.of(args, kwargs)
            if part.argument is not None
            else part.constant
            for part in outcome.parts
        ]
        return pytree.tree_unflatten(flat, outcome.tree)
    try:
        if outcome.is_value:
            value = agreed_value(device, first, entry.title)
            device.frees.append(first)
            return value
        found = agreed_layouts(device, ids, entry.title)
    except BaseException:
        device.frees.extend(ids)
        raise
    layouts = [LAYOUTS.make(*each) for each in found]
    return pytree.tree_unflatten([device.new(layout, id, op) for layout, id in zip(layouts, ids)], outcome.tree)


_INTS = {int}


def _add_to_key(key: list[Any], ids: list[int], arg: Any, device: Device | None) -> Device | None:
    """Add an argument that is no distributed tensor to a key; return the device of the operation so far."""
    kind = type(arg)
    if kind is list or kind is tuple:
        if set(map(type, arg)) == _INTS:  # a shape, or dimensions
            key.append((list, tuple(arg)))
            return device
        key.append((list, len(arg)))
        for each in arg:
            if type(each) is DistributedTensor:
                part = each._part
                if part.device is not device:
                    device = common_device(device, part.device)
                ids.append(part.id)
                key.append(part.layout)
            else:
                device = _add_to_key(key, ids, each, device)
    elif isinstance(arg, torch.Tensor):
        if arg.dim() and sys.getrefcount(arg) <= _BORN_INSIDE:
            raise _PlainTensorError
        if arg.dim() or kind is not torch.Tensor or arg.requires_grad or arg.device.type != "cpu":
            text = (
                f"a tensor of this process, {tuple(arg.shape)} {str(arg.dtype)[6:]} on {arg.device}, can't be used with "
                "distributed tensors: move it to the ranks with mesh.put(x), or with mesh.shard(x) beside sharded tensors; "
                "if a function has made it, call that function in mesh.activate()"
            )
            if arg.requires_grad or kind is not torch.Tensor or arg.device.type != "cpu":
                raise TensorError(text)
            raise _PlainTensorError(text)
        key.append((kind, arg.dtype, repr(arg.item())))
    elif kind is float:
        key.append((kind, arg.hex()))  # 0.0 and -0.0 differ, and nan equals nan
    else:
        key.append((kind, arg))
    return device


DistributedTensor.dispatch = staticmethod(issue)
