"""The checks of a live loop: implements `monarch_kernel.live.check`, and with `repeats` `monarch_kernel.live.repeat`.

The ranks exchange digests in one collective, at the same step. Only if these differ do they exchange more, and each of them
raises the same error. Nothing is compared with a value of an earlier step, so a check needs no memory between steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from monarch_kernel.errors import DriftError, format_ranks
from monarch_kernel.features.replicas.compare import (
    Comparison,
    Copy,
    Pieces,
    compare,
    difference_text,
    differing,
    locate,
)
from monarch_kernel.features.replicas.digests import digest_of_bytes
from monarch_kernel.features.replicas.repeats import repeat_text, run_twice
from monarch_kernel.features.replicas.worker import Held, copies_of, modules_in, piece_digests, pieces_of
from monarch_kernel.runtime.rpc.handles import PROCESS
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["Call", "ReplicaChecks", "call_problem", "drift_text", "nothing_text"]

_REMEDY = (
    "all ranks have stopped here; %mesh rollback goes back to a snapshot, "
    "and torch.distributed.broadcast sends the tensors of a good rank"
)


@register
class ReplicaChecks:
    """The checks of the live loops of this process.

    Args:
        rank: the rank, whose cells define the modules to check by default.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._said: set[str] = set()  # in this loop
        PROCESS.checks = self

    def check(self, step: int, things: Mapping[str, Any], group: Any) -> None:
        """Compare replicas with the other ranks of a process group, all of which call this in the same step.

        Args:
            step: the step, for the error.
            things: what to compare, by name; none for the modules that cells have defined.
            group: the process group; None for the one of all ranks.

        Raises:
            DriftError: ranks differ.
            RuntimeError: there is nothing to compare, or no process group; or other ranks call this in another step.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise RuntimeError(
                "live.check() compares ranks over their process group, and there is none: call it in a cell of a mesh, "
                "or call torch.distributed.init_process_group() first"
            )
        things = self._modules(things)
        size = dist.get_world_size(group)
        if size == 1 and things:
            self._say(step, nothing_text(things, size, is_sharded=False))
            return
        held = copies_of(things)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        calls = dict(zip(ranks, _gathered(Call(step, bool(things), bool(held.copies), _digests(held)), size, group)))
        if problem := call_problem(calls):
            raise RuntimeError(problem)
        if _agree([call.digests for call in calls.values()]):
            keys = [key for call in calls.values() for key in call.digests if key]
            if len(keys) == len(set(keys)) and dist.get_rank() == ranks[0]:
                self._say(step, nothing_text(things, size, is_sharded=bool(keys)))
            return
        every = dict(zip(ranks, _gathered((held.names, held.copies), size, group)))
        comparison = compare(
            {rank: copies for rank, (_, copies) in every.items()},
            variables={rank: each[0] for rank, each in every.items()},
        )
        if comparison.differences:
            found = _located(comparison, things, dist.get_rank(), size, group)
            raise DriftError(drift_text(step, replace(comparison, differences=found)))

    def repeat(self, step: int, every: int, function: Callable[[], Any], things: Mapping[str, Any], group: Any) -> Any:
        """Call a function that computes gradients, in some steps twice; then compare the gradients, on each rank of a group.

        Args:
            step: the step.
            every: how many steps are from one comparison to the next.
            function: runs forward and backward.
            things: the modules, by name; none for those that cells have defined.
            group: the process group; None for the one of all ranks.

        Raises:
            DriftError: the gradients differ on any rank.
            RuntimeError: there is no module, or other ranks compare another step.
        """
        import torch.distributed as dist

        if step % every:
            return function()
        modules = self._modules(things)
        if not modules:
            raise RuntimeError(
                "live.repeat() found no module in the variables of cells: name those whose gradients the function computes, "
                "such as live.repeat(backward, model=model)"
            )
        result, found = run_twice(step, function, modules)
        by_rank = {0: found}
        if dist.is_initialized():
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            by_rank = dict(zip(ranks, _gathered(found, len(ranks), group)))
        if len(steps := {each.step for each in by_rank.values()}) > 1:
            raise RuntimeError(f"the ranks call live.repeat in different steps: {', '.join(map(str, sorted(steps)))}")
        if text := repeat_text(by_rank):
            raise DriftError(text)
        return result

    def _modules(self, things: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what to compare: by default the modules that cells have defined."""
        if things or not self._rank.is_in_cell:
            return things
        return modules_in(*self._rank.namespace)

    def _say(self, step: int, text: str) -> None:
        """Print a line, once in each loop."""
        if step == 0:
            self._said.clear()
        if text not in self._said:
            self._said.add(text)
            print(text, file=sys.stderr, flush=True)


