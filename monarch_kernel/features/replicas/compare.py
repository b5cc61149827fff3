"""Compares what ranks hold of the same tensors, and describes the differences. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from monarch_kernel.errors import format_ranks

__all__ = [
    "PIECE",
    "Comparison",
    "Copy",
    "Difference",
    "Pieces",
    "compare",
    "difference_text",
    "differences_lines",
    "differing",
    "index_text",
    "locate",
]

PIECE = 16_384
"""Elements of a piece of a tensor, for the search of the elements that differ."""

_MAX_LISTED = 8
_MAX_PIECES = 4
_MAX_SETS = 4  # sets of ranks with equal values that a line names


class Copy(NamedTuple):
    """What one rank holds of a tensor, or of a plain value.

    Attributes:
        path: name of the variable and path of the tensor in it, such as ``model.fc1.weight``.
        kind: ``parameter``, ``gradient``, ``buffer``, ``tensor`` or ``value``; ``variable`` for all that a variable has.
        parts: the parts of the whole tensor that the rank holds; ranks with equal parts are replicas. None for the whole
            tensor: ranks that hold the whole are replicas whatever its shape, as a different shape is a difference.
        shape: shape of what the rank holds.
        dtype: its type.
        digest: of its content; empty for a shard without elements.
    """

    path: str
    kind: str
    parts: Hashable
    shape: tuple[int, ...]
    dtype: str
    digest: bytes

    @property
    def name(self) -> str:
        """The tensor as text: ``model.fc1.weight``, ``the gradient of model.fc1.weight``."""
        return f"the gradient of {self.path}" if self.kind == "gradient" else self.path


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between its replicas.

    Attributes:
        copy: one of the copies.
        sets: the ranks with equal copies, the largest set first.
        missing: ranks that have the rest of the variable, but not this tensor; or that do not have the variable.
        shapes: shape and dtype of the copies of each set, if these differ.
        found: where the first difference is, as text; empty if that is not known.
    """

    copy: Copy
    sets: tuple[tuple[int, ...], ...]
    missing: tuple[int, ...] = ()
    shapes: tuple[str, ...] = ()
    found: str = ""

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that differ from the majority; empty if there is no majority."""
        if self.missing or (len(self.sets) > 1 and len(self.sets[0]) == len(self.sets[1])):
            return ()
        return tuple(sorted(rank for each in self.sets[1:] for rank in each))


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        compared: number of tensors that more than one rank holds, or should hold.
        different: number of these that differ, apart from buffers.
        unique: number of tensors of which each rank holds another shard.
        differences: the tensors that differ, in the order in which ranks list them; parameters before gradients, and variables
            that some ranks do not have at the end.
        buffers: the buffers that differ; ranks may have different ones on purpose.
        compared_buffers: how many of the compared tensors are buffers.
    """

    compared: int = 0
    different: int = 0
    unique: int = 0
    differences: tuple[Difference, ...] = ()
    buffers: tuple[Difference, ...] = ()
    compared_buffers: int = 0


@dataclass
class _Group:
    """The copies of one part of a tensor."""

    first: Copy
    by_value: dict[Hashable, list[int]] = field(default_factory=dict)
    shapes: dict[Hashable, str] = field(default_factory=dict)

    def add(self, rank: int, copy: Copy) -> None:
        value = (copy.shape, copy.dtype, copy.digest)
        self.by_value.setdefault(value, []).append(rank)
        self.shapes[value] = copy.dtype if copy.kind == "value" else f"{copy.dtype} {list(copy.shape)}"

    @property
    def ranks(self) -> list[int]:
        return [rank for ranks in self.by_value.values() for rank in ranks]


