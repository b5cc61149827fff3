"""The rank's part of comparing replicas: lists what the rank holds, and sends pieces of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from monarch_kernel.features.replicas.compare import PIECE, Copy, Pieces
from monarch_kernel.features.replicas.digests import digest_of_bytes, mixed
from monarch_kernel.features.resharding.plan import Box, whole
from monarch_kernel.features.resharding.state_dict import Leaf, Slot, leaves_of, type_text
from monarch_kernel.runtime.worker.function_calls import APPLIED_IN

__all__ = [
    "Held",
    "copies_of",
    "digests_of_pieces",
    "list_copies",
    "modules_in",
    "piece_digests",
    "pieces_of",
    "read_pieces",
    "walk",
]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

_Found = dict[tuple[str, str], "Leaf | Slot"]
"""Kind and path -> the leaf there."""


class Held(NamedTuple):
    """What a rank holds of some variables.

    Attributes:
        names: the variables.
        copies: what it holds of them.
        skipped: path -> why the tensor or object there can't be compared.
    """

    names: tuple[str, ...]
    copies: tuple[Copy, ...]
    skipped: dict[str, str]


def list_copies(names: Sequence[str]) -> Held:
    """List what this rank holds of variables; an `Apply` message calls it.

    Args:
        names: the variables; none for all modules.

    A variable that this rank does not have is left out: that is a difference, if other ranks have it.
    """
    return copies_of(_chosen(APPLIED_IN.get(), names))


def digests_of_pieces(names: Sequence[str], kind: str, path: str) -> tuple[bytes, ...]:
    """Return a digest of each piece of a tensor; an `Apply` message calls it."""
    return piece_digests(_chosen(APPLIED_IN.get(), names), kind, path)


def read_pieces(names: Sequence[str], kind: str, path: str, numbers: Sequence[int], total: int) -> Pieces:
    """Return the elements of some pieces of a tensor; an `Apply` message calls it."""
    return pieces_of(_chosen(APPLIED_IN.get(), names), kind, path, numbers, total)


def modules_in(namespace: Mapping[str, Any], hidden: Collection[str] = ()) -> dict[str, Any]:
    """Return the modules of a namespace that are part of no other one there, by name."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    found: dict[str, Any] = {}
    for name, value in list(namespace.items()):
        if isinstance(value, torch.nn.Module) and name not in hidden and not name.startswith("_"):
            found[name] = value
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    by_id: dict[int, str] = {}
    for name, module in found.items():
        if id(module) not in inner:
            by_id.setdefault(id(module), name)
    return {name: found[name] for name in by_id.values()}


def copies_of(things: Mapping[str, Any]) -> Held:
    """List what this rank holds of some objects, by name."""
    skipped: dict[str, str] = {}
    copies: list[Copy] = []
    for (kind, path), leaf in _find(things, skipped).items():
        if isinstance(leaf, Slot):
            copies.append(
                Copy(path, kind, None, (), type(leaf.value).__name__, digest_of_bytes(repr(leaf.value).encode()))
            )
        else:
            parts, layout = _parts(leaf), leaf.memory.layout
            digest = b"" if parts == () else _digest(leaf.thing)
            copies.append(Copy(path, kind, parts, tuple(layout.shape), layout.dtype, digest))
    return Held(tuple(things), tuple(copies), skipped)


def piece_digests(things: Mapping[str, Any], kind: str, path: str) -> tuple[bytes, ...]:
    """Return a digest of each piece of a tensor; none if it has no pieces."""
    flat = _flat(_find(things, {})[kind, path])
    return () if flat is None else tuple(_digest(piece) for piece in flat.split(PIECE))


def pieces_of(things: Mapping[str, Any], kind: str, path: str, numbers: Sequence[int], total: int) -> Pieces:
    """Return the elements of some pieces of a tensor.

    Args:
        things: the objects, by name.
        kind: kind of the tensor.
        path: its path.
        numbers: the numbers of the pieces.
        total: how many pieces differ.
    """
    flat = _flat(_find(things, {})[kind, path])
    assert flat is not None
    values = tuple(tuple(flat[number * PIECE : (number + 1) * PIECE].tolist()) for number in numbers)
    return Pieces(tuple(numbers), values, total)


