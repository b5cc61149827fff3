"""Sharded tensors on a rank: DTensors of torch, on device meshes of the ranks of a mesh.

The device mesh has the names and sizes of the axes of the mesh. The ranks make it when they first need it; then all of them
must have the process group.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from monarch_kernel.features.tensors.placing import as_whole, redistributed

__all__ = ["sharded_ops"]


def sharded_ops() -> dict[str, Callable[..., Any]]:
    """The operations of this package on sharded tensors, by name."""
    meshes = _DeviceMeshes()
    return {
        "monarch::device_mesh": meshes.get,
        "monarch::shard": meshes.shard,
        "monarch::from_local": meshes.from_local,
        "monarch::filled": meshes.filled,
        "monarch::rewrap": meshes.rewrap,
        "monarch::redistribute": lambda tensor, placements: as_whole(redistributed(tensor, _placements(placements))),
        "monarch::local": lambda tensor: tensor.to_local(),
        "monarch::full": lambda tensor: tensor.full_tensor(),
    }


class _DeviceMeshes:
    """The device meshes of this process, for the process group that it has now."""

    def __init__(self) -> None:
        self._world: Any = None
        self._known: dict[Any, Any] = {}
        self._old: set[Any] = set()  # those whose groups are of an earlier process group

    def get(self, sizes: Sequence[int], names: Sequence[str]) -> Any:
        """Return the device mesh of all ranks with these axes.

        If the process group was formed again, the device mesh gets new groups, so that tensors on it are usable.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            raise RuntimeError("the ranks have no process group: a cell has destroyed it, or it was aborted")
        _register_attention()
        _silence_hints()
        if dist.group.WORLD is not self._world:  # it was formed again
            self._world = dist.group.WORLD
            self._old = set(self._known)
        key = (*sizes, *names)
        found = self._known.get(key)
        if found is None or key in self._old:
            made = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))
            self._old.discard(key)
            if found is None:
                found = self._known[key] = made
            else:
                found._dim_group_names, found._pg_registry = made._dim_group_names, made._pg_registry
                found._flatten_mapping.clear()
        return found

    def shard(self, tensor: Any, sizes: Sequence[int], names: Sequence[str], placements: Sequence[str]) -> Any:
        """Keep this rank's part of a tensor that all ranks have."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        mesh = self.get(sizes, names)
        made = distribute_tensor(tensor, mesh, _placements(placements), src_data_rank=None)
        part = made.to_local()
        if part.untyped_storage().nbytes() <= part.numel() * part.element_size() and part is not tensor:
            return made
        return DTensor.from_local(
            part.clone(), mesh, made.placements, run_check=False, shape=made.shape, stride=made.stride()
        )

    def from_local(self, part: Any, sizes: Sequence[int], names: Sequence[str], placements: Sequence[str]) -> Any:
        """Make the parts of all ranks one tensor."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(part, self.get(sizes, names), _placements(placements), run_check=False)

    def rewrap(
        self, part: Any, sizes: Sequence[int], names: Sequence[str], placements: Sequence[str], shape: Sequence[int],
        stride: Sequence[int],
    ) -> Any:  # fmt: skip
        """Make a sharded tensor of its parts again, for a process group that was formed again."""
        import torch
        from torch.distributed.tensor import DTensor

        mesh, size = self.get(sizes, names), torch.Size(shape)
        placed = _placements(placements)
        return DTensor.from_local(part, mesh, placed, run_check=False, shape=size, stride=tuple(stride))

    def filled(
        self, value: float | None, shape: Sequence[int], dtype: Any, sizes: Sequence[int], names: Sequence[str],
        placements: Sequence[str],
    ) -> Any:  # fmt: skip
        """Make a tensor of equal elements, or of undefined ones; no rank has all of it."""
        from torch.distributed.tensor import empty, full

        mesh, placed = self.get(sizes, names), _placements(placements)
        if value is None:
            return empty(tuple(shape), dtype=dtype, device_mesh=mesh, placements=placed)
        return full(tuple(shape), value, dtype=dtype, device_mesh=mesh, placements=placed)


@functools.cache
def _silence_hints() -> None:
    """Drop torch's hints on how to redistribute faster: each rank writes them, and the program can't follow them."""
    for module in ("_redistribute", "_collective_utils"):
        logging.getLogger(f"torch.distributed.tensor.{module}").addFilter(
            lambda record: (
                not str(record.msg).startswith(("While redistributing", "CPU process group does not support"))
            )
        )


@functools.cache
def _register_attention() -> None:
    """Tell torch how attention on the CPU is sharded, as it does only on a GPU: by samples, or by heads."""
    import torch
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    ops = torch.ops.aten

    def rules(n_results: int, n_tensors: int, args: Sequence[Any], kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        others = [None] * (len(args) - n_tensors)
        kinds = [Replicate()] if kwargs.get("attn_mask") is not None else [Replicate(), Shard(0), Shard(1)]
        masks = [Replicate()] if kwargs.get("attn_mask") is not None else []
        return [([kind] * n_results, [kind] * n_tensors + others + masks) for kind in kinds]

    register_sharding(ops._scaled_dot_product_flash_attention_for_cpu.default)(
        lambda *args, **kwargs: rules(2, 3, args, kwargs)
    )
    register_sharding(ops._scaled_dot_product_flash_attention_for_cpu_backward.default)(
        lambda *args, **kwargs: rules(3, 6, args, kwargs)
    )


def _placements(texts: Sequence[str]) -> tuple[Any, ...]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    made: list[Any] = []
    for text in texts:
        match = re.fullmatch(r"S\((-?\d+)\)|P\((\w+)\)|R", text)
        if match is None:
            raise ValueError(f"unknown placement {text!r}")
        shard, partial = match.groups()
        made.append(Shard(int(shard)) if shard else Partial(partial) if partial else Replicate())
    return tuple(made)