def compare(
    copies: Mapping[int, Sequence[Copy]],
    place: Callable[[int], Hashable] = lambda rank: None,
    variables: Mapping[int, Iterable[str]] | None = None,
) -> Comparison:
    """Compare the copies of ranks.

    Args:
        copies: rank -> what it holds, in the order of its variables.
        place: ranks at different places hold different tensors on purpose, and are not compared.
        variables: rank -> the variables that it has, also those without tensors; by default those of its copies.
    """
    groups: dict[tuple[Hashable, str, str, Hashable], _Group] = {}
    holders: dict[Hashable, set[int]] = {}  # of any part of a tensor, or of a variable
    everyone: dict[Hashable, set[int]] = {}
    for rank, held in copies.items():
        where = place(rank)
        everyone.setdefault(where, set()).add(rank)
        for copy in held:
            if copy.digest:  # the shard has elements
                groups.setdefault((where, copy.kind, copy.path, copy.parts), _Group(copy)).add(rank, copy)
            holders.setdefault((where, copy.kind, copy.path), set()).add(rank)
            holders.setdefault((where, _variable(copy.path)), set()).add(rank)
        for name in variables[rank] if variables else ():
            holders.setdefault((where, name), set()).add(rank)
    compared: dict[tuple[str, str], bool] = {}
    different: set[tuple[str, str]] = set()
    differences: list[Difference] = []
    absences: dict[Hashable, Difference] = {}
    listed: set[Hashable] = set()  # a tensor that is missing has one difference, also if it has several shards
    for (where, kind, path, _), group in groups.items():
        variable, tensor = (where, _variable(path)), (where, kind, path)
        absent = everyone[where] - holders[variable]
        missing = holders[variable] - holders[tensor]
        compared[kind, path] = compared.get((kind, path), False) or len(group.ranks) > 1 or bool(missing or absent)
        if absent:
            whole = Copy(_variable(path), "variable", None, (), "", b"")
            absences[variable] = Difference(whole, (tuple(sorted(holders[variable])),), tuple(sorted(absent)))
        if absent or ((missing or len(group.by_value) > 1) and kind != "buffer"):
            different.add((kind, path))
        if len(group.by_value) > 1 or (missing and tensor not in listed):
            order = sorted(group.by_value.items(), key=lambda each: (-len(each[1]), each[1]))
            shapes = tuple(group.shapes[value] for value, _ in order)
            differences.append(
                Difference(
                    group.first,
                    tuple(tuple(sorted(ranks)) for _, ranks in order),
                    () if tensor in listed else tuple(sorted(missing)),
                    shapes if len(set(shapes)) > 1 else (),
                )
            )
            listed.add(tensor)
    differences.sort(
        key=lambda each: each.copy.kind == "gradient"
    )  # stable: otherwise in the order of the ranks' lists
    return Comparison(
        sum(compared.values()),
        len(different),
        len(compared) - sum(compared.values()),
        (*(each for each in differences if each.copy.kind != "buffer"), *absences.values()),
        tuple(each for each in differences if each.copy.kind == "buffer"),
        sum(is_compared for (kind, _), is_compared in compared.items() if kind == "buffer"),
    )


def _variable(path: str) -> str:
    return path.partition(".")[0]


# -- where the first difference is


class Pieces(NamedTuple):
    """What one rank sends of a tensor that differs: the elements of some pieces.

    Attributes:
        numbers: the numbers of the pieces.
        values: the elements of each piece.
        total: number of pieces of the tensor that differ.
    """

    numbers: tuple[int, ...]
    values: tuple[tuple[float | int | bool, ...], ...]
    total: int


def differing(ones: Sequence[bytes], others: Sequence[bytes]) -> tuple[tuple[int, ...], int]:
    """Compare the digests of the pieces of two copies.

    Returns:
        The numbers of the first pieces that differ, and how many differ.
    """
    numbers = [number for number, (one, other) in enumerate(zip(ones, others)) if one != other]
    return tuple(numbers[:_MAX_PIECES]), len(numbers)


