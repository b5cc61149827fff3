"""Comparison of the replicas of a mesh: the side that asks the ranks (`ProcMesh.check`)."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from monarch_kernel.actor.tensors import Ranks
from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.base.mesh.extent import list_axes
from monarch_kernel.base.text import one_line
from monarch_kernel.errors import format_ranks
from monarch_kernel.features.replicas.compare import (
    Comparison,
    Difference,
    compare,
    difference_text,
    differences_lines,
    differing,
    locate,
)
from monarch_kernel.features.replicas.worker import Held, digests_of_pieces, list_copies, read_pieces

__all__ = ["ReplicaCheck", "axes_of", "check_replicas", "skipped_by"]

_REMEDY = (
    "Ranks that differ stay different. Usual causes: another seed where a model was made without parallelize or DDP, a step "
    "that only some ranks did, a flipped bit. torch.distributed.broadcast sends the tensors of a good rank, %mesh rollback "
    "goes back to a snapshot, and live.check(every=500) in the loop names the step"
)
_MAX_SKIPPED = 4


@dataclass(frozen=True)
class ReplicaCheck:
    """The result of `ProcMesh.check`.

    Attributes:
        mesh: name of the mesh, or of the slice.
        n_ranks: number of ranks.
        names: the variables that were compared.
        comparison: what differs.
        axes: axes along which the differences lie; empty if they follow no axis.
        skipped: path -> why the tensor or object there was not compared.
        seconds: how long it took.
        alone_on: the axis that was named, if no two of the ranks lie along it; else empty.
    """

    mesh: str
    n_ranks: int
    names: tuple[str, ...]
    comparison: Comparison
    axes: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    alone_on: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether replicas were compared and all are equal, apart from buffers.

        False if nothing but buffers was compared, such as on a single rank: an assertion should not pass without a comparison.
        """
        return self._is_compared and not self.comparison.differences

    @property
    def _is_compared(self) -> bool:
        return self.comparison.compared > self.comparison.compared_buffers

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The tensors that differ, apart from buffers."""
        return self.comparison.differences

    def __repr__(self) -> str:
        found = self.comparison
        names, ranks = ", ".join(self.names), f"{self.n_ranks} rank{'s' * (self.n_ranks != 1)}"
        if not self.names:
            return f"{self.mesh}: no rank has a module in its variables; name a variable, such as %mesh check {self.mesh} x"
        unique = f"; {_tensors(found.unique)} without a replica, as each rank has another shard" if found.unique else ""
        if self.n_ranks == 1:
            unique = "; replicas are compared between at least 2 ranks"
        elif self.alone_on:
            unique = f"; no two of these ranks lie along the axis {self.alone_on}"
        elif not (found.compared or found.unique or self.skipped):
            unique = "; no tensor is in it" if len(self.names) == 1 else "; no tensor is in them"
        if not self._is_compared and not found.differences:
            only = f"only buffers have replicas in {names}" if found.compared else f"nothing to compare in {names}"
            lines = [f"{self.mesh}: {only} on {ranks}, so is_equal is False{unique}"]
        elif self.is_equal:
            lines = [
                f"{self.mesh}: {_tensors(found.compared)} of {names} {'is' if found.compared == 1 else 'are'} equal on {ranks} "
                f"({self.seconds:.2g} s){unique}"
            ]
        else:
            different = f"{found.different:,} of {_tensors(found.compared)}"
            differ = "differs" if found.different == 1 else "differ"
            lines = [f"{self.mesh}: {different} of {names} {differ} between {ranks} ({self.seconds:.2g} s){unique}"]
            lines += [f"  {line}" for line in differences_lines(found.differences)]
            lines.append(_hint(self.axes) if self.axes else _REMEDY)
        if found.buffers:
            more = f", and {len(found.buffers) - 1:,} more" if len(found.buffers) > 1 else ""
            lines.append(f"buffers differ, which BatchNorm does on purpose: {difference_text(found.buffers[0])}{more}")
        if self.skipped:
            listed = [f"{path} ({why})" for path, why in list(self.skipped.items())[:_MAX_SKIPPED]]
            if hidden := len(self.skipped) - len(listed):
                listed.append(f"and {hidden:,} more")
            lines.append(f"not compared: {', '.join(listed)}")
        return "\n".join(map(one_line, lines))


def check_replicas(mesh: Ranks, names: Sequence[str], axis: str | None) -> ReplicaCheck:
    """Compare what the ranks of a mesh hold of some variables.

    Args:
        mesh: the ranks.
        names: the variables; none for all modules.
        axis: compare only ranks along this axis; None to compare all.

    Raises:
        KeyError: there is no such axis.
        NameError: no rank has such a variable.
    """
    started = time.perf_counter()
    indexes = {rank: dict(mesh.base.point(rank)) for rank in mesh.ranks}
    if axis is not None and axis not in mesh.base:
        raise KeyError(f"{mesh.name} has no axis {axis!r}; {list_axes(mesh.base)}")

    def place(rank: int) -> Hashable:
        return None if axis is None else tuple(sorted((name, at) for name, at in indexes[rank].items() if name != axis))

    held: dict[int, Held] = dict(
        zip(
            mesh.ranks,
            mesh.call(partial(list_copies, tuple(names)), f"checking the replicas of {mesh.name}").get().values(),
        )
    )
    for name in names:
        if not any(name in each.names for each in held.values()):
            raise NameError(f"name {name!r} is not defined on any rank of {mesh.name}")
    comparison = compare(
        {rank: each.copies for rank, each in held.items()}, place, {rank: each.names for rank, each in held.items()}
    )
    if comparison.differences:
        first = _located(mesh, names, comparison.differences[0])
        comparison = replace(comparison, differences=(first, *comparison.differences[1:]))
    skipped = skipped_by({rank: each.skipped for rank, each in held.items()})
    seen = tuple(dict.fromkeys(name for each in held.values() for name in each.names))
    where = mesh.name if len(mesh.ranks) == mesh.base.nelements else f"{mesh.name}{format_ranks(mesh.ranks)}"
    axes = axes_of(comparison.differences, indexes) if axis is None else ()
    alone_on = axis if axis is not None and len({place(rank) for rank in mesh.ranks}) == len(mesh.ranks) else ""
    took_s = time.perf_counter() - started
    return ReplicaCheck(where, len(mesh.ranks), seen, comparison, axes, skipped, took_s, alone_on)


def skipped_by(ranks: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """Merge what ranks did not compare: path -> why, with the ranks if it is not on all of them."""
    on: dict[tuple[str, str], list[int]] = {}
    for rank, skipped in ranks.items():
        for path, why in skipped.items():
            on.setdefault((path, why), []).append(rank)
    found: dict[str, str] = {}
    for (path, why), where in on.items():
        text = why if len(where) == len(ranks) else f"{why} on {format_ranks(where)}"
        found[path] = f"{found[path]}, {text}" if path in found else text
    return found


def _located(mesh: Ranks, names: Sequence[str], difference: Difference) -> Difference:
    """Find where two copies differ, by how much."""
    copy = difference.copy
    if len(difference.sets) < 2 or difference.shapes or copy.kind == "value":
        return difference
    ones, others = difference.sets[:2]
    ranks = ones[0], others[0]
    procs = tuple(mesh.procs[mesh.ranks.index(rank)] for rank in ranks)
    pair = mesh._replace(procs=procs, ranks=ranks, region=Region(Extent({"ranks": 2}), ranks))
    what = f"checking the replicas of {mesh.name}"
    digests = pair.call(partial(digests_of_pieces, tuple(names), copy.kind, copy.path), what).get().values()
    numbers, total = differing(*digests)
    if not numbers:
        return difference
    one, other = (
        pair.call(partial(read_pieces, tuple(names), copy.kind, copy.path, numbers, total), what).get().values()
    )
    return replace(difference, found=locate(copy, one, other, (ones, others)))


def axes_of(differences: Sequence[Difference], indexes: dict[int, dict[str, int]]) -> tuple[str, ...]:
    """Return the axes along which all differences lie: the ranks with equal copies are those with equal indexes there."""
    names = list(next(iter(indexes.values()), {}))
    found = []
    for name in names if len(names) > 1 else ():
        if differences and all(_follows(each, name, indexes) for each in differences):
            found.append(name)
    return tuple(found)


def _follows(difference: Difference, axis: str, indexes: dict[int, dict[str, int]]) -> bool:
    by_index: dict[int, set[int]] = {}
    for number, ranks in enumerate((difference.missing, *difference.sets)):
        for rank in ranks:
            by_index.setdefault(indexes[rank][axis], set()).add(number)
    return len(by_index) > 1 and all(len(numbers) == 1 for numbers in by_index.values())


def _hint(axes: Sequence[str]) -> str:
    return (
        f"The values differ only along the axis {' and '.join(axes)}. If the ranks along it hold different tensors on purpose, "
        "name the axis of the replicas: mesh.check(axis=...), or %mesh check --axis ..."
    )


def _tensors(count: int) -> str:
    return f"{count:,} tensor{'s' * (count != 1)}"
