"""Operations on sharded tensors, so that each gives what it gives on plain tensors.

Theory of operation
===================

DTensor has a rule for most operations, which says how arguments must be placed and how results are. This module decides once
for each entry, from the operation and the placements, how a rank does it. All ranks decide alike, so they do the same
collectives.

*By torch's rule*, if there is one and it is right.

*By a rule of this package*, where torch's is wrong or costs more: losses with a mean, and operations that treat each sample by
itself (`samples`), such as convolutions, which stay sharded by samples.

*On the whole*, otherwise: each rank gathers its arguments, does the operation on plain tensors, and the results are replicated.
What the operation changes is placed again as it was.

*Views.* A view of a dimension that is sharded can need elements of other ranks, and then it is a copy on the ranks. `_Memory`
knows such copies: a write to one of them is also done in the tensor that it is a view of, and the other way round.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from monarch_kernel.features.tensors.parts import is_sharded
from monarch_kernel.features.tensors.placing import as_whole, is_laid_otherwise, replicate, whole_of, write_whole
from monarch_kernel.features.tensors.records import Poison, Wholes
from monarch_kernel.features.tensors.samples import (
    BY_SAMPLE,
    MEAN,
    by_sample,
    has_samples,
    least_samples,
    nll_loss,
    nll_loss_backward,
)
from monarch_kernel.features.tensors.sums import SUMS

__all__ = ["ShardedOp", "keep_memory", "note_write", "on_whole", "plain_op"]

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

_NEED_ELEMENTS = frozenset(
    (
        "amax", "amin", "aminmax", "argmax", "argmin", "max", "min", "_foreach_max",
        "_fft_c2c", "_fft_c2r", "_fft_r2c",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)  # fmt: skip
"""Operations that fail without elements. If some rank has none, it would fail alone, and the others would wait for it; torch's
attention on the CPU would even end it, by a division by zero."""

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


class ShardedOp:
    """An ATen operation whose tensors may be sharded.

    Args:
        op: The operation.
        wholes: Its results, as far as the program knows them.
    """

    __slots__ = ("_do", "_op", "_plain", "_wholes")

    def __init__(self, op: Any, wholes: Wholes | None = None) -> None:
        self._op = op
        self._plain = plain_op(op)
        self._wholes = wholes
        self._do: Do | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        do = self._do
        if do is self._plain:
            return do(*args, **kwargs)
        if _has_poison(args) or (
            kwargs and _has_poison(kwargs.values())
        ):  # before this rank takes part in a collective
            raise LookupError("an argument is lost")
        if do is not None:
            return do(*args, **kwargs)
        if not any(is_sharded(each) for each in _leaves(args, kwargs)):
            self._do = self._plain
            return self._plain(*args, **kwargs)
        with _known(self._op, self._wholes):
            do = _chosen(self._op, args, kwargs)
        result = do(*args, **kwargs)
        if _is_new(self._op) and any(is_laid_otherwise(each) for each in _leaves((result,), {})):
            do, result = functools.partial(_laid_out, do), as_whole(result)
        self._do = do
        return result


def plain_op(op: Any) -> Do:
    """Return what does an operation on plain tensors; they may have the memory of parts of sharded ones."""
    do: Do = getattr(op, "_op", op)  # what it calls, without a call between
    return SUMS.noting(do, functools.partial(_to_write, op)) if _places_written(op) else do


def _is_new(op: Any) -> bool:
    """Whether the results of an operation share no memory with its arguments."""
    return all(each.alias_info is None for each in op._schema.returns)


def _laid_out(do: Do, *args: Any, **kwargs: Any) -> Any:
    return as_whole(do(*args, **kwargs))


def _has_poison(values: Iterable[Any]) -> bool:
    for each in values:  # noqa: SIM110  # each operation comes here, and a generator takes longer
        if type(each) is Poison or (type(each) is list and _has_poison(each)):
            return True
    return False


def _leaves(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    from torch.utils import _pytree as pytree

    return list(pytree.tree_leaves((args, kwargs)))


_REDUCTIONS = frozenset(("sum", "nansum", "mean", "amax", "amin", "std", "var", "logsumexp", "linalg_vector_norm"))
"""Operations for which no dimensions mean all."""


def _chosen(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Do:
    """Decide how to do an operation for arguments that are placed so."""
    SUMS.install()
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
    if base == "select_backward" and args[2] < 0:  # torch's rule takes it for a dimension that is not sharded
        dim = args[2] + len(args[1])
        return functools.partial(_with_dims, _choice(op, [*args[:2], dim, *args[3:]], kwargs), 2, dim)
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
        do = functools.partial(nll_loss, op)
    elif base in ("nll_loss_backward", "nll_loss2d_backward"):
        do = functools.partial(nll_loss_backward, op)
    elif base in BY_SAMPLE and has_samples(base, args):
        do = functools.partial(by_sample, op, BY_SAMPLE[base])
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
    return [each for each in _to_write(op, args, kwargs) if is_sharded(each)]


def _to_write(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operation changes."""
    found: list[Any] = []
    for place, name in _places_written(op):
        given = args[place] if place < len(args) else kwargs.get(name)
        found += given if isinstance(given, (list, tuple)) else [given]
    return [each for each in found if each is not None]


