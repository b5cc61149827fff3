"""Monarch's shapes: strided slices of flat ranks, and names for their axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from monarch_kernel.base.mesh import Extent, Region
from monarch_kernel.base.mesh.monarch_bytes import Reader
from monarch_kernel.base.text import plural, were

__all__ = ["NDSlice", "Shape"]


class NDSlice(Sequence[int]):
    """Flat ranks at the points of a strided box; iterates in row-major order.

    Args:
        offset: the first rank.
        sizes: the sizes of the axes.
        strides: the distance between neighbours along each axis.

    Raises:
        ValueError: there are not as many strides as sizes, or a size is not positive.
    """

    def __init__(self, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        if len(sizes) != len(strides):
            raise ValueError(f"{len(sizes)} sizes were given with {len(strides)} strides")
        if any(size < 1 for size in sizes) or offset < 0 or any(stride < 0 for stride in strides):
            raise ValueError("sizes must be at least 1, the offset and strides at least 0")
        self.offset = offset
        self.sizes = list(sizes)
        self.strides = list(strides)

    @classmethod
    def new_row_major(cls, sizes: Sequence[int]) -> NDSlice:
        """Return the slice of all ranks of a box."""
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        return cls(offset=0, sizes=sizes, strides=strides)

    @classmethod
    def from_list(cls, ranks: Sequence[int]) -> list[NDSlice]:
        """Return slices of one axis that hold these ranks in ascending order; each is as long as its spacing lasts."""
        rest, found = sorted(ranks), []
        while rest:
            step = rest[1] - rest[0] if len(rest) > 1 else 1
            count = 1
            while step and count < len(rest) and rest[count] == rest[0] + step * count:
                count += 1
            found.append(cls(offset=rest[0], sizes=[count], strides=[step if count > 1 else 1]))
            rest = rest[count:]
        return found

    def get(self, index: int) -> int:
        """Return the rank at a position, counted from 0.

        Raises:
            ValueError: there is no such position.
            OverflowError: the position is negative.
        """
        if index < 0:
            raise OverflowError(f"positions are counted from 0, but {index} was given")
        if index >= len(self):
            raise ValueError(f"position {index} is out of range for {len(self)}")
        rank: int = self[index]
        return rank

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.sizes)

    def __len__(self) -> int:
        return math.prod(self.sizes)

    def __iter__(self) -> Iterator[int]:
        for at in itertools.product(*map(range, self.sizes)):
            yield self.nditem(at)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        if index < 0:
            raise TypeError(f"positions are counted from 0, but {index} was given")
        position = range(len(self))[index]
        at = []
        for size in reversed(self.sizes):
            at.append(position % size)
            position //= size
        return self.nditem(at[::-1])

    def nditem(self, coordinates: Sequence[int]) -> int:
        """Return the rank at a point.

        Raises:
            IndexError: there is no such point.
        """
        if len(coordinates) != len(self.sizes) or any(not 0 <= at < n for at, n in zip(coordinates, self.sizes)):
            raise IndexError(f"{list(coordinates)} is no point of sizes {self.sizes}")
        return self.offset + sum(at * stride for at, stride in zip(coordinates, self.strides))

    def coordinates(self, value: int) -> list[int]:
        """Return the point of a rank.

        Raises:
            ValueError: the slice does not have this rank.
        """
        for at in itertools.product(*map(range, self.sizes)):
            if self.nditem(at) == value:
                return list(at)
        raise ValueError(f"rank {value} is not in {self!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NDSlice):
            return NotImplemented
        return (self.offset, self.sizes, self.strides) == (other.offset, other.sizes, other.strides)

    def __hash__(self) -> int:
        return hash((self.offset, tuple(self.sizes), tuple(self.strides)))

    def __repr__(self) -> str:
        return f"NDSlice(offset={self.offset}, sizes={self.sizes}, strides={self.strides})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _slice, (self.offset, self.sizes, self.strides)


def _slice(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> NDSlice:
    return NDSlice(offset=offset, sizes=sizes, strides=strides)


class Shape:
    """A slice of ranks whose axes have names.

    Raises:
        ValueError: there are not as many names as axes.
    """

    def __init__(self, labels: Sequence[str], slice: NDSlice) -> None:
        if len(labels) != slice.ndim:
            raise ValueError(
                f"{plural(len(labels), 'name')} {were(len(labels))} given for {plural(slice.ndim, 'axis', 'axes')}"
            )
        self.labels = list(labels)
        self.ndslice = slice

    @classmethod
    def from_bytes(cls, bytes: bytes) -> Shape:
        """Read a shape of PyTorch Monarch from its bytes, which its ``__reduce__`` gives.

        Raises:
            ValueError: they are not those of a shape.
        """
        reader = Reader(bytes)
        return cls(reader.texts(), NDSlice(offset=reader.number(), sizes=reader.numbers(), strides=reader.numbers()))

    @classmethod
    def unity(cls) -> Shape:
        """Return the shape of one rank without axes."""
        return cls([], NDSlice(offset=0, sizes=[], strides=[]))

    @property
    def extent(self) -> Extent:
        """The axes and their sizes."""
        return Extent(self.labels, self.ndslice.sizes)

    @property
    def region(self) -> Region:
        """The ranks with their axes."""
        return Region(self.extent, tuple(self.ndslice))

    def ranks(self) -> list[int]:
        """Return the flat ranks."""
        return list(self.ndslice)

    def index(self, **point: int) -> Shape:
        """Return the ranks at a place of each named axis; these axes are dropped. The errors are those of `at`."""
        shape = self
        for label, index in point.items():
            shape = shape.at(label, index)
        return shape

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the point of a rank, by the names of the axes."""
        return dict(zip(self.labels, self.ndslice.coordinates(rank)))

    def at(self, label: str, index: int) -> Shape:
        """Return the ranks at one place of an axis, which is dropped.

        Raises:
            ValueError: there is no such axis, or no such place.
            OverflowError: the place is negative.
        """
        axis = self._axis(label)
        if index < 0:
            raise OverflowError(f"places are counted from 0, not {index}")
        if index >= (size := self.ndslice.sizes[axis]):
            raise ValueError(f"place {index} is out of range for axis {label!r} of size {size}")
        at = index
        rest = [i for i in range(self.ndslice.ndim) if i != axis]
        return Shape(
            [self.labels[i] for i in rest],
            NDSlice(
                offset=self.ndslice.offset + at * self.ndslice.strides[axis],
                sizes=[self.ndslice.sizes[i] for i in rest],
                strides=[self.ndslice.strides[i] for i in rest],
            ),
        )

    def select(self, label: str, slice: slice) -> Shape:
        """Return the ranks at some places of an axis.

        Raises:
            ValueError: there is no such axis, or no place is chosen.
        """
        axis = self._axis(label)
        places = range(self.ndslice.sizes[axis])[slice]
        if not places:
            raise ValueError(f"no place of axis {label!r} is chosen by {slice}")
        sizes, strides = list(self.ndslice.sizes), list(self.ndslice.strides)
        offset = self.ndslice.offset + places.start * strides[axis]
        sizes[axis], strides[axis] = len(places), strides[axis] * places.step
        return Shape(self.labels, NDSlice(offset=offset, sizes=sizes, strides=strides))

    def _axis(self, label: str) -> int:
        if label not in self.labels:
            raise ValueError(f"unknown axis {label!r}; the axes are {', '.join(self.labels) or 'none'}")
        return self.labels.index(label)

    def __len__(self) -> int:
        return len(self.ndslice)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shape):
            return NotImplemented
        return (self.labels, self.ndslice) == (other.labels, other.ndslice)

    def __hash__(self) -> int:
        return hash((tuple(self.labels), self.ndslice))

    def __repr__(self) -> str:
        return f"Shape({self.labels}, {self.ndslice!r})"

    def __str__(self) -> str:
        return "{" + ",".join(f"{label}={size}" for label, size in zip(self.labels, self.ndslice.sizes)) + "}"
