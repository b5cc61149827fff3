"""Extents and points are mappings, with the coordinates that NumPy gives."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.base.mesh import Extent, Point, ValueMesh

extents = st.lists(st.sampled_from(["hosts", "gpus", "dp", "tp", "pp", "rack"]), unique=True, max_size=4).flatmap(
    lambda names: st.tuples(*[st.integers(1, 5) for _ in names]).map(
        lambda sizes: Extent(dict(zip(names, sizes, strict=True)))
    )
)

EXTENT = Extent({"hosts": 2, "gpus": 4})
HAS = "the axes are hosts=2, gpus=4"


@given(extents)
def test_points_have_the_coordinates_of_unravel_index(extent: Extent) -> None:
    assert extent.nelements == math.prod(extent.sizes)
    for rank in range(extent.nelements):
        point = extent.point(rank)
        expected = np.unravel_index(rank, extent.sizes) if extent else ()
        assert tuple(point.values()) == tuple(map(int, expected))
        assert point.rank == rank
        assert point.extent is extent
        assert extent.rank_of(point) == extent.rank_of(dict(point)) == rank
        assert dict(point) == point
        assert tuple(point) == extent.labels
    assert len({extent.point(rank) for rank in range(extent.nelements)}) == extent.nelements


@given(extents)
def test_extents_are_mappings_that_survive_pickling(extent: Extent) -> None:
    plain = dict(zip(extent.labels, extent.sizes, strict=True))
    assert extent == plain
    assert plain == extent
    assert repr(extent) == repr(plain)
    assert list(extent.items()) == list(plain.items())
    for same in (pickle.loads(pickle.dumps(extent)), copy.deepcopy(extent), Extent(plain), Extent(plain.items())):
        assert same == extent
        assert hash(same) == hash(extent)
    point = extent.point(extent.nelements - 1)
    for again in (pickle.loads(pickle.dumps(point)), copy.deepcopy(point)):
        assert again == point
        assert hash(again) == hash(point)
        assert (again.rank, again.extent) == (point.rank, extent)


def test_the_hash_of_an_unpickled_extent_is_that_of_the_process() -> None:
    extent = Extent({"hosts": 2, "gpus": 4})
    code = (
        "import sys, pickle; from monarch_kernel.base.mesh import Extent;"
        "e, p = pickle.load(sys.stdin.buffer); mine = Extent({'hosts': 2, 'gpus': 4});"
        "assert e in {mine} and p in {mine.point(5)}"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}  # the hash seed of this process differs
    subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((extent, extent.point(5))),
        env=environment,
        check=True,
        timeout=60,
    )


def test_the_empty_extent_has_one_element() -> None:
    extent = Extent({})
    assert extent.nelements == 1
    assert extent == {} == Extent()
    assert extent.point(0) == {}
    assert str(extent.point(0)) == "{}"
    assert extent.rank_of({}) == 0


def test_different_extents_and_points_are_not_equal() -> None:
    extent = Extent({"hosts": 2, "gpus": 4})
    assert extent != Extent({"gpus": 4, "hosts": 2})  # different ranks at the same coordinates
    assert extent == {"gpus": 4, "hosts": 2}  # a dict has no order to compare
    assert extent != {"hosts": 2}
    assert extent != "hosts"
    assert extent.point(1) != extent.point(2)
    assert extent.point(1) != Extent({"gpus": 4, "hosts": 2}).point(1)
    assert extent.point(1) != 1
    assert Extent({"gpus": 2}) != Extent({"gpus": 3}).point(2)


def test_extents_and_points_are_immutable() -> None:
    extent = Extent({"gpus": 2})
    for thing, name in [(extent, "sizes"), (extent, "other"), (extent.point(0), "rank"), (extent.point(0), "other")]:
        with pytest.raises(AttributeError):
            setattr(thing, name, 1)


def test_a_point_shows_its_coordinates_and_sizes() -> None:
    point = Extent({"hosts": 2, "gpus": 4}).point(1)
    assert str(point) == "{'hosts': 0/2, 'gpus': 1/4}"
    assert repr(point) == "<Point 1 {'hosts': 0/2, 'gpus': 1/4}>"


def test_numpy_ints_become_plain_ints() -> None:
    extent = Extent({"gpus": np.int64(4)})  # type: ignore[arg-type]
    assert type(extent["gpus"]) is int
    assert type(extent.point(np.int64(2)).rank) is int  # type: ignore[arg-type]


def message(text: str) -> str:
    return "^" + re.escape(text) + "$"


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"gpus": 0}, "size of axis 'gpus' must be an int of at least 1, not 0"),
        ({"gpus": -3}, "size of axis 'gpus' must be an int of at least 1, not -3"),
        ({"gpus": 2.0}, "size of axis 'gpus' must be an int of at least 1, not 2.0"),
        ({"gpus": True}, "size of axis 'gpus' must be an int of at least 1, not True"),
        ({"gpus": None}, "size of axis 'gpus' must be an int of at least 1, not None"),
        ({"my gpus": 2}, "axis name 'my gpus' is not an identifier"),
        ({3: 2}, "axis name 3 is not an identifier"),
        ([("a", 1), ("b", 2), ("a", 3)], "axis 'a' is named twice in (a, b, a)"),
    ],
)
def test_a_bad_extent_names_the_axis(sizes: object, text: str) -> None:
    with pytest.raises(ValueError, match=message(text)):
        Extent(sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    text = message(f"rank {rank} is out of range: {{'hosts': 2, 'gpus': 4}} has ranks 0 to 7")
    for error in (IndexError, ValueError):  # Monarch raises a ValueError
        with pytest.raises(error, match=text):
            EXTENT.point(rank)
        with pytest.raises(error, match=text):
            Point(rank, EXTENT)
        with pytest.raises(error, match=text):
            ValueMesh(EXTENT, range(8)).get(rank)
    with pytest.raises(TypeError):
        EXTENT.point(1.0)  # type: ignore[arg-type]


def test_coordinates_must_be_complete_known_and_in_range() -> None:
    with pytest.raises(KeyError, match=re.escape(f"axis 'hosts', 'gpus' is missing; {HAS}")):
        EXTENT.rank_of({})
    with pytest.raises(KeyError, match=re.escape(f"unknown axis 'x'; {HAS}")):
        EXTENT.rank_of({"hosts": 0, "gpus": 0, "x": 0})
    with pytest.raises(IndexError, match=message("axis 'gpus' has size 4: index -1 is out of range 0 to 3")):
        EXTENT.rank_of({"hosts": 0, "gpus": -1})
    for error in (KeyError, ValueError):  # Monarch raises a ValueError
        for read in (lambda: EXTENT["x"], lambda: EXTENT.point(0)["x"], lambda: EXTENT.point(0).size("x")):
            with pytest.raises(error, match=re.escape(f"unknown axis 'x'; {HAS}")):
                read()
    assert (EXTENT.get("x"), EXTENT.point(0).get("x"), "x" in EXTENT) == (None, None, False)


def monarch_bytes(*values: Any) -> bytes:
    """Write values as PyTorch Monarch does: numbers of eight bytes, and sequences behind their length."""
    parts = []
    for value in values:
        if isinstance(value, int):
            parts.append(value.to_bytes(8, "little"))
        else:
            items = value.encode() if isinstance(value, str) else monarch_bytes(*value)
            parts.append(len(value).to_bytes(8, "little") + items)
    return b"".join(parts)


@given(extents, st.data())
def test_extents_and_points_of_monarch_are_read_from_their_bytes(extent: Extent, data: st.DataObject) -> None:
    written = monarch_bytes(list(extent), list(extent.values()))
    assert Extent.from_bytes(written) == extent
    point = extent.point(data.draw(st.integers(0, extent.nelements - 1)))
    assert Point.from_bytes(monarch_bytes(point.rank) + written) == point
    end = data.draw(st.integers(0, len(written) - 1))
    with pytest.raises(ValueError, match="the bytes end"):
        Extent.from_bytes(written[:end])


def test_a_sequence_that_is_longer_than_the_bytes_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="the bytes end before the end of a sequence"):
        Extent.from_bytes(monarch_bytes(1 << 62))


def test_axes_may_be_named_apart_from_their_sizes() -> None:
    assert Extent(labels=["a", "b"], sizes=[2, 3]) == Extent(["a", "b"], [2, 3]) == Extent({"a": 2, "b": 3})
