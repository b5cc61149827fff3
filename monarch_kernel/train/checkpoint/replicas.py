"""Checks that all ranks have the same values of what a checkpoint stores once.

Theory of operation. Each rank writes its own shards of sharded tensors. A checkpoint stores everything else once: plain
values, tensors that are not distributed, and shards that a `DTensor` replicates. If these differ between ranks, a checkpoint
can't store them all, and `torch.distributed.checkpoint` would take one tensor from one rank and the next from another. So each
rank computes a digest of every such leaf, and the ranks compare one digest of all digests in a collective that a save does
anyway. Only if these differ do they exchange the digests of the leaves, to name the leaves that differ.

Digests of tensors are computed on the tensor's device, at about memory bandwidth: they only need to detect accidental
differences.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from collections.abc import Set as AnySet
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_kernel.errors import CheckpointError, format_ranks

__all__ = [
    "EACH_RANK",
    "SAME_MODEL",
    "Digests",
    "Place",
    "buffers_text",
    "differing",
    "of_tensors",
    "of_values",
    "refusal",
    "summary",
]

Place = tuple[int, ...]
"""A shard of a tensor: the coordinates of the rank along the axes that shard it; empty for the whole tensor."""

Digests = dict[tuple[str, Place], bytes]
"""The digests of a rank's leaves, by name and place."""

EACH_RANK = (
    "Pass the same values on all ranks. To save a value of each rank, such as a random state, gather the values in a list with "
    "torch.distributed.all_gather_object, save the list, and take the item of the rank after loading"
)
SAME_MODEL = (
    "All ranks must train the same model with the same settings: use parallelize, or send the tensors of rank 0 to all ranks "
    "with torch.distributed.broadcast"
)
_MAX_LISTED = 8
_TEXTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MIX = -4417276706812531889  # an odd number with as many ones as zeros
_STEP = -7046029254386353131  # 2**64 over the golden ratio
_WORDS_CPU = 1 << 16  # of 8 bytes each: they stay in a cache
_WORDS = 1 << 22  # on other devices, where calls are expensive


def of_values(values: Mapping[str, Any]) -> Digests:
    """Compute the digests of plain values: one for each leaf of nested dicts, and one for the keys of each dict."""
    found: Digests = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            found[name, ()] = _digest(set(value))
            for key, each in value.items():
                walk(f"{name}.{key}", each)
        else:
            found[name, ()] = _digest(value)

    for name, value in values.items():
        walk(name, value)
    return found


def of_tensors(leaves: Mapping[str, Any], ranks: int) -> Digests:
    """Compute the digests of the leaves of modules and optimizers, except for shards that no other rank has.

    Args:
        leaves: the leaves, by full name.
        ranks: number of ranks that save.
    """
    found: Digests = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, DTensor):
            found[name, ()] = _digest(leaf)
            continue
        mesh, at = leaf.device_mesh, leaf.device_mesh.get_coordinate()
        cuts = [not placement.is_replicate() for placement in leaf.placements]
        copies = any(size > 1 for size, cut in zip(mesh.shape, cuts, strict=True) if not cut)
        if at is not None and (copies or mesh.size() < ranks):
            place = tuple(each for each, cut in zip(at, cuts, strict=True) if cut)
            found[name, place] = _digest(leaf.to_local())
    return found


def summary(digests: Digests) -> dict[Place, bytes]:
    """Compute one digest of all leaves for each place."""
    places: dict[Place, list[tuple[str, bytes]]] = {}
    for (name, place), digest in digests.items():
        places.setdefault(place, []).append((name, digest))
    return {place: _hash(repr(sorted(each)).encode()) for place, each in places.items()}


