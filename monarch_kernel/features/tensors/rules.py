"""Operations on sharded tensors, so that each gives what it gives on plain tensors.

Theory of operation
===================

DTensor has a rule for most operations, which says how arguments must be placed and how results are. This module decides once
for each entry, from the operation and the placements, how a rank does it. All ranks decide alike, so they do the same
collectives.

*By torch's rule*, if there is one and it is right.

*By a rule of this module*, where torch's is wrong or costs more: losses with a mean, and operations that treat each sample by
itself, such as convolutions, which stay sharded by samples.

*On the whole*, otherwise: each rank gathers its arguments, does the operation on plain tensors, and the results are replicated.
What the operation changes is placed again as it was.

*Views.* A view of a dimension that is sharded can need elements of other ranks, and then it is a copy on the ranks. `_Memory`
knows such copies: a write to one of them is also done in the tensor that it is a view of, and the other way round.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from monarch_kernel.features.tensors.parts import is_sharded
from monarch_kernel.features.tensors.records import Poison

__all__ = ["ShardedOp", "keep_memory", "least_samples", "note_write", "on_whole"]

Do = Callable[..., Any]

_WHOLE = frozenset(
    (
        "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
        "native_batch_norm_backward", "batch_norm_backward", "fold",
    )
)  # fmt: skip
"""Operations for which torch's rule is wrong for some placements. If all arguments are replicated, it is right."""

