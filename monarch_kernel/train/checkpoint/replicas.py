"""Finds what differs between ranks of that which a checkpoint would store once.

Theory of operation. Each rank writes its own shards of sharded tensors. Everything else exists on each rank: plain values,
tensors that are not distributed, and shards that a `DTensor` replicates. Each rank computes a digest of every such leaf, and
the ranks compare one digest of all digests in a collective that a save does anyway. Only if these differ do they exchange the
digests of the leaves. Plain values that differ are stored for each rank. Tensors of modules and optimizers that differ are
refused: `torch.distributed.checkpoint` would take one tensor from one rank and the next from another.

Digests of tensors are computed on the tensor's device, at about memory bandwidth: they only need to detect accidental
differences.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from collections.abc import Set as AnySet
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_kernel.errors import CheckpointError, format_ranks
from monarch_kernel.features.replicas.digests import digest_of_bytes, mixed
from monarch_kernel.train.checkpoint.atomic_directory import previous

__all__ = [
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

SAME_MODEL = (
    "All ranks must train the same model with the same settings: use parallelize, or send the tensors of rank 0 to all ranks "
    "with torch.distributed.broadcast"
)
_MAX_LISTED = 8
_TEXTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


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
    return {place: digest_of_bytes(repr(sorted(each)).encode()) for place, each in places.items()}


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
        f"{path} was not saved: a checkpoint stores these once, but their values differ between ranks; "
        f"{previous(path)}\n{listed}\n{way_out}"
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
        return _digest((str(value.dtype), tuple(value.shape), mixed(value)))
    if isinstance(value, Mapping):
        parts = sorted(_digest(key) + _digest(each) for key, each in value.items())
    elif isinstance(value, AnySet):
        parts = sorted(map(_digest, value))
    elif isinstance(value, (list, tuple)):
        parts = list(map(_digest, value))
    else:
        parts = [repr(value).encode() if type(value) in _TEXTS else _pickled(value)]
    return digest_of_bytes(type(value).__name__.encode(), *parts)


def _pickled(value: Any) -> bytes:
    """Pickle a small value without memoisation (``fast``), because sharing of objects may differ between equal values."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()
