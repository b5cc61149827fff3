"""Finds the tensors in a variable of a rank, also in modules and dicts, and the parts of each tensor that the rank holds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from monarch_kernel.features.resharding.plan import Cut, Part, numel, parts_of, whole
from monarch_kernel.features.resharding.reading import Kind, kind_of
from monarch_kernel.net.memory.layout import Memory, memory_of

__all__ = ["Leaf", "Slot", "leaves_of", "type_text"]

_PLAIN = (str, bytes, int, float, complex, type(None))
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and activation checkpointing add to names of parameters."""


class Leaf(NamedTuple):
    """A tensor, or a NumPy array.

    Attributes:
        thing: the local tensor or array of this rank.
        kind: kind of the variable's value.
        memory: memory of ``thing``.
        shape: shape of the whole tensor.
        parts: the parts of the whole tensor that this rank has.
    """

    thing: Any
    kind: Kind
    memory: Memory
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Slot(NamedTuple):
    """A plain value, such as a number or a string; ``put`` replaces it."""

    value: Any
    put: Callable[[Any], None]


def leaves_of(namespace: dict[str, Any], name: str) -> dict[str, Leaf | Slot]:
    """The leaves of a variable: path -> leaf. The path of the variable itself is empty, other paths begin with a dot.

    The leaves of a module are its parameters and persistent buffers, under their names in ``state_dict()``, without the
    prefixes that torch.compile, DistributedDataParallel and activation checkpointing add. FSDP modules are resharded first, so
    that only the shards exist.

    Raises:
        NameError: there is no such variable.
        TypeError: the variable contains an unsupported object; the message says where.
        ValueError: two leaves have the same path, or a DTensor has a Partial placement.
    """
    if name not in namespace:
        raise NameError(f"name {name!r} is not defined on this rank")

    def put(value: Any) -> None:
        namespace[name] = value

    found: dict[str, Leaf | Slot] = {}
    for path, leaf in _walk(namespace[name], "", put, name):
        if path in found:
            raise ValueError(f"{name}{path} occurs twice: once under a key with a dot in it")
        found[path] = leaf
    return found


def _walk(value: Any, path: str, put: Callable[[Any], None], name: str) -> Iterator[tuple[str, Leaf | Slot]]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        for parameter, tensor in _of_module(value):
            yield f"{path}.{parameter}", _leaf(tensor, f"{name}{path}.{parameter}")
    elif torch is not None and isinstance(value, torch.Tensor):
        yield path, _leaf(value, name + path)
    elif _is_plain(value) or (isinstance(value, tuple) and all(map(_is_plain, value))):
        yield path, Slot(value, put)
    elif isinstance(value, (dict, list)):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield from _walk(item, f"{path}.{key}", _setter(value, key), name)
    elif not hasattr(value, "__array_interface__"):
        raise TypeError(
            f"{name}{path} is {type_text(value)}: only modules, tensors, arrays, numbers, strings, and dicts and lists "
            "of these can be moved (for an optimizer, move its state_dict())"
        )
    else:
        yield path, _leaf(value, name + path)


def type_text(value: Any) -> str:
    """The type of a value with an article: ``a lock``, ``an object``."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def _is_plain(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return isinstance(value, _PLAIN) or (numpy is not None and isinstance(value, numpy.generic))


def _setter(container: Any, key: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        container[key] = value

    return put


def _of_module(module: Any) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for prefix, each in module.named_modules(remove_duplicate=False):
        if fsdp is not None and isinstance(each, fsdp.FSDPModule):
            each.reshard()
        saved = [key for key in each._buffers if key not in each._non_persistent_buffers_set]
        for key, tensor in [*each._parameters.items(), *[(key, each._buffers[key]) for key in saved]]:
            if tensor is not None:
                path = f"{prefix}.{key}" if prefix else key
                for wrapper in _WRAPPERS:
                    path = path.replace(wrapper, "")
                yield path, tensor


def _leaf(thing: Any, path: str) -> Leaf:
    """Describe a tensor or array.

    Raises:
        TypeError: its memory can't be read.
        ValueError: it is a DTensor with a Partial placement, or its local shape does not match its placements.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    shape = tuple(thing.shape)
    parts = [Part(whole(shape), (0,) * len(shape))]
    kind = kind_of(thing)
    if tensors is not None and isinstance(thing, tensors.DTensor):
        parts = _parts_of_dtensor(thing, path)
        thing = _local(thing)
    try:
        memory = memory_of(thing)
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from None
    if sum(numel(part.box) for part in parts) != math.prod(memory.layout.shape):
        raise ValueError(
            f"{path}: this rank has {list(thing.shape)} of {list(shape)}, which does not match its placements"
        )
    return Leaf(thing, kind, memory, shape, tuple(part for part in parts if numel(part.box)))


def _local(tensor: Any) -> Any:
    """The local tensor of a DTensor, which shares its memory."""
    import torch

    with torch.no_grad():
        return tensor.to_local()


def _parts_of_dtensor(tensor: Any, path: str) -> list[Part]:
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in its device mesh
        return []
    cuts = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError(
                f"{path} is a DTensor of {placement}: its ranks hold summands; redistribute() it to Shard or Replicate first"
            )
        if not placement.is_replicate():
            strides = int(getattr(placement, "split_factor", 1))
            cuts.append(Cut(placement.dim % len(shape), mesh.size(mesh_dim), coordinate[mesh_dim], strides))
    return parts_of(shape, cuts)
