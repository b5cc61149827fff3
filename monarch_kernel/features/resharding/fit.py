"""Checks whether the tensors of one mesh can be copied to another mesh, and explains why not."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from monarch_kernel.errors import MoveError, format_ranks
from monarch_kernel.features.resharding.plan import Part, join_up, numel, uncovered, whole
from monarch_kernel.features.resharding.reading import Held, Plain

__all__ = ["Fit", "Side", "agreed", "dim_of", "fit", "joined"]

HashableT = TypeVar("HashableT", bound=Hashable)


class Side(NamedTuple):
    """The tensors and values of the ranks of a mesh.

    Attributes:
        name: name of the mesh.
        ranks: its ranks.
        leaves: for each rank, path -> leaf.
    """

    name: str
    ranks: Sequence[int]
    leaves: Sequence[Mapping[str, Held | Plain]]

    def of(self, path: str) -> dict[int, Held | Plain]:
        """Rank -> its leaf at a path."""
        return {rank: leaves[path] for rank, leaves in zip(self.ranks, self.leaves) if path in leaves}

    def paths(self) -> list[str]:
        """All paths, in the order of the first rank that has them."""
        return list(dict.fromkeys(path for leaves in self.leaves for path in leaves))

    def where(self, ranks: Sequence[int]) -> str:
        """Describe ranks: the mesh, with the ranks if these are not all."""
        return self.name if len(ranks) == len(self.ranks) else f"{self.name}{format_ranks(ranks)}"


class Fit(NamedTuple):
    """The result of a comparison.

    Attributes:
        missing: paths that only the target has.
        unexpected: paths that only the source has.
        problems: descriptions of why the other paths can't be copied.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[str, ...]


def fit(source: Side, target: Side, *, cast: bool) -> Fit:
    """Compare the tensors and values of two meshes.

    Args:
        source: the mesh to copy from.
        target: the mesh to copy to.
        cast: whether dtypes may differ.
    """
    there, here = source.paths(), target.paths()
    known = set(there)
    satisfied = {
        leaf.same
        for leaves in target.leaves
        for path, leaf in leaves.items()
        if path in known and isinstance(leaf, Held)
    }
    missing = [path for path in here if path not in known and not _tied(target, path) & satisfied]
    wanted = set(here)
    unexpected = [path for path in there if path not in wanted]
    problems = [why for path in there if path in wanted for why in _compare(path, source, target, cast)]
    return Fit(tuple(missing), tuple(unexpected), tuple(problems))


def _tied(side: Side, path: str) -> set[str]:
    return {leaf.same for leaf in side.of(path).values() if isinstance(leaf, Held)}


def _compare(path: str, source: Side, target: Side, cast: bool) -> list[str]:
    theirs, ours = source.of(path), target.of(path)
    kinds = {type(leaf) for leaf in (*theirs.values(), *ours.values())}
    if len(kinds) > 1:
        return [f"{path} is {_kinds(theirs, source)}, and {_kinds(ours, target)}"]
    if kinds == {Plain}:
        values = _grouped({rank: repr(leaf.value) for rank, leaf in theirs.items() if isinstance(leaf, Plain)})
        if len(values) > 1:
            return [f"{path} is {_listed(values, source)}: its ranks do not agree"]
        return []
    why = agreed(path, source)
    if why:
        return [why]
    held = next(leaf for leaf in theirs.values() if isinstance(leaf, Held))
    problems = []
    for (dtype, shape), ranks in _grouped(
        {r: (h.dtype, h.shape) for r, h in ours.items() if isinstance(h, Held)}
    ).items():
        is_other = shape != held.shape or (dtype != held.dtype and not cast)
        if is_other:
            hint = ": pass cast=True to convert it" if shape == held.shape else ""
            there = f"{held.dtype}{list(held.shape)} on {source.name}"
            problems.append(f"{path} is {there}, and {dtype}{list(shape)} on {target.where(ranks)}{hint}")
    return problems