@functools.cache
def _places_written(op: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation changes, by position and by name; to read a schema takes as long as an operation."""
    hidden = _HIDDEN_WRITES.get(op._schema.name.partition("::")[2], ())
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(op._schema.arguments)
        if place in hidden or (argument.alias_info is not None and argument.alias_info.is_write)
    )


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


@contextmanager
def _known(op: Any, wholes: Wholes | None) -> Iterator[None]:
    """Context in which torch need not run an operation on fake tensors to find the shapes of its results."""
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    find = getattr(type(propagator), "_propagate_tensor_meta_non_cached", None)
    if wholes is None or find is None:
        yield
        return
    found, thread = _metas(wholes), threading.get_ident()
    propagator._propagate_tensor_meta_non_cached = lambda schema: (
        found if schema.op is op and threading.get_ident() == thread else find(propagator, schema)
    )
    try:
        yield
    finally:
        del propagator._propagate_tensor_meta_non_cached


def _metas(wholes: Wholes) -> Any:
    """Results in the words of torch's rules."""
    import torch
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    kind, parts = wholes
    made = [
        None if each is None else TensorMeta(torch.Size(each[0]), tuple(each[1]), getattr(torch, each[2]))
        for each in parts
    ]
    return made[0] if kind == "tensor" else tuple(made) if kind == "tuple" else made


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
            placements=[replicate() if each.is_partial() else each for each in result.placements]
        )
    return result


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
        return DTensor.from_local(each, mesh, [replicate()] * mesh.ndim, run_check=False) if is_tensor else each

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


# -- losses


def _mean_loss(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss whose mean is over all elements."""
    names = [each.name for each in op._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    if given.get("reduction", MEAN) != MEAN:
        return _by_rule(op, args, kwargs)(*args, **kwargs)
    return _summed(_by_rule_of(op, **{**given, "reduction": 0})).div(given["self"].numel())


def _summed(tensor: Any) -> Any:
    return tensor.sum()


def _mean_loss_backward(op: Any, *args: Any, **kwargs: Any) -> Any:
    names = [each.name for each in op._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    if given.get("reduction", MEAN) == MEAN:
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
    with SUMS.off():
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
    """Bring views that are copies up to date after a write to a tensor, and forget a sum of what was there."""
    SUMS.note_write(tensor)  # `write_whole` does it for the views
    memory = getattr(tensor, "_monarch_memory", None)
    if memory is not None:
        memory.write_back().refresh()


def keep_memory(part: Any, tensor: Any) -> Any:
    """Return another object for a sharded tensor, which has the same memory."""
    memory = getattr(tensor, "_monarch_memory", None)
    if memory is not None:
        part._monarch_memory = memory
    return part
