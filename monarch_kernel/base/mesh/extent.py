"""Named axes with their sizes, and points along them.

An ``Extent`` names the axes of a mesh and their sizes. A ``Point`` is one position in it. Everything is row-major: the
last axis varies fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import TypeVar, cast

from monarch_kernel.base.mesh.monarch_bytes import Reader
from monarch_kernel.base.text import plural, were

__all__ = ["Extent", "NoSuchAxisError", "NoSuchRankError", "Point", "as_index", "as_size", "list_axes", "quote"]


T = TypeVar("T")


class NoSuchAxisError(KeyError, ValueError):
    """An extent or a point has no such axis: a missing key of this package, and a wrong value in Monarch."""


class NoSuchRankError(IndexError, ValueError):
    """An extent has no such rank: a wrong index of this package, and a wrong value in Monarch."""


class Listed(list[T]):
    """A list that is also equal to a tuple of the same items, and can be hashed as that."""

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type[list[T]], tuple[tuple[T, ...]]]:
        return (list, (tuple(self),))


class Extent(Mapping[str, int]):
    """The axes of a mesh and their sizes, in order; immutable and hashable.

    Equal to another extent with the same axes in the same order, and to a dict with the same items. The empty extent
    has one element.

    Args:
        labels: axis -> size, or pairs of axis and size; or the names of the axes, if ``sizes`` has their sizes.
        sizes: the sizes of these axes.

    Raises:
        ValueError: an axis is not an identifier or is named twice, or a size is not an int of at least 1.
    """

    __slots__ = ("_hash", "_sizes", "_strides", "nelements")

    nelements: int
    """The number of points."""

    region: property
    """The `Region` of all ranks of a mesh with this extent; `shape` sets it, since it can't be imported here."""

    def __init__(
        self,
        labels: Mapping[str, int] | Iterable[tuple[str, int]] | Sequence[str] = (),
        sizes: Sequence[int] | None = None,
    ) -> None:
        if sizes is not None:
            names = cast("Sequence[str]", labels)
            if len(names) != len(sizes):
                raise ValueError(
                    f"{plural(len(names), 'axis', 'axes')} {were(len(names))} given with {plural(len(sizes), 'size')}"
                )
            labels = list(zip(names, sizes))
        pairs = list(labels.items() if isinstance(labels, Mapping) else cast("Iterable[tuple[str, int]]", labels))
        self._sizes: dict[str, int] = {}
        for axis, size in pairs:
            if not isinstance(axis, str) or not axis.isidentifier():
                raise ValueError(f"axis name {axis!r} is not an identifier")
            if axis in self._sizes:
                raise ValueError(f"axis {axis!r} is named twice in ({', '.join(str(name) for name, _ in pairs)})")
            self._sizes[axis] = as_size(axis, size)
        self._strides: dict[str, int] = {}
        nelements = 1
        for axis, size in reversed(self._sizes.items()):
            self._strides[axis] = nelements
            nelements *= size
        self.nelements = nelements
        self._hash = hash(tuple(self._sizes.items()))

    @property
    def labels(self) -> Listed[str]:
        """Names of the axes, in order."""
        return Listed(self._sizes)

    @property
    def sizes(self) -> Listed[int]:
        """Sizes of the axes, in order."""
        return Listed(self._sizes.values())

    @classmethod
    def from_bytes(cls, bytes: bytes) -> Extent:
        """Read an extent of PyTorch Monarch from its bytes, which its ``__reduce__`` gives.

        Raises:
            ValueError: they are not those of an extent.
        """
        reader = Reader(bytes)
        return cls(reader.texts(), reader.numbers())

    def point(self, rank: int) -> Point:
        """Give the point with this flat rank.

        Raises:
            IndexError: there is no such rank.
        """
        return Point(rank, self)

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """Give the flat rank of the point with these coordinates, one for each axis.

        Raises:
            KeyError: an axis is missing or unknown.
            IndexError: a coordinate is out of range.
        """
        unknown = [axis for axis in coordinates if axis not in self._sizes]
        if unknown:
            raise KeyError(f"unknown axis {quote(unknown)}; {list_axes(self)}")
        missing = [axis for axis in self._sizes if axis not in coordinates]
        if missing:
            raise KeyError(f"axis {quote(missing)} is missing; {list_axes(self)}")
        return sum(as_index(self, axis, coordinates[axis]) * stride for axis, stride in self._strides.items())

    def __getitem__(self, axis: str) -> int:
        try:
            return self._sizes[axis]
        except KeyError:
            raise NoSuchAxisError(f"unknown axis {axis!r}; {list_axes(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            # The order of the axes decides which rank is at which point, so it counts.
            return self is other or tuple(self._sizes.items()) == tuple(other._sizes.items())
        return self._sizes == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._sizes)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{axis}: {size}" for axis, size in self._sizes.items()) + "}"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce__(self) -> tuple[type[Extent], tuple[dict[str, int]]]:
        # The hash depends on the process (hashes of strings are randomised), so it must not be pickled.
        return (Extent, (self._sizes,))