def agreed(path: str, side: Side) -> str:
    """Say why a tensor can't be read from a mesh; empty if it can be."""
    held = {rank: leaf for rank, leaf in side.of(path).items() if isinstance(leaf, Held)}
    kinds = _grouped({rank: f"{leaf.dtype}{list(leaf.shape)}" for rank, leaf in held.items()})
    if len(kinds) > 1:
        return (
            f"{path} is {_listed(kinds, side)}: a tensor that is split over ranks must be a DTensor, or be moved "
            "with all_to_all"
        )
    shape = next(iter(held.values())).shape
    left = uncovered(whole(shape), [part.box for leaf in held.values() for part in leaf.parts])
    if left:
        count = numel(whole(shape))
        lacking = sum(map(numel, left))
        return f"{path}: the ranks of {side.name} have {count - lacking:,} of its {count:,} elements: use all its ranks"
    return ""


def joined(name: str, side: Side, places: Sequence[int], dim: int) -> list[dict[str, Held | Plain]]:
    """Join the tensors of ranks into one, as its parts; the shards of a DTensor already are parts of one tensor.

    Args:
        name: path of the tensors.
        side: the ranks.
        places: for each rank, the number of its part; ranks with the same number have the same part.
        dim: the dim along which the parts follow each other.

    Returns:
        The part of each rank, under the empty path.

    Raises:
        MoveError: the tensors can't be joined; the message says why.
        IndexError: the tensors have no such dim.
    """
    held = [leaves.get(name) for leaves in side.leaves]
    leaves = [leaf for leaf in held if isinstance(leaf, Held)]
    if len(leaves) < len(held):
        raise MoveError(
            f"{name} on {side.name} is not a tensor or array; move modules, dicts and lists with copy_state"
        )
    kinds = {leaf.kind == "dtensor" for leaf in leaves}
    if kinds == {True}:
        why = agreed(name, side)
        if why:
            raise MoveError(why)
        return [{"": leaf} for leaf in leaves]
    if len(kinds) > 1:
        raise MoveError(f"{name} is a DTensor on some ranks of {side.name}, but not on others")
    dim = dim_of(dim, leaves[0].shape, name)
    rests = [", ".join(":" if i == dim else str(size) for i, size in enumerate(leaf.shape)) for leaf in leaves]
    like = _grouped({rank: f"{leaf.dtype}[{rest}]" for rank, leaf, rest in zip(side.ranks, leaves, rests)})
    if len(like) > 1:
        raise MoveError(
            f"{name} is {_listed(like, side)}: parts along dim {dim} must have one dtype, and one shape except in that dim"
        )
    sizes: dict[int, int] = {}
    for place, leaf in zip(places, leaves):
        if sizes.setdefault(place, leaf.shape[dim]) != leaf.shape[dim]:
            ranks = _grouped(
                {r: f"{h.dtype}{list(h.shape)}" for r, h, p in zip(side.ranks, leaves, places) if p == place}
            )
            raise MoveError(
                f"{name} is {_listed(ranks, side)}, where ranks should have the same part: name the axis, or slice"
            )
    spans = join_up([sizes[place] for place in range(len(sizes))])
    found: list[dict[str, Held | Plain]] = []
    for place, leaf in zip(places, leaves):
        shape = (*leaf.shape[:dim], spans[-1][1], *leaf.shape[dim + 1 :])
        box = tuple(spans[place] if i == dim else (0, size) for i, size in enumerate(leaf.shape))
        found.append({"": leaf._replace(shape=shape, parts=(Part(box, (0,) * len(box)),))})
    return found


def dim_of(dim: int, shape: Sequence[int], name: str) -> int:
    """Check a dim of a tensor; negative dims count from the end."""
    if not -len(shape) <= dim < len(shape):
        raise IndexError(f"{name} of shape {list(shape)} has no dim {dim}")
    return dim % len(shape)


def _kinds(leaves: Mapping[int, Held | Plain], side: Side) -> str:
    named = {
        rank: "a tensor" if isinstance(leaf, Held) else f"the {type(leaf.value).__name__} {leaf.value!r:.60}"
        for rank, leaf in leaves.items()
    }
    return _listed(_grouped(named), side)


def _grouped(values: Mapping[int, HashableT]) -> dict[HashableT, list[int]]:
    """Value -> the ranks that have it."""
    groups: dict[HashableT, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return groups


def _listed(groups: Mapping[str, Sequence[int]], side: Side) -> str:
    return " and ".join(f"{value} on {side.where(ranks)}" for value, ranks in groups.items())