class Call(NamedTuple):
    """What a rank tells the others in each check. A rank with nothing to compare takes part, as the others wait for it."""

    step: int
    has_things: bool
    has_copies: bool
    digests: dict[bytes, bytes]


def call_problem(calls: Mapping[int, Call]) -> str:
    """Return why the calls of ranks can't be compared, the same text on each rank; empty if they can."""
    steps: dict[int, list[int]] = {}
    for rank, call in calls.items():
        steps.setdefault(call.step, []).append(rank)
    if len(steps) > 1:
        each = ", ".join(f"{format_ranks(ranks)} {step}" for step, ranks in steps.items())
        return (
            f"the ranks call live.check in different steps: {each}; "
            "call it with the same every= on all ranks, outside of conditions on the rank"
        )
    if not any(call.has_things for call in calls.values()):
        return "live.check() found no module in the variables of cells: name what to compare, such as live.check(model=model)"
    if not any(call.has_copies for call in calls.values()):
        return "live.check() found no tensor that it can compare in what it was given: %mesh check says why for each"
    return ""


def nothing_text(names: Iterable[str], size: int, *, is_sharded: bool) -> str:
    """Say that a check has compared nothing, and why.

    Args:
        names: what it was to compare.
        size: number of ranks.
        is_sharded: whether there are tensors apart from buffers, so that each rank has another shard of all of them.
    """
    if size == 1:
        why = "the process group has 1 rank, and replicas are compared between ranks"
    elif is_sharded:
        why = f"no tensor has a replica, as each of {size:,} ranks has another shard (FSDP on all ranks)"
    else:
        why = "there are only buffers, which ranks may have different on purpose"
    return f"live.check compared nothing in {', '.join(names) or 'any variable'}: {why}"


def drift_text(step: int, comparison: Comparison) -> str:
    """Describe the differences of a step."""
    first, more = comparison.differences[0], len(comparison.differences) - 1
    rest = f" (and {more:,} more difference{'s' * (more != 1)})" if more else ""
    return f"step {step}: the replicas differ: {difference_text(first)}{rest}; {_REMEDY}"


def _digests(held: Held) -> dict[bytes, bytes]:
    """Return a short form of what a rank holds, except for buffers: digest of the key -> digest of the value.

    The empty key stands for the names. Shards without elements have no value.
    """
    compared = [each for each in held.copies if each.kind != "buffer"]
    found = {
        digest_of_bytes(repr((each.kind, each.path, each.parts)).encode()): _value(each)
        for each in compared
        if each.digest
    }
    found[b""] = digest_of_bytes(
        repr((sorted(held.names), sorted({(each.kind, each.path) for each in compared}))).encode()
    )
    return found


def _value(copy: Copy) -> bytes:
    return digest_of_bytes(repr((copy.shape, copy.dtype)).encode(), copy.digest)


def _agree(by_rank: Sequence[Mapping[bytes, bytes]]) -> bool:
    """Whether no two ranks have different values for a key."""
    seen: dict[bytes, bytes] = {}
    return all(seen.setdefault(key, value) == value for each in by_rank for key, value in each.items())


def _gathered(value: Any, size: int, group: Any) -> list[Any]:
    import torch.distributed as dist

    found: list[Any] = [None] * size
    dist.all_gather_object(found, value, group=group)
    return found


def _located(comparison: Comparison, things: Mapping[str, Any], rank: int, size: int, group: Any) -> tuple[Any, ...]:
    """Find where the first difference is; all ranks take part."""
    first = comparison.differences[0]
    if len(first.sets) < 2 or first.shapes or first.copy.kind == "value":
        return comparison.differences
    one, other = first.sets[0], first.sets[1]
    holders = one[0], other[0]
    mine: Any = piece_digests(things, first.copy.kind, first.copy.path) if rank in holders else ()
    ones, others = (found for found in _ordered(_gathered((rank, mine), size, group), holders))
    numbers, total = differing(ones, others)
    mine = pieces_of(things, first.copy.kind, first.copy.path, numbers, total) if rank in holders else None
    here, there = _ordered(_gathered((rank, mine), size, group), holders)
    assert isinstance(here, Pieces)
    found = locate(first.copy, here, there, (one, other)) if numbers else ""
    return replace(first, found=found), *comparison.differences[1:]


def _ordered(gathered: Sequence[tuple[int, Any]], holders: Sequence[int]) -> list[Any]:
    by_rank = dict(gathered)
    return [by_rank[rank] for rank in holders]