def differing(by_rank: Sequence[Mapping[Any, bytes]]) -> dict[Any, tuple[int, list[int]]]:
    """Find keys whose digests differ between ranks.

    Args:
        by_rank: the digests, or their `summary`, of each rank.

    Returns:
        Key -> the first rank that has it, and the ranks with another digest.
    """
    first: dict[Any, tuple[int, bytes]] = {}
    found: dict[Any, tuple[int, list[int]]] = {}
    for rank, digests in enumerate(by_rank):
        for key, digest in digests.items():
            one, its = first.setdefault(key, (rank, digest))
            if its != digest:
                found.setdefault(key, (one, []))[1].append(rank)
    return found


def refusal(path: Path, found: Mapping[tuple[str, Place], tuple[int, list[int]]], way_out: str) -> CheckpointError:
    """Create the error that names what differs, on which ranks, and what to do.

    Args:
        path: path of the checkpoint.
        found: the result of `differing`.
        way_out: what to do.
    """
    ranks: dict[str, tuple[set[int], set[int]]] = {}
    for (name, _), (first, others) in found.items():
        firsts, rest = ranks.setdefault(name, (set(), set()))
        firsts.add(first)
        rest.update(others)
    lines = [
        f"  {name}: {format_ranks(sorted(rest))} differ{'s' * (len(rest) == 1)} from {format_ranks(sorted(firsts))}"
        for name, (firsts, rest) in ranks.items()
    ]
    more = [f"  and {len(lines) - _MAX_LISTED:,} more"] if len(lines) > _MAX_LISTED else []
    listed = "\n".join(lines[:_MAX_LISTED] + more)
    return CheckpointError(
        f"{path} was not saved: a checkpoint stores these once, but their values differ between ranks; the previous checkpoint "
        f"is intact\n{listed}\n{way_out}"
    )


def buffers_text(path: Path, names: Sequence[str]) -> str:
    """Name the buffers of which a checkpoint stores the values of rank 0."""
    more = f" and {len(names) - _MAX_LISTED:,} more" if len(names) > _MAX_LISTED else ""
    return (
        f"{path.name} stores rank 0's values of buffers that differ between ranks: {', '.join(names[:_MAX_LISTED])}{more}. "
        "For equal buffers on all ranks, use torch.nn.SyncBatchNorm, or parallelize"
    )


def _digest(value: Any) -> bytes:
    """Compute a digest that is the same for equal values, whatever objects they share."""
    if isinstance(value, torch.Tensor):
        return _digest((str(value.dtype), tuple(value.shape), _mixed(value)))
    if isinstance(value, Mapping):
        parts = sorted(_digest(key) + _digest(each) for key, each in value.items())
    elif isinstance(value, AnySet):
        parts = sorted(map(_digest, value))
    elif isinstance(value, (list, tuple)):
        parts = list(map(_digest, value))
    else:
        parts = [repr(value).encode() if type(value) in _TEXTS else _pickled(value)]
    return _hash(type(value).__name__.encode(), *parts)


def _hash(*parts: bytes) -> bytes:
    return blake2b(b"\0".join(parts), digest_size=16).digest()


def _pickled(value: Any) -> bytes:
    """Pickle a small value without memoisation (``fast``), because sharing of objects may differ between equal values."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()


def _mixed(tensor: torch.Tensor) -> int | bytes:
    """Mix the bytes of a tensor and their positions into a 64-bit number, on the tensor's device."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        buffer = io.BytesIO()
        torch.save(tensor.cpu(), buffer)
        return _hash(buffer.getvalue())
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
    words = raw.view(torch.int64)
    most = _WORDS_CPU if words.device.type == "cpu" else _WORDS
    salt = torch.arange(1, min(most, len(words)) + 1, device=words.device) * _STEP
    total = 0
    for chunk in words.split(most):  # type: ignore[no-untyped-call]
        mixed = (chunk ^ salt[: len(chunk)]).mul_(_MIX)
        mixed.bitwise_xor_(mixed >> 32).mul_(_MIX)
        total = (total * _MIX + int(mixed.sum())) % (1 << 64)
    return total