def _chosen(namespace: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    if not names:
        return modules_in(namespace)
    return {name: namespace[name] for name in names if name in namespace}


def _find(things: Mapping[str, Any], skipped: dict[str, str]) -> _Found:
    """Find all leaves: of modules the parameters, then their gradients and the persistent buffers; of others all tensors.

    What can't be compared gets into ``skipped`` with the reason, so that it does not stop the comparison of the rest.
    """
    found: _Found = {}
    seen: set[tuple[str, str]] = set()
    for name, thing in things.items():
        for kind, path, value in walk(name, thing):
            if (kind, path) in seen:
                skipped[path] = "occurs twice: once under a key with a dot in it"
                continue
            seen.add((kind, path))
            try:
                leaf = leaves_of({path: value}, path)[""]
            except (TypeError, ValueError, RuntimeError) as error:
                skipped[path] = _reason(value, str(error), path)
            else:
                found["value" if isinstance(leaf, Slot) else kind, path] = leaf
    return found


def walk(path: str, thing: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield kind, path and value of all that may be a leaf."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.nn.Module):
        for kind, inner, tensor in _of_module(thing):
            yield kind, f"{path}.{inner}", tensor
        return
    is_tensor = torch is not None and isinstance(
        thing, torch.Tensor
    )  # an uninitialized one raises if asked for its shape
    is_other = not is_tensor and not isinstance(thing, (dict, list, type)) and not hasattr(thing, "shape")
    if is_other and callable(getattr(thing, "state_dict", None)):
        thing = thing.state_dict()
    if isinstance(thing, (dict, list)):
        for key, item in list(thing.items() if isinstance(thing, dict) else enumerate(thing)):
            yield from walk(f"{path}.{key}", item)
    else:
        yield "tensor", path, thing


def _reason(value: Any, error: str, path: str) -> str:
    """Return why a value can't be compared, without its path."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        if hasattr(value, "__array_interface__"):
            return error.removeprefix(f"{path}: ")
        return type_text(value)
    if torch.nn.parameter.is_lazy(value):
        return "not initialized"
    if value.device.type == "meta":
        return "a meta tensor has no values"
    if value.layout is not torch.strided:
        return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    return error.removeprefix(f"{path}: ").removeprefix(f"{path} is ")


def _of_module(module: Any) -> Iterator[tuple[str, str, Any]]:
    import torch

    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        module = module.module
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for _, each in module.named_modules():
        if fsdp is not None and isinstance(each, fsdp.FSDPModule):
            each.reshard()
    parameters = [(_unwrapped(path), each) for path, each in module.named_parameters()]
    for path, each in parameters:
        yield "parameter", path, each
    for path, each in parameters:
        if each.grad is not None:
            yield "gradient", path, each.grad
    for prefix, each in module.named_modules():
        for key, buffer in each._buffers.items():
            if buffer is not None and key not in each._non_persistent_buffers_set:
                yield "buffer", _unwrapped(f"{prefix}.{key}" if prefix else key), buffer


def _unwrapped(path: str) -> str:
    for wrapper in _WRAPPERS:
        path = path.replace(wrapper, "")
    return path


def _parts(leaf: Leaf) -> tuple[Box, ...] | None:
    """The boxes of a shard; none for one without elements. None for a whole tensor, so that its shape does not matter."""
    boxes = tuple(part.box for part in leaf.parts)
    return None if not math.prod(leaf.shape) or boxes == (whole(leaf.shape),) else boxes


def _digest(thing: Any) -> bytes:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        value = mixed(thing)
        return value if isinstance(value, bytes) else value.to_bytes(8, "little")
    return digest_of_bytes(thing.tobytes())


def _flat(leaf: Leaf | Slot) -> Any:
    """Return the elements of a tensor or array as a flat tensor of numbers; None if it has none."""
    torch = sys.modules.get("torch")
    if torch is None or isinstance(leaf, Slot):
        return None
    thing = leaf.thing if isinstance(leaf.thing, torch.Tensor) else torch.as_tensor(leaf.thing)
    thing = thing.detach()
    if thing.layout is not torch.strided or thing.is_quantized:
        return None
    if thing.is_complex():
        thing = torch.view_as_real(thing.resolve_conj())
    return thing.reshape(-1)