class Point(Mapping[str, int]):
    """One point in an extent, a mapping axis -> coordinate; immutable and hashable.

    Equal to another point of an equal extent with the same rank, and to a dict with the same coordinates.

    Args:
        rank: flat rank, row-major.
        extent: the extent it is a point of.

    Raises:
        IndexError: the extent has no such rank.
    """

    # Made once for each rank of each call: coordinates are computed on demand.
    __slots__ = ("_extent", "_rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        rank = index(rank)
        if not 0 <= rank < extent.nelements:
            raise NoSuchRankError(f"rank {rank} is out of range: {extent} has ranks 0 to {extent.nelements - 1}")
        self._rank = rank
        self._extent = extent

    @classmethod
    def from_bytes(cls, bytes: bytes) -> Point:
        """Read a point of PyTorch Monarch from its bytes, which its ``__reduce__`` gives.

        Raises:
            ValueError: they are not those of a point.
        """
        reader = Reader(bytes)
        rank = reader.number()
        return cls(rank, Extent(reader.texts(), reader.numbers()))

    @property
    def rank(self) -> int:
        """Flat rank, row-major."""
        return self._rank

    @property
    def extent(self) -> Extent:
        """The extent it is a point of."""
        return self._extent

    def size(self, axis: str) -> int:
        """Give the size of one axis of the extent.

        Raises:
            KeyError: the axis is unknown.
        """
        return self._extent[axis]

    def __getitem__(self, axis: str) -> int:
        size = self._extent[axis]
        return self._rank // self._extent._strides[axis] % size

    def __iter__(self) -> Iterator[str]:
        return iter(self._extent._sizes)

    def __len__(self) -> int:
        return len(self._extent._sizes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return self._rank == other._rank and self._extent == other._extent
        return dict(self) == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._rank, self._extent._hash))

    def __str__(self) -> str:
        return "{" + ", ".join(f"{axis!r}: {self[axis]}/{size}" for axis, size in self._extent.items()) + "}"

    def __repr__(self) -> str:
        return f"<Point {self._rank} {self}>"

    def __reduce__(self) -> tuple[type[Point], tuple[int, Extent]]:
        return (Point, (self._rank, self._extent))


def as_index(extent: Extent, axis: str, value: int, *, from_end: bool = False) -> int:
    """Check a coordinate along an axis; ``from_end`` lets negative ones count from the end."""
    size = extent[axis]
    try:
        if isinstance(value, bool):  # an int only by inheritance: here a mistake, or meant as a mask
            raise TypeError("a bool")
        position = index(value)
    except TypeError as error:
        raise TypeError(f"axis {axis!r} has size {size}: {value!r} is not an int or a slice") from error
    first = -size if from_end else 0
    if not first <= position < size:
        raise IndexError(f"axis {axis!r} has size {size}: index {position} is out of range {first} to {size - 1}")
    return position % size


def as_size(axis: str, size: int) -> int:
    """Check the size of an axis."""
    try:
        number = 0 if isinstance(size, bool) else index(size)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"size of axis {axis!r} must be an int of at least 1, not {size!r}")
    return number


def list_axes(extent: Extent) -> str:
    """List the axes as text."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in extent.items())
    return f"the axes are {sizes}" if sizes else "there are no axes"


def quote(axes: Iterable[str]) -> str:
    """List names in quotes."""
    return ", ".join(repr(axis) for axis in axes)
