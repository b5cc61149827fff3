"""Values per rank: each rank of a mesh gets its own value, or calls a function with its own values."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, TypeVar

from monarch_kernel.base.mesh import Region, ValueMesh
from monarch_kernel.base.text import plural
from monarch_kernel.net.wire.codec import Packed, dump, pack
from monarch_kernel.net.wire.messages import Apply, Push

__all__ = ["apply_messages", "by_rank", "cells_of", "push_messages"]

T = TypeVar("T")

_MAX_SOURCE_CHARS = 1 << 18
_NOT_BY_RANK = (str, bytes, Mapping, AbstractSet)  # iterable, but not as one item for each rank in order


def by_rank(region: Region, values: Iterable[T], what: str) -> ValueMesh[T]:
    """Make a mesh of values, one for each rank of a region.

    Args:
        region: the region of the mesh.
        values: the values in the order of the ranks, or a `ValueMesh` of the same extent.
        what: what error messages call the values.

    Raises:
        ValueError: there are too few or too many values, or the extents differ.
        TypeError: ``values`` does not hold one value for each rank.
    """
    if isinstance(values, ValueMesh):
        if values.extent != region.extent:
            raise ValueError(
                f"{what}: a ValueMesh of extent {values.extent} has no value for each rank of {region.extent}; "
                "slice or reshape one of them; inside a list it is one value for all ranks"
            )
        return values
    if isinstance(values, _NOT_BY_RANK) or not isinstance(values, Iterable):
        raise TypeError(f"{what}: pass one value for each rank, such as a list, not a {type(values).__name__}")
    items = tuple(islice(values, len(region) + 1))  # `values` can be an infinite generator
    if len(items) != len(region):
        few = "1 was given" if len(items) == 1 else f"{len(items)} were given"
        given = few if len(items) < len(region) else "more were given"
        raise ValueError(
            f"{what}: {region.extent} has {plural(len(region), 'rank')} and needs as many values, but {given}"
        )
    return ValueMesh(region.extent, items)


def push_messages(name: str, values: ValueMesh[Any], ranks: Sequence[int]) -> Callable[[int], list[Packed]]:
    """Make the messages that push each rank's value. A value that several ranks share is pickled once.

    Raises:
        PayloadError: a value can't be sent; the text names its rank.
    """
    dumped: dict[int, Any] = {}
    payloads = []
    for rank, value in zip(ranks, values.values()):
        if id(value) not in dumped:
            what = f"the value for {name!r} on rank {rank} (a {type(value).__name__})"
            dumped[id(value)] = dump(value, what, roots={name: value})
        payloads.append(dumped[id(value)])
    return lambda id: [pack(Push(id, name, payload), frames) for payload, frames in payloads]


def apply_messages(
    function: Callable[..., Any],
    values: Sequence[ValueMesh[Any]],
    ranks: Sequence[int],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    method: str = "map",
) -> Callable[[int], list[Packed]]:
    """Make the messages that call a function on every rank with the rank's own values. The function is pickled once.

    Args:
        function: the function.
        values: of each parameter, the value of each rank.
        ranks: the flat ranks.
        args: the same for all ranks, before the values; pickled once.
        kwargs: the same, by name.
        method: what error messages call the caller.

    Raises:
        TypeError: ``function`` is not callable, is a coroutine function, or does not take that many values.
        PayloadError: the function or a value can't be sent.
    """
    if not callable(function):
        raise TypeError(
            f"{method}() calls a function, not a {type(function).__name__}: {method}(function, values, ...)"
        )
    if inspect.iscoroutinefunction(function):
        raise TypeError(
            f"{method}() calls plain functions, and {_name(function)} is async; await in a cell or in an actor"
        )
    try:
        inspect.signature(function).bind(*args, *values, **kwargs)
    except TypeError as error:
        count = plural(len(args) + len(values) + len(kwargs), "value")
        raise TypeError(f"{method}() calls {_name(function)} with {count}: {error}") from None
    except ValueError:
        pass  # a builtin without a signature
    what = f"function {_name(function)}"
    roots: dict[str, Any] = {_name(function): function}
    called = function
    if args or kwargs:
        called = functools.partial(function, *args, **kwargs)
        what += " or its arguments"
        roots |= {f"args[{i}]": each for i, each in enumerate(args)} | dict(kwargs)
    payload, frames = dump((called, cells_of(function)), what, roots=roots)
    # Out-of-band buffers, so that all messages share the same bytes.
    shared = [pickle.PickleBuffer(part) for part in ((payload.data, *frames) if payload.data else frames)]
    made = []
    for place, rank in enumerate(ranks):
        args = tuple(each.values()[place] for each in values)
        roots = (
            {f"value {i}": each for i, each in enumerate(args, 1)}
            if len(args) > 1
            else {"value": args[0]}
            if args
            else {}
        )
        made.append(dump((shared, args), f"what {_name(function)} is called with on rank {rank}", roots=roots))
    return lambda id: [pack(Apply(id, payload), frames) for payload, frames in made]


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


def cells_of(function: Callable[..., Any]) -> dict[str, str]:
    """Collect the text of the notebook's cells that define a function and the functions it uses; ranks have no such files."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    pending: list[Any] = [function]
    while pending:
        one = inspect.unwrap(pending.pop()) if callable(pending[-1]) else pending.pop()
        if isinstance(one, functools.partial):
            one = one.func
        one = getattr(one, "__func__", one)
        if not isinstance(one, FunctionType) or id(one) in seen:
            continue
        seen.add(id(one))
        file = one.__code__.co_filename
        if file not in found and not os.path.exists(file):
            text = "".join(linecache.getlines(file, one.__globals__))
            if 0 < len(text) <= _MAX_SOURCE_CHARS:
                found[file] = text
        if one.__module__ == "__main__":  # pickled by value, with the objects that it refers to
            pending += [one.__globals__[name] for name in _names(one.__code__) if name in one.__globals__]
            pending += [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
    return found


def _names(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
