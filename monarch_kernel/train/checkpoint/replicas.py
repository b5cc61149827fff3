"""Whether all ranks have the same of what a checkpoint keeps once.

Theory of operation. Of a sharded tensor each rank writes its own part. A checkpoint keeps once all else that each rank has:
plain values, tensors that are not spread, and parts that a `DTensor` replicates. If these differ by rank, a checkpoint can't
keep what the ranks have, and `torch.distributed.checkpoint` would take one tensor from this rank and the next from another. So
each rank makes a digest of every such leaf, and the ranks compare one digest of all digests in a collective that a save does
anyway. Only where these differ do they exchange the digests of the leaves, to name what differs.

Digests of tensors are made where the tensor is, at about the rate at which memory is read: only differences that come about by
accident have to be seen.
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
"""Which part of a tensor: the coordinates of the rank along the axes that cut it; empty for the whole."""

Digests = dict[tuple[str, Place], bytes]
"""The leaves that a rank has, by name and place."""

EACH_RANK = (
    "Give the same on all ranks. To keep what each rank has, such as a random state, gather it in a list with "
    "torch.distributed.all_gather_object, save the list, and take the item of the rank after loading"
)
SAME_MODEL = (
    "All ranks have to train the same model with the same settings: spread it with parallelize, or send what rank 0 has to all "
    "with torch.distributed.broadcast"
)
_MAX_LISTED = 8
_TEXTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MIX = -4417276706812531889  # an odd number with as many ones as zeros
_STEP = -7046029254386353131  # 2**64 over the golden ratio
_WORDS_CPU = 1 << 16  # of 8 bytes: they stay in a cache
_WORDS = 1 << 22  # on other devices, where each call costs


def of_values(values: Mapping[str, Any]) -> Digests:
    """Make the digests of plain values: one for each leaf of nested dicts, and one for the keys of each dict."""
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
    """Make the digests of the leaves of modules and optimizers, but for parts that no other rank has.

    Args:
        leaves: by full name.
        ranks: how many save.
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
    """Make one digest of all leaves of a place."""
    places: dict[Place, list[tuple[str, bytes]]] = {}
    for (name, place), digest in digests.items():
        places.setdefault(place, []).append((name, digest))
    return {place: _hash(repr(sorted(each)).encode()) for place, each in places.items()}


def differing(by_rank: Sequence[Mapping[Any, bytes]]) -> dict[Any, tuple[int, list[int]]]:
    """Find what ranks have different digests of.

    Args:
        by_rank: the digests, or their `summary`, of each rank.

    Returns:
        What differs -> the first rank that has it, and those that have something else.
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
    """Make the error that says what differs, on which ranks, and what to do.

    Args:
        path: of the checkpoint.
        found: as `differing` gives it.
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
        f"{path} was not saved: it would keep one value of each of these, and the ranks have different ones; what was saved "
        f"before is whole\n{listed}\n{way_out}"
    )


def buffers_text(path: Path, names: Sequence[str]) -> str:
    """Say of which buffers a checkpoint keeps the values of rank 0."""
    more = f" and {len(names) - _MAX_LISTED:,} more" if len(names) > _MAX_LISTED else ""
    return (
        f"{path.name} keeps the values of rank 0 of buffers that differ by rank: {', '.join(names[:_MAX_LISTED])}{more}. To "
        "have the same on all ranks, use torch.nn.SyncBatchNorm, or parallelize"
    )


def _digest(value: Any) -> bytes:
    """Make a digest that is the same for equal values, whatever objects they share."""
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
    """Pickle something small; ``fast``: as if no object were there twice, for that may differ between equal values."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()


def _mixed(tensor: torch.Tensor) -> int | bytes:
    """Mix the bytes of a tensor, and where each one is, to a number of 64 bits, on the tensor's device."""
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
