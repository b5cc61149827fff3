"""The mesh algebra against a model: an array of ranks with named axes, sliced and reshaped by NumPy."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.base.mesh import Extent, Region, Shaped

AXES = ["hosts", "gpus", "dp", "tp", "pp", "rack"]

extents = st.lists(st.sampled_from(AXES), unique=True, max_size=4).flatmap(
    lambda names: st.tuples(*[st.integers(1, 5) for _ in names]).map(
        lambda sizes: Extent(dict(zip(names, sizes, strict=True)))
    )
)


class Model:
    """A model of a region as a NumPy array."""

    def __init__(self, names: tuple[str, ...], ranks: np.ndarray) -> None:
        self.names = names
        self.ranks = ranks

    @classmethod
    def whole(cls, extent: Extent) -> Model:
        return cls(extent.labels, np.arange(math.prod(extent.sizes)).reshape(extent.sizes))

    def take(self, key: tuple[int | slice, ...]) -> Model:
        """Index the first axes by position."""
        full = key + (slice(None),) * (len(self.names) - len(key))
        kept = tuple(name for name, pick in zip(self.names, full, strict=True) if isinstance(pick, slice))
        return Model(kept, np.asarray(self.ranks[full]))

    def check(self, region: Region) -> None:
        """Compare everything that a region reports with this model."""
        flat = [int(rank) for rank in self.ranks.ravel()]
        assert region.extent.labels == self.names
        assert region.extent.sizes == self.ranks.shape
        assert list(region.ranks) == flat
        assert len(region) == region.size() == len(flat)
        even = len({b - a for a, b in itertools.pairwise(flat)}) <= 1
        assert isinstance(region.ranks, range if even else tuple)
        for rank in range(max(flat) + 2):
            point = region.locate(rank)
            assert (point is None) == (rank not in flat)
            if point is not None:
                assert int(self.ranks[tuple(point.values())]) == rank
                assert flat[point.rank] == rank
        for same in (
            Region.unpack(region.pack()),
            Region(region.extent, tuple(flat)),
            pickle.loads(pickle.dumps(region)),
        ):
            assert same == region
            assert hash(same) == hash(region)


@st.composite
def slices(draw: st.DrawFn, size: int) -> slice:
    """Slices along an axis of this size that select something."""
    bound = st.none() | st.integers(-size - 1, size + 1)
    made = st.builds(slice, bound, bound, st.none() | st.integers(1, size + 1))
    return draw(made.filter(lambda one: len(range(*one.indices(size))) > 0))


def indices(size: int) -> st.SearchStrategy[int | slice]:
    """All ways to write a position along an axis of this size."""
    return st.integers(-size, -1) | st.integers(0, size - 1) | slices(size)


@st.composite
def steps(draw: st.DrawFn, region: Region, model: Model) -> tuple[Region, Model]:
    """One operation, applied to the region and to the model."""
    extent = region.extent
    unused = [name for name in ["a", "b", "c", "d", *AXES] if name not in extent]
    operation = draw(st.sampled_from(["slice", "index", "split", "flatten", "rename"]))
    if operation == "slice":
        chosen = [axis for axis in draw(st.permutations(extent.labels)) if draw(st.booleans())]
        picks = {axis: draw(st.integers(0, extent[axis] - 1) | slices(extent[axis])) for axis in chosen}
        return region.slice(**picks), model.take(tuple(picks.get(axis, slice(None)) for axis in extent))
    if operation == "index":
        count = len(extent) - draw(st.integers(0, len(extent)))
        key = tuple(draw(indices(size)) for size in extent.sizes[:count])
        return region.index(key[0] if count == 1 and draw(st.booleans()) else key), model.take(key)
    if operation == "split" and extent:
        axis = draw(st.sampled_from(extent.labels))
        outer = draw(st.sampled_from([n for n in range(1, extent[axis] + 1) if extent[axis] % n == 0]))
        inner = extent[axis] // outer
        first, second = draw(st.permutations([*unused, axis]))[:2]
        sizes = {first: outer, second: inner}
        sizes.pop(axis, None)  # a new axis with the old name cannot be given a size, nor can one be left out twice
        if len(sizes) == 2 and draw(st.booleans()):
            del sizes[draw(st.sampled_from([first, second]))]
        at = extent.labels.index(axis)
        names = (*model.names[:at], first, second, *model.names[at + 1 :])
        shape = (*extent.sizes[:at], outer, inner, *extent.sizes[at + 1 :])
        return region.split(**{axis: (first, second)}, **sizes), Model(names, model.ranks.reshape(shape))
    if operation == "flatten":
        name = draw(st.sampled_from(AXES))
        return region.flatten(name), Model((name,), model.ranks.ravel())
    order = draw(st.permutations([*extent.labels, *unused]))
    renames = dict(zip(extent.labels, order, strict=False))
    return region.rename(**renames), Model(tuple(renames[axis] for axis in extent), model.ranks)


@given(extents, st.data())
def test_an_index_selects_what_numpy_selects(extent: Extent, data: st.DataObject) -> None:
    key = tuple(data.draw(indices(size)) for size in extent.sizes)
    Model.whole(extent).take(key).check(Region.whole(extent).index(key))


@given(extents, st.data())
def test_chains_of_operations_agree_with_numpy(extent: Extent, data: st.DataObject) -> None:
    region, model = Region.whole(extent), Model.whole(extent)
    model.check(region)
    for _ in range(data.draw(st.integers(1, 5), label="length")):
        region, model = data.draw(steps(region, model))
        model.check(region)


def test_the_region_without_axes_has_one_rank() -> None:
    assert Region.whole({}).flatten("rank") == Region.whole({"rank": 1})


def test_regions_are_equal_if_they_have_the_same_ranks_at_the_same_points() -> None:
    extent = Extent({"hosts": 2, "gpus": 4})
    assert Region.whole(extent) != Region.whole(extent).slice(hosts=slice(0, 1))
    assert Region.whole({"gpus": 1}) == Region(Extent({"gpus": 1}), range(0, 7, 7))


def test_a_region_is_immutable_and_shows_its_ranks() -> None:
    region = Region.whole({"gpus": 4})
    with pytest.raises(AttributeError):
        region.ranks = range(3)  # type: ignore[misc]
    assert repr(region) == "Region(extent={'gpus': 4}, ranks=range(0, 4))"


def test_numpy_ints_become_plain_ints() -> None:
    region = Region(Extent({"gpus": 4}), [np.int64(1), np.int64(2), np.int64(4), np.int64(7)])  # type: ignore[arg-type]
    assert [type(rank) for rank in region.slice(gpus=slice(np.int64(0), 3)).ranks] == [int] * 3
    assert json.dumps(region.pack()) == '[["gpus"], [4], [1, 2, 4, 7]]'


def test_flattening_a_block_keeps_the_ranks_of_the_base() -> None:
    block = Region.whole({"hosts": 3, "gpus": 4}).slice(hosts=slice(0, 2), gpus=slice(1, 3)).flatten("rank")
    assert block.ranks == (1, 2, 5, 6)
    assert block.slice(rank=slice(1, None, 2)).ranks == range(2, 10, 4)
    assert block.locate(5) == {"rank": 2}
    assert block.locate(3) is None


def test_axes_can_swap_names_and_keep_one_in_a_split() -> None:
    region = Region.whole({"hosts": 2, "gpus": 4})
    assert region.rename(hosts="gpus", gpus="hosts").extent == Extent({"gpus": 2, "hosts": 4})
    assert region.split(gpus=("node", "gpus"), node=2).extent == Extent({"hosts": 2, "node": 2, "gpus": 2})
    both = region.split(hosts=("a", "b"), gpus=("c", "d"), a=2, c=2)
    assert both.extent == Extent({"a": 2, "b": 1, "c": 2, "d": 2})


def test_an_axis_may_be_called_self() -> None:
    region = Region.whole({"self": 2})
    assert region.slice(self=1).ranks == range(1, 2)
    assert region.split(self=("a", "b"), a=2).rename(a="self").extent == {"self": 2, "b": 1}
    assert Handle(region).slice(self=1).extent == {}


def message(text: str) -> str:
    return "^" + re.escape(text) + "$"


MESH = Region.whole({"hosts": 2, "gpus": 4})
HAS = "the axes are hosts=2, gpus=4"


@pytest.mark.parametrize(
    ("axes", "error", "text"),
    [
        ({"gpu": 0}, TypeError, f"slice() got an unknown axis 'gpu'; {HAS}"),
        ({"a": 0, "b": 0}, TypeError, f"slice() got an unknown axis 'a', 'b'; {HAS}"),
        ({"gpus": 4}, IndexError, "axis 'gpus' has size 4: index 4 is out of range 0 to 3"),
        ({"gpus": -1}, IndexError, "axis 'gpus' has size 4: index -1 is out of range 0 to 3"),
        ({"gpus": "0"}, TypeError, "axis 'gpus' has size 4: '0' is not an int or a slice"),
        ({"gpus": True}, TypeError, "axis 'gpus' has size 4: True is not an int or a slice"),
        ({"gpus": 1.0}, TypeError, "axis 'gpus' has size 4: 1.0 is not an int or a slice"),
        ({"gpus": slice(4, 8)}, IndexError, "axis 'gpus' has size 4: slice 4:8 selects nothing"),
        ({"gpus": slice(2, 2)}, IndexError, "axis 'gpus' has size 4: slice 2:2 selects nothing"),
        (
            {"gpus": slice(None, None, 0)},
            ValueError,
            "axis 'gpus' has size 4: the step of slice ::0 must be at least 1",
        ),
        ({"gpus": slice(3, 0, -1)}, ValueError, "axis 'gpus' has size 4: the step of slice 3:0:-1 must be at least 1"),
        ({"gpus": slice("a")}, TypeError, "axis 'gpus' has size 4: the bounds of slice :a must be ints"),
        ({"gpus": slice(0, 2, 0.5)}, TypeError, "axis 'gpus' has size 4: the bounds of slice 0:2:0.5 must be ints"),
    ],
)
def test_a_bad_slice_names_axis_value_and_size(axes: dict[str, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=message(text)):
        MESH.slice(**axes)


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        (2, IndexError, "axis 'hosts' has size 2: index 2 is out of range -2 to 1"),
        ((0, -5), IndexError, "axis 'gpus' has size 4: index -5 is out of range -4 to 3"),
        ((0, 0, 0), IndexError, f"too many indices: 3 given; {HAS}"),
        ((0, slice(4, None)), IndexError, "axis 'gpus' has size 4: slice 4: selects nothing"),
        (slice(None, None, -1), ValueError, "axis 'hosts' has size 2: the step of slice ::-1 must be at least 1"),
        (..., TypeError, "axis 'hosts' has size 2: Ellipsis is not an int or a slice"),
        (None, TypeError, "axis 'hosts' has size 2: None is not an int or a slice"),
        ("hosts", TypeError, "axis 'hosts' has size 2: 'hosts' is not an int or a slice"),
    ],
)
def test_a_bad_index_names_axis_value_and_size(key: int, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=message(text)):
        MESH.index(key)


def test_a_negative_index_counts_from_the_end_of_its_axis() -> None:
    assert MESH.index((0, -1)).ranks == range(3, 4)
    assert MESH.index((-1, slice(-2, None))).ranks == range(6, 8)
    assert MESH.index(-2) == MESH.index(0) == MESH.slice(hosts=0)


def test_a_mesh_without_axes_takes_no_index() -> None:
    scalar = MESH.slice(hosts=1, gpus=3)
    assert scalar.ranks == range(7, 8)
    assert scalar.index(()) == scalar
    with pytest.raises(IndexError, match=message("too many indices: 1 given; there are no axes")):
        scalar.index(0)


@pytest.mark.parametrize(
    ("axes", "error", "text"),
    [
        ({"gpu": ("a", "b")}, TypeError, f"split() got an unknown axis 'gpu'; {HAS}"),
        ({"gpus": "dp"}, TypeError, "split(gpus='dp') needs a tuple of new axes, outermost first"),
        (
            {"gpus": ("a", "b"), "c": 2},
            TypeError,
            f"split() got a size for axis 'c', but the new axes are 'a', 'b'; {HAS}",
        ),
        ({"gpus": 2}, TypeError, f"split() got a size for axis 'gpus', but no axis is split; {HAS}"),
        (
            {"gpus": ("dp", "tp"), "tp": 3},
            ValueError,
            "axis 'gpus' of size 4 cannot be split into (dp, tp): 4 is not divisible by 3 (tp=3)",
        ),
        (
            {"gpus": ("dp", "tp"), "dp": 1, "tp": 2},
            ValueError,
            "axis 'gpus' of size 4 cannot be split into (dp, tp): the sizes multiply to 2 (dp=1, tp=2)",
        ),
        (
            {"gpus": ("a", "b", "c"), "b": 2},
            ValueError,
            "axis 'gpus' of size 4 cannot be split into (a, b, c): "
            "only one size can be left out, but 'a', 'c' have none",
        ),
        ({"gpus": ()}, ValueError, "axis 'gpus' of size 4 cannot be split into (): name at least one new axis"),
        ({"gpus": ("a", "hosts"), "a": 2}, ValueError, "axis 'hosts' is named twice in (hosts, a, hosts)"),
        (
            {"gpus": ("a", "a"), "a": 2},
            ValueError,
            "axis 'gpus' of size 4 cannot be split into (a, a): a new axis is named twice",
        ),
        ({"gpus": ("a b",)}, ValueError, "axis name 'a b' is not an identifier"),
        ({"gpus": ("a", "b"), "a": 0}, ValueError, "size of axis 'a' must be an int of at least 1, not 0"),
        ({"gpus": ("a", "b"), "a": 0.5}, ValueError, "size of axis 'a' must be an int of at least 1, not 0.5"),
    ],
)
def test_a_bad_split_names_axes_and_sizes(axes: dict[str, int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=message(text)):
        MESH.split(**axes)


def test_a_bad_name_is_refused() -> None:
    with pytest.raises(TypeError, match=message(f"rename() got an unknown axis 'gpu'; {HAS}")):
        MESH.rename(gpu="tp")
    with pytest.raises(ValueError, match=message("axis 'hosts' is named twice in (hosts, hosts)")):
        MESH.rename(gpus="hosts")
    with pytest.raises(ValueError, match=message("axis name '' is not an identifier")):
        MESH.flatten("")
    with pytest.raises(KeyError, match=re.escape(f"unknown axis 'gpu'; {HAS}")):
        MESH.size("gpu")
    assert MESH.size("gpus") == 4


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_out_of_range_has_no_point(rank: int) -> None:
    assert MESH.locate(rank) is None


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(3), "{'gpus': 4} needs 4 ranks, but 3 were given"),
        ((), "{'gpus': 4} needs 4 ranks, but 0 were given"),
        (range(-1, 3), "ranks are counted from 0, but -1 was given"),
        (range(2, -2, -1), "ranks are counted from 0, but -1 was given"),
        ((3, 1, -7, 2), "ranks are counted from 0, but -7 was given"),
        ((0, 1, 5, 1), "a rank can occur in a region only once: (0, 1, 5, 1)"),
        ((2, 2, 2, 2), "a rank can occur in a region only once: (2, 2, 2, 2)"),
    ],
)
def test_a_region_of_bad_ranks_is_refused(ranks: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=message(text)):
        Region(Extent({"gpus": 4}), ranks)


def test_packed_regions_are_small_plain_data() -> None:
    assert MESH.pack() == (("hosts", "gpus"), (2, 4), 0, 1)
    assert MESH.slice(gpus=3).pack() == (("hosts",), (2,), 3, 4)
    assert MESH.slice(gpus=slice(1, 3)).pack() == (("hosts", "gpus"), (2, 2), (1, 2, 5, 6))
    assert Region(Extent({"gpus": 1}), range(5, 9, 4)).pack() == (("gpus",), (1,), 5, 1)
    large = Region.whole({"hosts": 10**6, "gpus": 8})
    assert len(pickle.dumps(large)) < 200
    assert Region.unpack(json.loads(json.dumps(large.pack()))) == large


@pytest.mark.parametrize(
    "packed",
    [
        (),
        "gpus",
        (["a"], [2]),
        (["a"], [2], 0, "1"),
        (["a"], [2], 0, 0),
        (["a"], [2], -1, 1),
        (["a"], [2, 3], 0, 1),
        (["a"], [0], 0, 1),
        (["a"], ["2"], 0, 1),
        (["a", "a"], [1, 1], 0, 1),
        ([["a"]], [1], 0, 1),
        (["a"], [3], [0, 1]),
        (["a"], [3], [0, 1, 1]),
        (["a"], [3], [0, 1, "5"]),
        (["a"], [3], [0, 1, None]),
    ],
)
def test_an_invalid_packed_region_raises_a_value_error(packed: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Region.unpack(packed)


class Handle(Shaped):
    """The smallest possible mesh."""

    def __init__(self, region: Region, name: str = "h") -> None:
        self._region = region
        self.name = name

    def _with_region(self, region: Region) -> Handle:
        return Handle(region, self.name)


def test_slices_of_a_shaped_handle_have_its_type() -> None:
    handle = Handle(MESH, "trainers")
    assert handle.extent is MESH.extent
    assert handle.sizes == {"hosts": 2, "gpus": 4}
    assert type(handle.sizes) is dict
    assert (handle.size(), handle.size("gpus"), len(handle)) == (8, 4, 8)
    views = {
        "slice": (handle.slice(gpus=slice(0, 2)), MESH.slice(gpus=slice(0, 2))),
        "split": (handle.split(gpus=("a", "b"), b=2), MESH.split(gpus=("a", "b"), b=2)),
        "flatten": (handle.flatten("rank"), MESH.flatten("rank")),
        "rename": (handle.rename(gpus="tp"), MESH.rename(gpus="tp")),
    }
    for view, region in views.values():
        assert type(view) is Handle
        assert view.name == "trainers"
        assert view._region == region
    assert handle._region is MESH
    with pytest.raises(TypeError, match="abstract"):
        Shaped()  # type: ignore[abstract]


def test_ranks_are_picked_by_their_flat_index() -> None:
    region = Region.whole(Extent({"dp": 2, "tp": 2})).slice(dp=1)
    assert region.pick([0, -1]) == Region(Extent({"ranks": 2}), (2, 3))
    with pytest.raises(IndexError, match="an empty list selects no rank"):
        region.pick([])
    with pytest.raises(IndexError, match="axis 'ranks' has size 2: index 5 is out of range -2 to 1"):
        region.pick([0, 5])
    with pytest.raises(TypeError, match="'x' is not an int or a slice"):
        region.pick(["x"])  # type: ignore[list-item]
