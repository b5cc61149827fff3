"""Ranks along named axes, and the algebra that slices and reshapes them.

A ``Region`` is an extent with the ranks of a base mesh at its points: slicing a mesh gives a new region of
the same base, so a slice of a slice still refers to the right processes. Everything is row-major: the last axis
varies fastest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TypeAlias, TypeVar, cast

from monarch_kernel.base.mesh.extent import Extent, Point, as_index, as_size, list_axes, quote
from monarch_kernel.base.text import plural, were

__all__ = ["AxisIndex", "Region", "Shaped"]

AxisIndex: TypeAlias = int | slice
"""What selects along one axis: an int drops the axis, a slice keeps it."""

ShapedT = TypeVar("ShapedT", bound="Shaped")


@dataclass(frozen=True, slots=True)
class Region:
    """Some ranks of a base mesh, arranged along named axes; every mesh handle is a view through a region.

    Attributes:
        extent: the axes.
        ranks: ranks in the base mesh, by position in ``extent``, row-major; a ``range`` where they are evenly spaced.

    Raises:
        ValueError: the number of ranks is not that of the extent, or a rank is negative or occurs twice.
    """

    extent: Extent
    ranks: range | tuple[int, ...]
    _positions: dict[int, int] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranks = _compact(self.ranks)
        if len(ranks) != self.extent.nelements:
            raise ValueError(
                f"{self.extent} needs {plural(self.extent.nelements, 'rank')}, but {len(ranks)} {were(len(ranks))} given"
            )
        if min(ranks[0], ranks[-1]) < 0 if isinstance(ranks, range) else min(ranks) < 0:
            raise ValueError(f"ranks are counted from 0, but {min(ranks)} was given")
        if not isinstance(ranks, range) and len(set(ranks)) != len(ranks):
            raise ValueError(f"a rank can occur in a region only once: {ranks}")
        object.__setattr__(self, "ranks", ranks)

    @property
    def labels(self) -> Sequence[str]:
        """The names of the axes."""
        return self.extent.labels

    @classmethod
    def whole(cls, extent: Mapping[str, int]) -> Region:
        """Give the region of all ranks of a mesh with this extent."""
        extent = extent if isinstance(extent, Extent) else Extent(extent)
        return cls(extent, range(extent.nelements))

    def slice(self, /, **axes: AxisIndex) -> Region:
        """Select along axes by name: an int drops the axis, a slice keeps it.

        Bounds of a slice are those of Python: they may be left out, negative, or past the end.

        Raises:
            TypeError: an axis is unknown, or its value is neither an int nor a slice.
            IndexError: an int is negative or out of range, or a slice selects nothing.
            ValueError: the step of a slice is not at least 1.
        """
        self._check_axes("slice", axes)
        return self._select([_pick(self.extent, axis, axes.get(axis, slice(None))) for axis in self.extent])

    def index(self, key: AxisIndex | tuple[AxisIndex, ...]) -> Region:
        """Select along the first axes by position, as ``array[key]`` does in NumPy; negative ints count from the end.

        Raises:
            TypeError: an index is neither an int nor a slice.
            IndexError: there are more indices than axes, an int is out of range, or a slice selects nothing.
            ValueError: the step of a slice is not at least 1.
        """
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > len(self.extent):
            raise IndexError(f"too many indices: {len(keys)} given; {list_axes(self.extent)}")
        given = dict(zip(self.extent, keys, strict=False))
        picks = [_pick(self.extent, axis, given.get(axis, slice(None)), from_end=True) for axis in self.extent]
        return self._select(picks)

    def split(self, /, **axes: Sequence[str] | int) -> Region:
        """Split axes into several: ``split(gpus=("dp", "tp"), tp=2)``; one size of each split axis may be left out.

        Args:
            axes: for an axis to split, the names of the new axes, outermost first; for a new axis, its size.

        Raises:
            TypeError: an axis to split is unknown, or a size is given for an axis that no split makes.
            ValueError: sizes do not multiply to the size of the split axis, more than one is left out, or an axis is
                named twice.
        """
        splits: dict[str, tuple[str, ...]] = {}
        given: dict[str, int] = {}
        for axis, value in axes.items():
            if isinstance(value, str):
                raise TypeError(f"split({axis}={value!r}) needs a tuple of new axes, outermost first")
            if isinstance(value, Sequence):
                splits[axis] = tuple(value)
            else:
                given[axis] = as_size(axis, value)
        self._check_axes("split", splits)
        made = [name for names in splits.values() for name in names]
        for name in given:
            if name not in made:
                new = f"the new axes are {quote(made)}" if made else "no axis is split"
                raise TypeError(f"split() got a size for axis {name!r}, but {new}; {list_axes(self.extent)}")
        sizes: list[tuple[str, int]] = []
        for axis, size in self.extent.items():
            sizes += _split_axis(axis, size, splits[axis], given) if axis in splits else [(axis, size)]
        return Region(Extent(sizes), self.ranks)

    def flatten(self, name: str) -> Region:
        """Merge all axes into one; the order of the ranks stays.

        Raises:
            ValueError: the name is not an identifier.
        """
        return Region(Extent({name: len(self)}), self.ranks)

    def rename(self, /, **names: str) -> Region:
        """Give axes new names: ``rename(gpus="tp")``; two axes can swap theirs.

        Raises:
            TypeError: an axis is unknown.
            ValueError: two axes would have the same name, or a name is not an identifier.
        """
        self._check_axes("rename", names)
        return Region(Extent([(names.get(axis, axis), size) for axis, size in self.extent.items()]), self.ranks)

    def size(self, axis: str | None = None) -> int:
        """Give the size of one axis, or the number of ranks.

        Raises:
            KeyError: the axis is unknown.
        """
        if axis is None:
            return len(self)
        if axis not in self.extent:
            raise KeyError(f"unknown axis {axis!r}; {list_axes(self.extent)}")
        return self.extent[axis]

    def locate(self, base_rank: int) -> Point | None:
        """Give the point of this region where a rank of the base mesh is; None if it is not in the region."""
        if isinstance(self.ranks, range):
            return Point(self.ranks.index(base_rank), self.extent) if base_rank in self.ranks else None
        positions = self._positions
        if positions is None:  # many ranks are located in one region: one pass instead of a search for each
            positions = {rank: position for position, rank in enumerate(self.ranks)}
            object.__setattr__(self, "_positions", positions)
        position = positions.get(base_rank)
        return None if position is None else Point(position, self.extent)

    def pick(self, indices: Sequence[int]) -> Region:
        """Take ranks by their flat indices; they get one axis, ``ranks``.

        Raises:
            IndexError: there is no index, or no such rank.
            TypeError: an index is not an int.
        """
        if not indices:
            raise IndexError("an empty list selects no rank")
        flat = Extent({"ranks": len(self)})
        chosen = [as_index(flat, "ranks", each, from_end=True) for each in indices]
        return Region(Extent({"ranks": len(chosen)}), tuple(self.ranks[each] for each in chosen))

    def pack(self) -> tuple[object, ...]:
        """Give plain data for the wire: ``(labels, sizes, start, step)`` or ``(labels, sizes, ranks)``."""
        if isinstance(self.ranks, range):
            return (tuple(self.extent), tuple(self.extent.sizes), self.ranks.start, self.ranks.step)
        return (tuple(self.extent), tuple(self.extent.sizes), self.ranks)

    @classmethod
    def unpack(cls, packed: Sequence[object]) -> Region:
        """Make a region from the result of ``pack``; lists may replace its tuples.

        Raises:
            ValueError: it does not describe a region.
        """
        try:
            match packed:
                case [[*labels], [*sizes], int(start), int(step)]:
                    extent = _extent_of(labels, sizes)
                    return cls(extent, range(start, start + step * extent.nelements, step))
                case [[*labels], [*sizes], [*ranks]]:
                    return cls(_extent_of(labels, sizes), cast("tuple[int, ...]", tuple(ranks)))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"not a packed region ({error}): {packed!r}") from error
        raise ValueError(f"not a packed region: {packed!r}")

    def __len__(self) -> int:
        return self.extent.nelements

    def __reduce__(self) -> tuple[object, ...]:
        return (Region.unpack, (self.pack(),))

    def _check_axes(self, method: str, axes: Iterable[str]) -> None:
        """Raise TypeError for an axis that this region does not have."""
        unknown = [axis for axis in axes if axis not in self.extent]
        if unknown:
            error = UnknownAxisError if method in ("rename", "split") else TypeError
            raise error(f"{method}() got an unknown axis {quote(unknown)}; {list_axes(self.extent)}")

    def _select(self, picks: Sequence[int | range]) -> Region:
        """Take one int or range of positions for each axis."""
        positions: Sequence[int] = (0,)
        for size, pick in zip(self.extent.sizes, picks, strict=True):
            chosen = pick if isinstance(pick, range) else (pick,)
            positions = [position * size + i for position in positions for i in chosen]
        kept = [(axis, len(pick)) for axis, pick in zip(self.extent, picks, strict=True) if isinstance(pick, range)]
        return Region(Extent(kept), tuple(self.ranks[position] for position in positions))


class Shaped(ABC):
    """Base of all meshes (of hosts, processes, actors, values): a shape, and views through slices of it.

    A subclass sets ``_region`` and defines ``_with_region``, which makes a view of the same mesh through another region.
    """

    __slots__ = ()

    _region: Region

    @abstractmethod
    def _with_region(self: ShapedT, region: Region) -> ShapedT:
        """Give a view of the same mesh through another region of the same base."""

    @property
    def extent(self) -> Extent:
        """The axes and their sizes, in order."""
        return self._region.extent

    @property
    def sizes(self) -> dict[str, int]:
        """The axes and their sizes as a dict."""
        return dict(self._region.extent)

    def size(self, axis: str | Sequence[str] | None = None, *, dim: str | Sequence[str] | None = None) -> int:
        """Give the size of one axis, the product of several, or the number of elements; see ``Region.size``.

        Args:
            axis: the name of an axis, or several names.
            dim: the same, under its name in PyTorch Monarch.

        Raises:
            KeyError: an axis is unknown.
            TypeError: both are given.
        """
        if axis is not None and dim is not None:
            raise TypeError("size() takes axis or dim, which mean the same, not both")
        axis = dim if axis is None else axis
        if axis is None or isinstance(axis, str):
            return self._region.size(axis)
        return math.prod(self._region.size(each) for each in axis)

    def slice(self: ShapedT, /, **axes: AxisIndex) -> ShapedT:
        """Select along axes by name: an int drops the axis, a slice keeps it; see ``Region.slice``."""
        return self._with_region(self._region.slice(**axes))

    def split(self: ShapedT, /, **axes: Sequence[str] | int) -> ShapedT:
        """Split axes into several, ``split(gpus=("dp", "tp"), tp=2)``; see ``Region.split``."""
        return self._with_region(self._region.split(**axes))

    def flatten(self: ShapedT, name: str) -> ShapedT:
        """Merge all axes into one."""
        return self._with_region(self._region.flatten(name))

    def rename(self: ShapedT, /, **names: str) -> ShapedT:
        """Give axes new names, ``rename(gpus="tp")``; see ``Region.rename``."""
        return self._with_region(self._region.rename(**names))

    def __len__(self) -> int:
        return self._region.extent.nelements


Extent.region = property(Region.whole, doc="The region of all ranks of a mesh with this extent.")


def _extent_of(labels: Sequence[object], sizes: Sequence[object]) -> Extent:
    """Make an extent from unchecked data, which ``Extent`` checks."""
    return Extent(zip(cast("Sequence[str]", labels), cast("Sequence[int]", sizes), strict=True))


def _compact(ranks: Sequence[int]) -> range | tuple[int, ...]:
    """Give the ranks as a range if they are evenly spaced, else as a tuple of plain ints."""
    if isinstance(ranks, range):
        return ranks if len(ranks) > 1 else range(ranks.start, ranks.start + len(ranks))
    ranks = tuple(map(index, ranks))
    if not ranks:
        return range(0)
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step == 0:
        return ranks
    even = range(ranks[0], ranks[0] + step * len(ranks), step)
    return even if all(a == b for a, b in zip(ranks, even, strict=True)) else ranks


def _split_axis(axis: str, size: int, names: tuple[str, ...], given: Mapping[str, int]) -> list[tuple[str, int]]:
    """Find the sizes of the axes that one axis is split into."""
    known = {name: given[name] for name in names if name in given}
    left_out = [name for name in names if name not in given]
    what = f"axis {axis!r} of size {size} cannot be split into ({', '.join(map(str, names))})"
    shown = ", ".join(f"{name}={n}" for name, n in known.items())
    product = math.prod(known.values())
    if not names:
        raise ValueError(f"{what}: name at least one new axis")
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: a new axis is named twice")
    if len(left_out) > 1:
        raise ValueError(f"{what}: only one size can be left out, but {quote(left_out)} have none")
    if left_out and size % product:
        raise ValueError(f"{what}: {size} is not divisible by {product} ({shown})")
    if not left_out and size != product:
        raise ValueError(f"{what}: the sizes multiply to {product} ({shown})")
    return [(name, known.get(name, size // product)) for name in names]


class UnknownAxisError(TypeError, ValueError):
    """An axis to rename or split is unknown: a wrong argument of this package, and a wrong value in Monarch."""


class NothingSelectedError(IndexError, ValueError):
    """A slice is outside of its axis: a wrong index of this package, and a wrong value in Monarch."""


def _pick(extent: Extent, axis: str, value: AxisIndex, *, from_end: bool = False) -> int | range:
    """Turn the index of an axis into a checked position, or a checked range of positions."""
    if not isinstance(value, slice):
        return as_index(extent, axis, value, from_end=from_end)
    size = extent[axis]
    text = ":".join("" if part is None else str(part) for part in (value.start, value.stop))
    text += "" if value.step is None else f":{value.step}"
    try:
        step = 1 if value.step is None else index(value.step)
        if step < 1:
            raise ValueError(f"axis {axis!r} has size {size}: the step of slice {text} must be at least 1")
        chosen = range(*value.indices(size))
    except TypeError as error:
        raise TypeError(f"axis {axis!r} has size {size}: the bounds of slice {text} must be ints") from error
    if not chosen:
        raise NothingSelectedError(f"axis {axis!r} has size {size}: slice {text} selects nothing")
    return chosen
