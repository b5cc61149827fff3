"""Collectives on distributed tensors, on a rank.

A rank whose operand is poisoned must take part, for the others would wait forever. So all ranks first exchange a number that
says whether a part is poisoned, and by which operation; then all have a poison, and no data is exchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from monarch_kernel.errors import Failure
from monarch_kernel.features.tensors.records import Poison

__all__ = ["Collectives"]


class Collectives:
    """The process groups that reductions of a rank use.

    Args:
        rank: its flat rank, which is its number in the process group of the mesh.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._world: Any = None
        self._groups: dict[tuple[int, ...], Any] = {}

    def reduce(
        self,
        operand: Any,
        groups: Sequence[Sequence[int]],
        reduction: str,
        scatter: bool,
        shape: Sequence[int],
        dtype: Any,
    ) -> Any:
        """Reduce a tensor, or a `Poison` in place of one with a shape and a dtype, along axes of the mesh.

        Args:
            operand: the part of this rank.
            groups: the ranks that differ along these axes only.
            reduction: ``sum``, ``avg``, ``max``, ``min``, ``product`` or ``stack``.
            scatter: whether each rank keeps only the part of the result with its own index.
            shape: of the operand.
            dtype: of the operand.
        """
        import torch
        import torch.distributed as dist

        members = tuple(next(group for group in groups if self._rank in group))
        count, own = len(members), members.index(self._rank)
        group = self._group(members) if count > 1 else None
        op = operand.op + 2 if isinstance(operand, Poison) else 0  # one that was put has the number -1
        if group is not None:
            flag = torch.tensor(op)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
            op = int(flag)
        if op:
            return operand if isinstance(operand, Poison) else Poison(op - 2, _ELSEWHERE)
        mine = operand.contiguous()
        if reduction == "stack":
            return _stacked(mine, count, group, scatter)
        result = mine.clone()
        if group is not None:
            dist.all_reduce(result, _operators()[reduction], group=group)
        if reduction == "avg":
            result /= count
        return result[own].clone() if scatter else result

    def _group(self, members: tuple[int, ...]) -> Any:
        """Return the group of some ranks, which all of them make when they first need it."""
        import torch.distributed as dist

        if not dist.is_initialized():
            raise RuntimeError("the ranks have no process group: a cell has destroyed it, or it was aborted")
        world = dist.group.WORLD
        if world is not self._world:  # it was formed again
            self._world = world
            self._groups.clear()
        if len(members) == dist.get_world_size():
            return world
        found = self._groups.get(members)
        if found is None:
            found = self._groups[members] = dist.new_group(list(members), use_local_synchronization=True)
        return found


_ELSEWHERE = Failure("released", "NoOperand", "the operand of another rank is lost")


@functools.cache
def _operators() -> dict[str, Any]:
    import torch.distributed as dist

    op = dist.ReduceOp
    return {"sum": op.SUM, "avg": op.SUM, "max": op.MAX, "min": op.MIN, "product": op.PRODUCT}


def _stacked(mine: Any, count: int, group: Any, scatter: bool) -> Any:
    """Exchange parts: each rank gets those of all, or, with ``scatter``, one from each."""
    import torch
    import torch.distributed as dist

    if group is None:
        return mine.clone() if scatter else mine.unsqueeze(0).clone()
    result = torch.empty_like(mine) if scatter else mine.new_empty((count, *mine.shape))
    if scatter:
        dist.all_to_all_single(result, mine, group=group)
    else:
        dist.all_gather(list(result.unbind()), mine, group=group)
    return result
