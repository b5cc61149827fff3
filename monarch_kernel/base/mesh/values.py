"""One value for each rank of a mesh: what a call on a mesh returns."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from monarch_kernel.base.mesh.extent import NoSuchRankError, Point
from monarch_kernel.base.mesh.shape import Region, Shaped
from monarch_kernel.base.text import format_ranks, plural, were

__all__ = ["ValueMesh"]

T = TypeVar("T")
ValueMeshT = TypeVar("ValueMeshT", bound="ValueMesh[object]")

_SHOWN_CHARS = 200
"""How many characters of one value a repr shows."""

_SHOWN_GROUPS = 20
"""How many distinct values a repr shows."""

_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})
"""Types whose equal values are interchangeable; exact types, since a subclass may carry more than its value."""


class ValueMesh(Shaped, Generic[T]):
    """One value for each point of an extent.

    Slices and reshapes are views: they share the values. Iterates as pairs ``(Point, value)``, so ``dict(mesh)`` works.
    Two meshes are equal if their extents and their values are.

    Args:
        shape: a region or an extent; only the extent of a region matters, since ranks count within this mesh.
        values: one for each rank, by rank.

    Raises:
        ValueError: the number of values is not that of the shape.
    """

    __slots__ = ("_region", "_store")

    def __init__(self, shape: Region | Mapping[str, int], values: Iterable[T]) -> None:
        # Made once for each call, so values are not compared here; equal ones are merged when the mesh is pickled.
        region = _region_of(shape)
        store = tuple(values)
        if len(store) != len(region):
            raise ValueError(
                f"{region.extent} needs {plural(len(region), 'value')}, but {len(store)} {were(len(store))} given"
            )
        # The ranks of the region index the store.
        self._region = region if region.ranks == range(len(store)) else Region.whole(region.extent)
        self._store = store

    def _with_region(self: ValueMeshT, region: Region) -> ValueMeshT:
        view = type(self).__new__(type(self))
        view._region = region
        view._store = self._store
        return view

    def item(self, /, **point: int) -> T:
        """Give the value at one point; every axis is required.

        Raises:
            KeyError: an axis is missing or unknown.
            IndexError: a coordinate is out of range.
        """
        return self._store[self._region.ranks[self._region.extent.rank_of(point)]]

    @classmethod
    def from_indexed(cls, shape: Region | Mapping[str, int], pairs: Iterable[tuple[int, T]]) -> ValueMesh[T]:
        """Make a mesh of pairs of flat rank and value, in any order.

        Raises:
            ValueError: a rank is missing, or is none of the shape.
        """
        region = _region_of(shape)
        by_rank = dict(pairs)
        if by_rank.keys() != set(range(len(region))):
            raise ValueError(f"{region.extent} needs one value for each rank from 0 to {len(region) - 1}")
        return cls(region, [by_rank[rank] for rank in range(len(region))])

    def get(self, rank: int) -> T:
        """Give the value of a flat rank.

        Raises:
            IndexError: there is no such rank.
        """
        if not 0 <= rank < len(self):
            raise NoSuchRankError(f"rank {rank} is out of range: {self.extent} has ranks 0 to {len(self) - 1}")
        return self._store[self._region.ranks[rank]]

    def values(self) -> tuple[T, ...]:
        """Give the values by rank."""
        ranks = self._region.ranks
        return self._store if len(ranks) == len(self._store) else tuple(self._store[rank] for rank in ranks)

    def items(self) -> tuple[tuple[Point, T], ...]:
        """Give the pairs of point and value by rank."""
        return tuple(self)

    def __iter__(self) -> Iterator[tuple[Point, T]]:
        extent = self._region.extent
        for rank, value in enumerate(self.values()):
            yield Point(rank, extent), value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueMesh):
            return NotImplemented
        return self.extent == other.extent and self.values() == other.values()

    def __repr__(self) -> str:
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for rank, value in enumerate(self.values()):
            if id(value) not in texts:
                texts[id(value)] = _text_of(value)
            groups.setdefault(texts[id(value)], []).append(rank)
        lines = [f"{format_ranks(ranks)} {_shorten(text)}" for text, ranks in list(groups.items())[:_SHOWN_GROUPS]]
        head = f"ValueMesh {self.extent}:"
        if len(groups) == 1:
            return f"{head} {lines[0]}"
        if len(groups) > _SHOWN_GROUPS:
            lines.append(f"... {plural(len(groups) - _SHOWN_GROUPS, 'more distinct value')}")
        return "\n  ".join([head, *lines])

    def __reduce__(self) -> tuple[object, ...]:
        distinct, places = _fold(self.values())
        return (_unfold, (type(self), self.extent, distinct, places))


def _text_of(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # one value that can't be shown must not hide the others
        return f"<{type(value).__name__} whose repr failed: {type(error).__name__}: {error}>"


def _fold(values: tuple[T, ...]) -> tuple[tuple[T, ...], tuple[int, ...]]:
    """Give the distinct values, and for each value its index among them."""
    distinct: dict[object, tuple[int, T]] = {}
    places = tuple(distinct.setdefault(_identity(value), (len(distinct), value))[0] for value in values)
    return tuple(value for _, value in distinct.values()), places


def _unfold(
    cls: type[ValueMesh[T]], extent: Mapping[str, int], distinct: tuple[T, ...], places: tuple[int, ...]
) -> ValueMesh[T]:
    """Make a mesh from the result of ``_fold``."""
    return cls(extent, (distinct[place] for place in places))


def _region_of(shape: Region | Mapping[str, int]) -> Region:
    """Give the region of a shape; other classes, such as those of an integration, have an extent."""
    return shape if isinstance(shape, Region) else Region.whole(getattr(shape, "extent", shape))


def _identity(value: object) -> object:
    """Give a key that is equal for two values only if one can replace the other."""
    if type(value) not in _SCALARS:
        return id(value)
    if isinstance(value, float):
        return (float, struct.pack("=d", value))  # by its bits: 0.0 equals -0.0, and nan does not equal itself
    return (type(value), value)  # with the type: True equals 1


def _shorten(text: str) -> str:
    """Give a repr in one line of bounded length."""
    text = " ".join(filter(None, map(str.strip, text.split("\n")))) if "\n" in text else text
    if len(text) <= _SHOWN_CHARS:
        return text
    half = (_SHOWN_CHARS - len(" ... ")) // 2
    return f"{text[:half]} ... {text[-half:]}"