def locate(copy: Copy, one: Pieces, other: Pieces, ranks: tuple[Sequence[int], Sequence[int]]) -> str:
    """Describe where two copies differ, and by how much.

    Args:
        copy: one of them.
        one: pieces of the copy of the majority.
        other: the same pieces of the other copy.
        ranks: the ranks with each copy.
    """
    shape, start = copy.shape, _start_of(copy)
    first: tuple[int, float | int, float | int] | None = None
    count, largest = 0, 0.0
    for number, values, others in zip(one.numbers, one.values, other.values):
        for at, (a, b) in enumerate(zip(values, others)):
            if a == b or (a != a and b != b):
                continue
            count += 1
            first = first or (number * PIECE + at, a, b)
            gap = abs(float(a) - float(b))
            largest = gap if gap != gap or gap > largest else largest
    if first is None:
        return "only in bits that do not change the value, such as the sign of 0"
    at, a, b = first
    more = "" if one.total <= len(one.numbers) else "at least "
    where = f"at {index_text(at, shape, start)}: " if shape else ""
    elements = f"{more}{count:,} of {math.prod(shape):,} elements {'differs' if count == 1 and not more else 'differ'}"
    by = "" if count == 1 and not more else f", by up to {largest:.3g}"
    return f"{where}{_number(b)} on {format_ranks(ranks[1])}, {_number(a)} on {format_ranks(ranks[0])}; {elements}{by}"


def _start_of(copy: Copy) -> tuple[int, ...] | None:
    """Return the index in the whole tensor where a copy begins; None if the copy has several parts."""
    boxes = copy.parts
    if boxes is None:
        return (0,) * len(copy.shape)
    assert isinstance(boxes, tuple)
    return tuple(begin for begin, _ in boxes[0]) if len(boxes) == 1 else None


def index_text(at: int, shape: Sequence[int], start: Sequence[int] | None) -> str:
    """Return the index of an element, given its number in a contiguous copy; in the whole tensor if ``start`` is known."""
    index: list[int] = []
    for size in reversed(shape):
        at, here = divmod(at, max(1, size))
        index.insert(0, here)
    if start is None:
        return f"{index} of the shard"
    return str([here + offset for here, offset in zip(index, start)])


def _number(value: float | int) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# -- text


def difference_text(difference: Difference) -> str:
    """Describe a difference in one line."""
    name, sets = difference.copy.name, difference.sets
    if difference.missing:
        text = _missing_text(difference)
        return f"{text}; {difference_text(replace(difference, missing=()))}" if len(sets) > 1 else text
    if difference.shapes:
        return f"{name}: {_shapes_text(difference)}"
    if difference.odd:
        text = f"{name}: {format_ranks(difference.odd)} {'differ' if len(difference.odd) > 1 else 'differs'} from "
        text += format_ranks(sets[0])
    elif len(sets) > 2 and all(len(ranks) == 1 for ranks in sets):
        text = f"{name}: all of {format_ranks(rank for ranks in sets for rank in ranks)} differ"
    elif len(sets) > _MAX_SETS:
        text = f"{name}: {len(sets)} different values on {format_ranks(rank for ranks in sets for rank in ranks)}"
    else:
        text = f"{name}: {' and '.join(map(format_ranks, sets))} differ"
    return f"{text}, {difference.found}" if difference.found else text


def _missing_text(difference: Difference) -> str:
    name, holders = difference.copy.name, sorted(rank for ranks in difference.sets for rank in ranks)
    if len(holders) <= len(difference.missing):
        return f"{name} is on {format_ranks(holders)} only"
    return f"{name}: {format_ranks(difference.missing)} {'do' if len(difference.missing) > 1 else 'does'} not have it"


def _shapes_text(difference: Difference) -> str:
    """Return ``float32 [4] on [0], [3] on [1-3]``; ranks with the same shape but other values are one item."""
    by_shape: dict[str, list[int]] = {}
    for shape, ranks in zip(difference.shapes, difference.sets):
        by_shape.setdefault(shape, []).extend(ranks)
    ordered = sorted(by_shape.items(), key=lambda each: min(each[1]))
    dtypes = {shape.partition(" ")[0] for shape, _ in ordered}
    texts = [
        f"{shape.partition(' ')[2] if number and len(dtypes) == 1 else shape} on {format_ranks(ranks)}"
        for number, (shape, ranks) in enumerate(ordered)
    ]
    return ", ".join(texts)


def differences_lines(differences: Sequence[Difference]) -> list[str]:
    """Describe differences, a line for each, up to a maximum."""
    lines = [difference_text(each) for each in differences[:_MAX_LISTED]]
    hidden = len(differences) - len(lines)
    return [*lines, f"and {hidden:,} more"] if hidden else lines