_MEAN_LOSSES = frozenset(
    (
        "mse_loss",
        "smooth_l1_loss",
        "huber_loss",
        "soft_margin_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    )
)
"""Losses whose mean is over all elements. Torch's rule takes the mean of the means of parts, and so do gradients."""

_BY_MASK = frozenset(("embedding", "embedding_dense_backward", "gather"))
"""Operations that look up indexes. Torch's rule masks those of other ranks once, so it is wrong where two axes shard the same
dimension."""

_SIGNED = frozenset(("argmax", "argmin", "cumprod", "cumprod_", "cumsum", "cumsum_", "logcumsumexp"))
"""Operations whose rule of torch takes a negative dimension for one that is not sharded."""

_DUNDER = frozenset(("__and__", "__lshift__", "__or__", "__rshift__", "__xor__"))
"""Operations that torch takes for ones in place, because of their names; then they return their argument."""

_NEED_ELEMENTS = frozenset(("amax", "amin", "aminmax", "argmax", "argmin", "max", "min"))
"""Reductions that fail without elements. If some rank has none, it would fail alone, and the others would wait for it."""

_FILLS = frozenset(("new_ones", "new_full", "ones_like", "full_like"))
"""Operations whose results torch's rule makes partial as the argument is, sometimes; then the ones of all ranks add up."""

_LINEAR_WRITES = frozenset(("add_", "sub_", "mul_", "div_", "neg_", "zero_", "lerp_", "copy_"))
"""Operations that torch's rules do rightly in place on a tensor that is partial. Others would change each addend."""

_HIDDEN_WRITES = {"native_batch_norm": (3, 4)}
"""Arguments that operations change although their schemas do not say so."""

_LAZY = frozenset(("_conj", "_neg_view"))
"""Views whose elements torch computes when it reads them. It can't gather the parts of such a tensor, so ranks compute them."""

_PUTS = frozenset(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"))
"""Writes to elements that are chosen by indexes. Torch's rule takes a mask for numbers of rows."""

_MEAN = 1
"""The number of the reduction to a mean in arguments of losses; 2 is the sum."""


class ShardedOp:
    """An ATen operation whose tensors may be sharded.

    Args:
        op: The operation.
    """

    __slots__ = ("_do", "_op")

    def __init__(self, op: Any) -> None:
        self._op = op
        self._do: Do | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        do = self._do
        if do is self._op:
            return do(*args, **kwargs)
        if _has_poison(args) or _has_poison(kwargs.values()):  # before this rank takes part in a collective
            raise LookupError("an argument is lost")
        if do is not None:
            return do(*args, **kwargs)
        if not any(is_sharded(each) for each in _leaves(args, kwargs)):
            self._do = self._op
            return self._op(*args, **kwargs)
        do = _chosen(self._op, args, kwargs)
        result = do(*args, **kwargs)
        if _is_new(self._op) and any(_is_laid_otherwise(each) for each in _leaves((result,), {})):
            do, result = functools.partial(_laid_out, do), as_whole(result)
        self._do = do
        return result


def _is_new(op: Any) -> bool:
    """Whether the results of an operation share no memory with its arguments."""
    return all(each.alias_info is None for each in op._schema.returns)


def _laid_out(do: Do, *args: Any, **kwargs: Any) -> Any:
    return as_whole(do(*args, **kwargs))


def _has_poison(values: Iterable[Any]) -> bool:
    return any(
        type(each) is Poison or (type(each) is list and any(type(item) is Poison for item in each)) for each in values
    )


def _leaves(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    from torch.utils import _pytree as pytree

    leaves: list[Any] = pytree.tree_leaves((args, kwargs))
    return leaves


_REDUCTIONS = frozenset(("sum", "nansum", "mean", "amax", "amin", "std", "var", "logsumexp", "linalg_vector_norm"))
"""Operations for which no dimensions mean all."""


def _chosen(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Do:
    """Decide how to do an operation for arguments that are placed so."""
    base = op._schema.name.partition("::")[2]
    is_reduction = base in _REDUCTIONS and is_sharded(args[0]) and args[0].dim()
    if is_reduction and any(each == [] for each in (*args[1:], kwargs.get("dim"))):
        # Torch's rule takes the list as it is, and keeps the parts of ranks apart.
        dims = list(range(args[0].dim()))
        place = next((at for at, each in enumerate(args) if at and each == []), -1)
        do = _chosen(
            op,
            [dims if at == place else each for at, each in enumerate(args)],
            {**kwargs, **({} if place > 0 else {"dim": dims})},
        )
        return functools.partial(_with_dims, do, place, dims)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if base in _SIGNED and is_sharded(args[0]) and args[0].dim() and type(dim) is int and dim < 0:
        place, dim = 1 if len(args) > 1 else -1, dim + args[0].dim()
        there = _with_dims(lambda *args, **kwargs: (args, kwargs), place, dim, *args, **kwargs)
        return functools.partial(_with_dims, _choice(op, *there), place, dim)
    return _choice(op, args, kwargs)


def _with_dims(do: Do, place: int, dims: Any, *args: Any, **kwargs: Any) -> Any:
    """Do an operation with other dimensions in a place of its arguments; at -1, by name."""
    if place < 0:
        return do(*args, **{**kwargs, "dim": dims})
    return do(*args[:place], dims, *args[place + 1 :], **kwargs)


def _choice(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Do:
    base = op._schema.name.partition("::")[2]
    given = [each for each in _leaves(args, kwargs) if is_sharded(each)]
    do: Do
    # Torch's cache of rules can't have complex numbers.
    if base in _DUNDER or any(type(each) is complex for each in _leaves(args, kwargs)):
        do = functools.partial(on_whole, op)
    elif base in _LAZY:
        do = functools.partial(_as_view, op, _computed(op))
    elif base == "as_strided":
        do = functools.partial(_as_view, op, functools.partial(_strided, op))
    elif _is_replicated(given):
        do = _by_rule(op, args, kwargs)
    elif base in _PUTS and _has_mask(args[1]):
        do = functools.partial(_put_by_mask, op)
    elif base.removesuffix("_backward") in _MEAN_LOSSES:
        do = functools.partial(_mean_loss_backward if base.endswith("_backward") else _mean_loss, op)
    elif base in ("nll_loss_forward", "nll_loss2d_forward"):
        do = functools.partial(_nll_loss, op)
    elif base in ("nll_loss_backward", "nll_loss2d_backward"):
        do = functools.partial(_nll_loss_backward, op)
    elif base in _BY_SAMPLE and _has_samples(base, args):
        do = functools.partial(_by_sample, op, _BY_SAMPLE[base])
    elif (
        base in _WHOLE
        or (base in _NEED_ELEMENTS and any(_is_somewhere_empty(each) for each in given))
        or (base in _FILLS and _is_partial(given[0]))
        or (base in _BY_MASK and any(_is_split_twice(each) for each in given))
        or (base not in _LINEAR_WRITES and any(_is_partial(each) for each in _written(op, args, kwargs)))
    ):
        do = functools.partial(on_whole, op)
    else:
        do = _by_rule(op, args, kwargs)
    return functools.partial(_noting_writes, op, do) if _written(op, args, kwargs) else do


def _written(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The sharded tensors that an operation changes."""
    hidden = _HIDDEN_WRITES.get(op._schema.name.partition("::")[2], ())
    found = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if place in hidden or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    return [each for each in _leaves(found, {}) if is_sharded(each)]


def _is_partial(tensor: Any) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _is_replicated(tensors: Sequence[Any]) -> bool:
    return all(placement.is_replicate() for each in tensors for placement in each.placements)


def _by_rule(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Do:
    """Do an operation by torch's rule if there is one, and on the whole otherwise."""
    import torch
    from torch.distributed.tensor import DTensor

    dispatcher = DTensor._op_dispatcher
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in op._schema.returns)
    if op in dispatcher._custom_op_handlers:
        return op  # type: ignore[no-any-return]
    whole = functools.partial(on_whole, op)
    whole = functools.partial(_as_view, op, whole) if is_view else whole
    if op._schema.name in ("aten::view", "aten::_unsafe_view") and _is_split_twice(args[0]):
        return whole  # torch's rule splits the new dimensions by the first axis only
    try:
        info = dispatcher.unwrap_to_op_info(op, tuple(args), kwargs)
        found = _rule(dispatcher.sharding_propagator, info.schema)
    except NotImplementedError:
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
            return op  # type: ignore[no-any-return]  # torch does its parts
        return whole
    except Exception:
        return functools.partial(_whole_or_error, op, whole)
    if is_view and _is_split_by_stride(found.output_spec):
        return whole  # torch can't write the elements of a whole to such parts
    if is_view:
        return functools.partial(_as_view, op, op) if found.needs_redistribute else functools.partial(_sharing, op)
    return functools.partial(_unmasked, op)


def _rule(propagator: Any, schema: Any) -> Any:
    """Find torch's rule, and let torch's next search for it return it, too.

    The operation that follows would search again, as torch's cache in C++ has only what an operation has searched for. A search
    takes longer than all else. Where the cache in Python has the rule, it may be that of an earlier process group.
    """
    search, cache = type(propagator).propagate_op_sharding_non_cached, propagator.propagate_op_sharding
    misses = cache.cache_info().misses
    found = cache(schema)
    if cache.cache_info().misses > misses:
        propagator.propagate_op_sharding_non_cached = lambda wanted: (
            found if wanted == schema else search(propagator, wanted)
        )
    else:
        vars(propagator).pop("propagate_op_sharding_non_cached", None)
    return found


def _is_split_twice(tensor: Any) -> bool:
    """Whether two axes of the mesh shard the same dimension."""
    dims = [each.dim for each in tensor.placements if each.is_shard()]
    return len(dims) > len(set(dims))


def _is_split_by_stride(spec: Any) -> bool:
    """Whether a dimension is sharded twice, and the parts of one axis are no blocks, as in ``x.view(-1)``."""
    each = spec[0] if isinstance(spec, (list, tuple)) and spec else spec
    placements = getattr(each, "placements", ())
    by_stride = {each.dim for each in placements if type(each).__name__ == "_StridedShard"}
    return any(sum(getattr(each, "dim", -1) == dim for each in placements) > 1 for dim in by_stride)


def _is_somewhere_empty(tensor: Any) -> bool:
    """Whether some rank has no element of a tensor that has some."""
    sizes: dict[int, list[int]] = {}
    for axis, each in enumerate(tensor.placements):
        if each.is_shard():
            sizes.setdefault(each.dim, []).append(tensor.device_mesh.size(axis))
    return bool(tensor.numel()) and any(not least_samples(tensor.shape[dim], found) for dim, found in sizes.items())


def _whole_or_error(op: Any, whole: Do, *args: Any, **kwargs: Any) -> Any:
    """Do an operation that torch's rule refuses on the whole; if that is an error, too, it is the program's."""
    try:
        return whole(*args, **kwargs)
    except Exception:
        return op(*args, **kwargs)


def _unmasked(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Reduce a result that torch can reduce only once, such as that of an embedding whose rows are sharded."""
    result = op(*args, **kwargs)
    if is_sharded(result) and any(type(each).__name__ == "_MaskPartial" for each in result.placements):
        return result.redistribute(
            placements=[_replicate() if each.is_partial() else each for each in result.placements]
        )
    return result


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


# -- on the whole


def on_whole(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Do any operation on the whole of each tensor, alike on all ranks; results are replicated."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils import _pytree as pytree

    given = [each for each in _leaves(args, kwargs) if is_sharded(each)]
    mesh = given[0].device_mesh
    whole = {id(each): whole_of(each) for each in given}
    whole_args, whole_kwargs = pytree.tree_map(lambda each: whole.get(id(each), each), (list(args), kwargs))
    result = op(*whole_args, **whole_kwargs)
    for written in _written(op, args, kwargs):
        write_whole(written, whole[id(written)])
    arguments = {id(whole[id(each)]): each for each in given}

    def placed(each: Any) -> Any:
        if id(each) in arguments:
            return arguments[id(each)]
        is_tensor = isinstance(each, torch.Tensor)
        return DTensor.from_local(each, mesh, [_replicate()] * mesh.ndim, run_check=False) if is_tensor else each

    return pytree.tree_map(placed, result)


def _strided(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A view by strides of the elements of a whole.

    Raises:
        ValueError: It starts elsewhere in memory, of which no rank has all.
    """
    if any(args[3:]) or kwargs.get("storage_offset"):
        raise ValueError(
            "as_strided() of a sharded tensor starts with its first element: use indexes, such as x.flatten()[5:]"
        )
    return on_whole(op, *args, **kwargs)


def _has_mask(indexes: Sequence[Any]) -> bool:
    return any(each is not None and str(each.dtype) in ("torch.bool", "torch.uint8") for each in indexes)


def _put_by_mask(op: Any, x: Any, indexes: Any, values: Any, accumulate: bool = False, *rest: Any) -> Any:
    """Write to the elements that masks choose: each rank to its own ones, if one number replaces them."""
    import torch

    mask = indexes[0]
    if (
        len(indexes) == 1
        and mask.shape == x.shape
        and not values.dim()
        and not accumulate
        and "bool" in str(mask.dtype)
    ):
        fill = torch.ops.aten.masked_fill_ if op._schema.name.endswith("_") else torch.ops.aten.masked_fill
        value = whole_of(values) if is_sharded(values) else values
        return _choice(fill.Scalar, [x, mask, value.item()], {})(x, mask, value.item())
    return on_whole(op, x, indexes, values, accumulate, *rest)


def as_whole(result: Any) -> Any:
    """Lay the parts of sharded tensors out in the order of dimensions that the whole has, so that views of it are possible."""
    from torch.utils import _pytree as pytree

    return pytree.tree_map(lambda each: _in_order(each) if _is_laid_otherwise(each) else each, result)


def _is_laid_otherwise(tensor: Any) -> bool:
    if not is_sharded(tensor):
        return False
    strides = _strides_of_part(tensor)
    part = tensor.to_local()
    return strides is not None and any(
        size > 1 and here != there for size, here, there in zip(part.shape, part.stride(), strides)
    )


def _strides_of_part(tensor: Any) -> tuple[int, ...] | None:
    """The strides of a dense part with the order of dimensions of the whole; None if the whole is not dense."""
    shape, stride = tensor.shape, tensor.stride()
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim))
    size_of_whole, size_of_part, found = 1, 1, [0] * len(shape)
    part = tensor.to_local().shape
    for dim in order:
        if shape[dim] > 1 and stride[dim] != size_of_whole:
            return None
        found[dim] = size_of_part
        size_of_whole, size_of_part = size_of_whole * max(1, shape[dim]), size_of_part * max(1, part[dim])
    return tuple(found)


def _in_order(tensor: Any) -> Any:
    import torch
    from torch.distributed.tensor import DTensor

    part, strides = tensor.to_local(), _strides_of_part(tensor)
    assert strides is not None
    made = torch.empty_strided(part.shape, strides, dtype=part.dtype, device=part.device).copy_(part)
    return DTensor.from_local(
        made, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def whole_of(tensor: Any) -> Any:
    """Gather a sharded tensor; the result has the strides of the whole, for views of it, and its memory is not shared."""
    import torch

    found, stride = tensor.full_tensor(), tensor.stride()
    if found.stride() == stride or 0 in stride:
        return found.clone()
    return torch.empty_strided(found.shape, stride, dtype=found.dtype).copy_(found)


def write_whole(tensor: Any, whole: Any) -> None:
    """Overwrite a sharded tensor with the elements of a plain one that all ranks have."""
    from torch.distributed.tensor import DTensor

    mesh = tensor.device_mesh
    made = DTensor.from_local(whole, mesh, [_replicate()] * mesh.ndim, run_check=False)
    partial = [axis for axis, each in enumerate(tensor.placements) if each.is_partial()]
    kept = [_replicate() if each.is_partial() else each for each in tensor.placements]
    part = made.redistribute(placements=kept).to_local()
    if any(tensor.placements[axis].reduce_op == "sum" and mesh.get_local_rank(axis) for axis in partial):
        part = part.new_zeros(part.shape)
    tensor.to_local().copy_(part)


# -- losses


def _mean_loss(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss whose mean is over all elements."""
    names = [each.name for each in op._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    if given.get("reduction", _MEAN) != _MEAN:
        return _by_rule(op, args, kwargs)(*args, **kwargs)
    return _summed(_by_rule_of(op, **{**given, "reduction": 0})).div(given["self"].numel())


def _summed(tensor: Any) -> Any:
    return tensor.sum()


def _mean_loss_backward(op: Any, *args: Any, **kwargs: Any) -> Any:
    names = [each.name for each in op._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    if given.get("reduction", _MEAN) == _MEAN:
        given = {**given, "grad_output": given["grad_output"] / given["self"].numel(), "reduction": 2}
    return _by_rule_of(op, **given)


def _by_rule_of(op: Any, **given: Any) -> Any:
    """Do an operation by torch's rule, with all arguments by name."""
    names = [each.name for each in op._schema.arguments]
    defaults = {each.name: each.default_value for each in op._schema.arguments}
    args = [given.get(name, defaults[name]) for name in names if not _is_kwarg_only(op, name)]
    kwargs = {name: given.get(name, defaults[name]) for name in names if _is_kwarg_only(op, name)}
    return _by_rule(op, args, kwargs)(*args, **kwargs)


def _is_kwarg_only(op: Any, name: str) -> bool:
    return any(each.name == name and each.kwarg_only for each in op._schema.arguments)


def _nll_loss(op: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int) -> Any:
    """The negative log likelihood: the parts of the sum, and of the sum of weights, are added before they are divided."""
    kinds = _Kinds([x, target, weight], [True, True, False], 1 if x.dim() == 1 else x.shape[0])
    parts = kinds.local([x, target, weight])
    if not reduction:
        loss, total = op(*parts, 0, ignored)
        return kinds.wrapped(loss, "samples"), kinds.wrapped(total, "all")
    loss, total = op(*parts, 2, ignored)
    loss, total = (kinds.wrapped(each, "sum").redistribute(placements=kinds.all_replicated) for each in (loss, total))
    return (loss / total if reduction == _MEAN else loss), total


def _nll_loss_backward(
    op: Any, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
) -> Any:
    tensors = [grad, x, target, weight, total]
    kinds = _Kinds(tensors, [not reduction, True, True, False, False], 1 if x.dim() == 1 else x.shape[0], lead=1)
    grad, x, target, weight, total = kinds.local(tensors)
    return kinds.wrapped(op(grad, x, target, weight, reduction, ignored, total), "samples")


# -- by samples


class _Rule:
    """How an operation that treats each sample by itself is done.

    Args:
        samples: Names of the arguments whose first dimension is that of samples; other tensors are replicated.
        results: For each result, ``samples`` or ``sum``, which adds up what the samples of each rank have given.
        n_dims: The number of dimensions of the first of them, if samples are there only then.
        count: The position of an argument that is the number of samples.
        sizes: The position of an argument that is the shape of a tensor of samples.
    """

    def __init__(
        self, samples: str, results: str = "samples", *, n_dims: int = 0, count: int = -1, sizes: int = -1
    ) -> None:
        self.samples = frozenset(samples.split())
        self.results = results.split()
        self.n_dims, self.count, self.sizes = n_dims, count, sizes


_BY_SAMPLE = {
    "convolution": _Rule("input"),
    "convolution_backward": _Rule("grad_output input", "samples sum sum"),
    "native_group_norm": _Rule("input", "samples samples samples", count=3),
    "native_group_norm_backward": _Rule("grad_out input mean rstd", "samples sum sum", count=5),
    "im2col": _Rule("self", n_dims=4),
    "col2im": _Rule("self", n_dims=3),
    "avg_pool2d": _Rule("self", n_dims=4),
    "avg_pool2d_backward": _Rule("grad_output self", n_dims=4),
    "avg_pool3d": _Rule("self", n_dims=5),
    "avg_pool3d_backward": _Rule("grad_output self", n_dims=5),
    "max_pool2d_with_indices": _Rule("self", "samples samples", n_dims=4),
    "max_pool2d_with_indices_backward": _Rule("grad_output self indices", n_dims=4),
    "max_pool3d_with_indices": _Rule("self", "samples samples", n_dims=5),
    "max_pool3d_with_indices_backward": _Rule("grad_output self indices", n_dims=5),
    "_adaptive_avg_pool2d": _Rule("self", n_dims=4),
    "_adaptive_avg_pool2d_backward": _Rule("grad_output self", n_dims=4),
    "_adaptive_avg_pool3d": _Rule("self", n_dims=5),
    "_adaptive_avg_pool3d_backward": _Rule("grad_output self", n_dims=5),
    "adaptive_max_pool2d": _Rule("self", "samples samples", n_dims=4),
    "adaptive_max_pool2d_backward": _Rule("grad_output self indices", n_dims=4),
    "reflection_pad1d": _Rule("self", n_dims=3),
    "reflection_pad1d_backward": _Rule("grad_output self", n_dims=3),
    "reflection_pad2d": _Rule("self", n_dims=4),
    "reflection_pad2d_backward": _Rule("grad_output self", n_dims=4),
    "replication_pad1d": _Rule("self", n_dims=3),
    "replication_pad1d_backward": _Rule("grad_output self", n_dims=3),
    "replication_pad2d": _Rule("self", n_dims=4),
    "replication_pad2d_backward": _Rule("grad_output self", n_dims=4),
    "upsample_nearest2d": _Rule("self"),
    "upsample_nearest2d_backward": _Rule("grad_output", sizes=2),
    "upsample_bilinear2d": _Rule("self"),
    "upsample_bilinear2d_backward": _Rule("grad_output", sizes=2),
    "upsample_bicubic2d": _Rule("self"),
    "upsample_bicubic2d_backward": _Rule("grad_output", sizes=2),
    "upsample_linear1d": _Rule("self"),
    "upsample_linear1d_backward": _Rule("grad_output", sizes=2),
    "grid_sampler_2d": _Rule("input grid"),
    "grid_sampler_2d_backward": _Rule("grad_output input grid", "samples samples"),
    "pixel_shuffle": _Rule("self", n_dims=4),
    "pixel_unshuffle": _Rule("self", n_dims=4),
}
"""Operations that treat each sample by itself, by the names of their schemas."""


def _has_samples(base: str, args: Sequence[Any]) -> bool:
    rule = _BY_SAMPLE[base]
    return not rule.n_dims or args[0].dim() == rule.n_dims


class _Kinds:
    """How the tensors of an operation are placed that treats each sample by itself.

    Args:
        tensors: Its tensors, or None.
        samples: For each, whether its first dimension is that of samples.
        count: The number of samples.
        lead: The index of the tensor that says along which axes samples are sharded.
    """

    def __init__(self, tensors: Sequence[Any], samples: Sequence[bool], count: int, lead: int = 0) -> None:
        self.mesh = next(each.device_mesh for each in tensors if is_sharded(each))
        self.count = count
        self.samples = samples
        self.all_replicated = [_replicate()] * self.mesh.ndim
        self.by_samples = [_replicate()] * self.mesh.ndim
        leading = tensors[lead]
        shards, n_parts = [], 1
        if is_sharded(leading):
            shards = [axis for axis, each in enumerate(leading.placements) if each.is_shard(0)]
        for axis in shards:
            n_parts *= self.mesh.size(axis)
        # A rank without samples would get an error from some operations, and be alone with it.
        if shards and least_samples(count, [self.mesh.size(axis) for axis in shards]):
            for axis in shards:
                self.by_samples[axis] = leading.placements[axis]

    def local(self, tensors: Sequence[Any]) -> list[Any]:
        """The parts of this rank of the tensors."""
        return [
            each.redistribute(placements=self.by_samples if by_samples else self.all_replicated).to_local()
            if is_sharded(each)
            else each
            for each, by_samples in zip(tensors, self.samples)
        ]

    def wrapped(self, part: Any, kind: str) -> Any:
        """Make a result of its parts: one per sample, a sum over samples, or equal on all ranks."""
        import torch
        from torch.distributed.tensor import DTensor, Partial

        if part is None:
            return None
        part = part.contiguous()
        if kind == "samples":
            shape = torch.Size((self.count, *part.shape[1:])) if part.dim() else part.shape
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(part, self.mesh, self.by_samples, run_check=False, shape=shape, stride=stride)
        summed = [Partial() if each.is_shard() else each for each in self.by_samples]
        placed = summed if kind == "sum" else self.all_replicated
        return DTensor.from_local(part, self.mesh, placed, run_check=False)


def least_samples(count: int, sizes: Sequence[int]) -> int:
    """The smallest number of samples of a rank when they are split along axes in order."""
    for size in sizes:
        chunk = -(-count // size)
        count = max(0, count - chunk * (size - 1))
    return count


def _by_sample(op: Any, rule: _Rule, *args: Any, **kwargs: Any) -> Any:
    """Do an operation that treats each sample by itself, on the samples of this rank."""
    import torch

    names = [each.name for each in op._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, args)), **kwargs}
    places = [name for name, each in given.items() if isinstance(each, torch.Tensor)]
    tensors = [given[name] for name in places]
    by_samples = [name in rule.samples for name in places]
    lead = next((at for at, each in enumerate(tensors) if by_samples[at] and is_sharded(each)), 0)
    kinds = _Kinds(tensors, by_samples, int(tensors[by_samples.index(True)].shape[0]), lead)
    given.update(zip(places, kinds.local(tensors)))
    first = given[next(name for name in places if name in rule.samples)]
    if rule.count >= 0:
        given[names[rule.count]] = first.shape[0]
    if rule.sizes >= 0:
        sizes = list(given[names[rule.sizes]])
        given[names[rule.sizes]] = [first.shape[0], *sizes[1:]]
    result = op(**given)
    if isinstance(result, torch.Tensor):
        return kinds.wrapped(result, rule.results[0])
    return tuple(kinds.wrapped(each, kind) for each, kind in zip(result, rule.results))


# -- views


class _Memory:
    """The memory of a sharded tensor and its views, where some of these are copies.

    Args:
        source: The tensor that this memory is a copy of a view of; None if it is no copy.
        view: Makes the view of a plain tensor.
        copy: The copy, with other attributes than the tensor that the program has.
    """

    def __init__(self, source: Any = None, view: Do | None = None, copy: Any = None) -> None:
        self.source = source
        self.view = view
        self.copy = copy
        self.copies: list[weakref.ref[_Memory]] = []

    def alive(self) -> Iterator[_Memory]:
        """Yield the copies that exist."""
        found = [each for ref in self.copies if (each := ref()) is not None]
        self.copies = [weakref.ref(each) for each in found]
        yield from found

    def write_back(self) -> _Memory:
        """Write a copy that was changed to its source, and to the source of that; return the memory of the last one."""
        if self.source is None or self.view is None:
            return self
        whole = whole_of(self.source)
        self.view(whole).copy_(self.copy.full_tensor())
        write_whole(self.source, whole)
        return _memory_of(self.source).write_back()

    def refresh(self) -> None:
        """Write the elements of this memory, which were changed, to its copies."""
        for each in self.alive():
            assert each.view is not None
            write_whole(each.copy, each.view(whole_of(each.source)))
            each.refresh()


def _memory_of(tensor: Any) -> _Memory:
    found = getattr(tensor, "_monarch_memory", None)
    if found is None:
        found = tensor._monarch_memory = _Memory()
    return found


def _parts_of(result: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(result, (list, tuple)):
        yield from enumerate(result)
    else:
        yield 0, result


def _sharing(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Do an operation that makes views, which share the memory of its argument on each rank."""
    result = op(*args, **kwargs)
    memory = _memory_of(args[0])
    for _, part in _parts_of(result):
        part._monarch_memory = memory
    return result


def _computed(op: Any) -> Do:
    """Return a function that does an operation, and computes the elements of its result."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed.tensor import DTensor

        made = op(*args, **kwargs)
        part = made.to_local().resolve_conj().resolve_neg()
        return DTensor.from_local(
            part, made.device_mesh, made.placements, run_check=False, shape=made.shape, stride=made.stride()
        )

    return compute


def _as_view(op: Any, do: Do, *args: Any, **kwargs: Any) -> Any:
    """Do an operation that makes views of elements of other ranks, which are copies here."""
    from torch.distributed.tensor import DTensor

    source, rest = args[0], args[1:]
    result = do(*args, **kwargs)
    memory = _memory_of(source)
    for place, part in _parts_of(result):

        def view(whole: Any, place: int = place) -> Any:
            made = op(whole, *rest, **kwargs)
            return made[place] if isinstance(made, (list, tuple)) else made

        copy = DTensor.from_local(
            part.to_local(), part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
        )
        part._monarch_memory = made = _Memory(source, view, copy)
        memory.copies.append(weakref.ref(made))
    return result


def _noting_writes(op: Any, do: Do, *args: Any, **kwargs: Any) -> Any:
    result = do(*args, **kwargs)
    for each in _written(op, args, kwargs):
        note_write(each)
    return result


def note_write(tensor: Any) -> None:
    """Bring views that are copies up to date after a write to a tensor."""
    memory = getattr(tensor, "_monarch_memory", None)
    if memory is not None:
        memory.write_back().refresh()


def keep_memory(part: Any, tensor: Any) -> Any:
    """Return another object for a sharded tensor, which has the same memory."""
    memory = getattr(tensor, "_monarch_memory", None)
    if memory is not None:
        part._monarch_memory = memory
    return part
