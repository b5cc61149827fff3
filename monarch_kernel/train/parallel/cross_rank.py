"""Compares models across ranks before they change, and makes the values of parameters equal."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from monarch_kernel.errors import PlanError
from monarch_kernel.train.planning.model_facts import ModelFacts

__all__ = ["compare_models", "group_of", "names_in_words", "spread"]


def group_of(mesh: DeviceMesh | None, axes: Sequence[str] = ()) -> dist.ProcessGroup | None:
    """The group of the ranks along some axes of a mesh, by default along all of them; None for a single rank.

    Collective: creates the group if it does not exist yet.
    """
    if mesh is None or mesh.size() == 1:
        return None
    names = tuple(axes) or tuple(mesh.mesh_dim_names or ())
    if len(names) == mesh.ndim and mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    part = mesh[names] if names and len(names) < mesh.ndim else mesh
    if part.size() == 1:
        return None
    return part.get_group() if part.ndim == 1 else part._flatten().get_group()


def compare_models(all_facts: Sequence[ModelFacts]) -> None:
    """Check that all ranks have built the same model.

    Raises:
        PlanError: the models differ; the message names the first parameter that differs.
    """
    mine = _shapes(all_facts[0])
    for rank, facts in enumerate(all_facts[1:], 1):
        theirs = _shapes(facts)
        for name in [*mine, *theirs]:
            here, there = mine.get(name, "missing"), theirs.get(name, "missing")
            if here != there:
                raise PlanError(
                    f"the ranks have built different models: {name} is {here} on rank 0, but {there} on rank {rank}; build the "
                    "same model on all ranks, with the same configuration"
                )


def _shapes(facts: ModelFacts) -> Mapping[str, str]:
    return {
        name: f"{param.dtype} {list(param.shape)}{'' if param.trains else ', frozen'}"
        for param in facts.params
        for name in param.names
    }


def spread(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> list[str]:
    """Replace tensors whose values differ between ranks by those of the first rank; returns their names."""
    if group is None or not tensors:
        return []
    sums = [hash_of(tensor) for tensor in tensors.values()]
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, sums, group=group)
    differ = [name for i, name in enumerate(tensors) if len({theirs[i] for theirs in everyones}) > 1]
    with torch.no_grad():
        for name in differ:
            tensor = tensors[name]
            value = tensor.detach().contiguous()
            dist.broadcast(value, group=group, group_src=0)
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)
    return differ


def hash_of(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bytes, independent of its device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.cpu().numpy().data)


def names_in_words(names: Iterable[str], limit: int = 4) -> str:
    """List the first names, and the number of further ones."""
    known = list(names)
    shown = ", ".join(known[:limit])
    return f"{shown} and {len(known) - limit:,} more" if len(known) > limit else shown
