"""ValueMesh: values by point, views that share them, and equal values merged by pickling and repr."""

from __future__ import annotations

import math
import pickle
import re
import struct
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.base.mesh import Extent, Region, ValueMesh

extents = st.lists(st.sampled_from(["hosts", "gpus", "dp"]), unique=True, max_size=3).flatmap(
    lambda names: st.tuples(*[st.integers(1, 4) for _ in names]).map(
        lambda sizes: Extent(dict(zip(names, sizes, strict=True)))
    )
)
# Few values, so that many are equal or nearly so.
scalars = st.sampled_from([0, 1, 1000, -1, 0.0, -0.0, 1.0, math.nan, math.inf, True, False, "", "1", b"", b"1", None])


@st.composite
def value_meshes(draw: st.DrawFn) -> ValueMesh[object]:
    extent = draw(extents)
    size = extent.nelements
    return ValueMesh(extent, draw(st.lists(scalars | st.lists(scalars, max_size=2), min_size=size, max_size=size)))


def same(a: object, b: object) -> bool:
    """Whether two values have the same type and, floats by their bits, the same content."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Color(IntEnum):
    RED = 1


@given(value_meshes())
def test_pickling_keeps_every_value_exactly(mesh: ValueMesh[object]) -> None:
    again = pickle.loads(pickle.dumps(mesh))
    assert type(again) is ValueMesh
    assert again.extent == mesh.extent
    assert len(again) == len(mesh)
    assert all(map(same, again.values(), mesh.values()))


@given(extents, st.data())
def test_slices_hold_the_values_that_numpy_selects(extent: Extent, data: st.DataObject) -> None:
    objects = [object() for _ in range(extent.nelements)]
    array = np.empty(extent.nelements, dtype=object)
    array[:] = objects
    array = array.reshape(extent.sizes)
    mesh = ValueMesh(extent, objects)
    picks = {
        axis: data.draw(
            st.integers(0, size - 1) | st.builds(slice, st.integers(0, size - 1), st.none(), st.integers(1, 2))
        )
        for axis, size in extent.items()
    }
    part = mesh.slice(**picks)
    taken = np.asarray(array[tuple(picks.values())], dtype=object)
    assert part.extent.sizes == taken.shape
    assert len(part) == taken.size
    for view in (part, part.flatten("rank"), part.rename(**{axis: f"{axis}2" for axis in part.extent})):
        assert all(a is b for a, b in zip(view.values(), taken.ravel(), strict=True))
    for point, value in part:
        assert part.item(**point) is value
        assert taken[tuple(point.values())] is value
        assert point.extent is part.extent


def test_a_mesh_iterates_as_points_and_values() -> None:
    mesh = ValueMesh(Extent({"hosts": 2, "gpus": 2}), "abcd")
    assert mesh.values() == ("a", "b", "c", "d")
    assert [(point.rank, dict(point), value) for point, value in mesh] == [
        (0, {"hosts": 0, "gpus": 0}, "a"),
        (1, {"hosts": 0, "gpus": 1}, "b"),
        (2, {"hosts": 1, "gpus": 0}, "c"),
        (3, {"hosts": 1, "gpus": 1}, "d"),
    ]
    assert mesh.items() == tuple(mesh)
    assert dict(mesh)[mesh.extent.point(2)] == "c"
    assert mesh.item(hosts=1, gpus=0) == "c"
    assert len(mesh) == mesh.size() == 4


def test_views_can_be_sliced_again() -> None:
    mesh = ValueMesh({"gpus": 8}, range(8))
    split = mesh.split(gpus=("dp", "tp"), tp=2)
    assert split.sizes == {"dp": 4, "tp": 2}
    assert split.slice(tp=1).values() == (1, 3, 5, 7)
    assert split.slice(tp=1).slice(dp=slice(1, 3)).values() == (3, 5)
    assert split.slice(tp=1).slice(dp=2).item() == 5
    block = split.slice(dp=slice(2, 4)).flatten("rank")
    assert [(point.rank, value) for point, value in block] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.values() == tuple(range(8))


def test_ranks_of_a_sliced_region_are_counted_within_the_mesh() -> None:
    half = Region.whole({"hosts": 2, "gpus": 4}).slice(hosts=1)
    mesh = ValueMesh(half, "abcd")
    assert [point.rank for point, _ in mesh] == [0, 1, 2, 3]
    assert mesh.slice(gpus=slice(2, 4)).values() == ("c", "d")
    assert mesh.item(gpus=3) == "d"
    assert repr(mesh.slice(gpus=3)) == "ValueMesh {}: [0] 'd'"


def test_every_axis_of_an_item_is_required() -> None:
    mesh = ValueMesh({"hosts": 2, "gpus": 4}, range(8))
    has = re.escape("the axes are hosts=2, gpus=4")
    with pytest.raises(KeyError, match=rf"axis 'gpus' is missing; {has}"):
        mesh.item(hosts=1)
    with pytest.raises(KeyError, match=rf"axis 'hosts', 'gpus' is missing; {has}"):
        mesh.item()
    with pytest.raises(KeyError, match=rf"unknown axis 'gpu'; {has}"):
        mesh.item(hosts=1, gpu=0)
    with pytest.raises(IndexError, match=r"^axis 'gpus' has size 4: index 4 is out of range 0 to 3$"):
        mesh.item(hosts=1, gpus=4)
    with pytest.raises(IndexError, match=r"^axis 'gpus' has size 4: index -1 is out of range 0 to 3$"):
        mesh.item(hosts=1, gpus=-1)
    with pytest.raises(TypeError, match=r"^axis 'gpus' has size 4: slice"):
        mesh.item(hosts=1, gpus=slice(0, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 3, 5])
def test_there_must_be_one_value_for_each_rank(count: int) -> None:
    text = re.escape(f"{{'gpus': 4}} needs 4 values, but {count} were given")
    with pytest.raises(ValueError, match=f"^{text}$"):
        ValueMesh({"gpus": 4}, range(count))


def test_meshes_are_equal_by_extent_and_values() -> None:
    mesh = ValueMesh({"gpus": 4}, [1, 2, 3, 4])
    assert mesh == ValueMesh(Extent({"gpus": 4}), (1, 2, 3, 4))
    assert mesh == ValueMesh({"gpus": 8}, [0, 1, 2, 3, 4, 5, 6, 7]).slice(gpus=slice(1, 5))
    assert mesh != ValueMesh({"gpus": 4}, [1, 2, 3, 5])
    assert mesh != mesh.rename(gpus="tp")
    assert mesh != (1, 2, 3, 4)
    with pytest.raises(TypeError, match="unhashable"):
        hash(mesh)


def test_equal_values_are_pickled_and_stored_once() -> None:
    text = "".join(map(chr, range(97, 123))) * 40
    copies = ["".join(list(text)) for _ in range(500)]
    mesh = ValueMesh({"gpus": 500}, copies)
    assert len({id(value) for value in mesh.values()}) == 500
    assert len(pickle.dumps(mesh)) < len(text) + 3000
    assert len({id(value) for value in pickle.loads(pickle.dumps(mesh)).values()}) == 1
    floats = pickle.loads(pickle.dumps(ValueMesh({"gpus": 4}, [float("6.5") for _ in range(4)])))
    assert len({id(value) for value in floats.values()}) == 1
    shared = [1, 2]
    first, second, third = pickle.loads(pickle.dumps(ValueMesh({"gpus": 3}, [shared, shared, [1, 2]]))).values()
    assert first is second
    assert first is not third


def test_values_that_only_look_equal_stay_apart() -> None:
    values = [1, True, 1.0, Color.RED, 0.0, -0.0, math.nan, -math.nan, "1", b"1", np.float64(1.0)]
    again = pickle.loads(pickle.dumps(ValueMesh({"gpus": len(values)}, values))).values()
    assert [type(value) for value in again] == [type(value) for value in values]
    assert [math.copysign(1, value) for value in again[4:6]] == [1, -1]
    assert all(map(same, again, values))


def test_a_pickled_view_leaves_the_other_values_behind() -> None:
    mesh = ValueMesh({"gpus": 2}, [b"x" * 100_000, b"small"])
    part = pickle.loads(pickle.dumps(mesh.slice(gpus=1)))
    assert part.item() == b"small"
    assert len(pickle.dumps(mesh.slice(gpus=1))) < 1000


def test_large_buffers_travel_out_of_band() -> None:
    array = np.arange(10_000)
    buffers: list[pickle.PickleBuffer] = []
    mesh = ValueMesh({"gpus": 2}, [array, array])
    data = pickle.dumps(mesh, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1
    assert len(data) < 1000
    assert (pickle.loads(data, buffers=buffers).item(gpus=1) == array).all()


def test_the_repr_merges_equal_values_by_ranks() -> None:
    assert repr(ValueMesh({"gpus": 4}, [6.0] * 4)) == "ValueMesh {'gpus': 4}: [0-3] 6.0"
    assert repr(ValueMesh({}, [None])) == "ValueMesh {}: [0] None"
    assert repr(ValueMesh({"gpus": 4}, [1, 2, 1, 1])) == "ValueMesh {'gpus': 4}:\n  [0,2-3] 1\n  [1] 2"
    assert repr(ValueMesh({"gpus": 2}, [1, True])) == "ValueMesh {'gpus': 2}:\n  [0] 1\n  [1] True"


def test_the_repr_is_bounded() -> None:
    one = repr(ValueMesh({"gpus": 2}, ["a" * 1000 + "b", "a" * 1000 + "b"]))
    assert re.fullmatch(r"ValueMesh \{'gpus': 2\}: \[0-1\] 'a+ \.\.\. a+b'", one)
    assert len(one) < 250
    assert repr(ValueMesh({"gpus": 1}, [np.eye(2)])) == "ValueMesh {'gpus': 1}: [0] array([[1., 0.], [0., 1.]])"
    # Values that differ only where the repr is cut still count as two.
    apart = repr(ValueMesh({"gpus": 2}, ["a" * 500 + "b" + "a" * 500, "a" * 1001]))
    assert len(apart.splitlines()) == 3
    many = repr(ValueMesh({"gpus": 1000}, range(1000))).splitlines()
    assert len(many) == 22
    assert many[20] == "  [19] 19"
    assert many[21] == "  ... 980 more distinct values"
