"""Copies of tensors are compared, and differences are described; without ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_kernel.features.replicas.compare import (
    PIECE,
    Copy,
    Difference,
    Pieces,
    compare,
    difference_text,
    differences_lines,
    differing,
    index_text,
    locate,
)

WHOLE = (((0, 2), (0, 3)),)


def copy(path: str = "m.a", digest: bytes = b"1", kind: str = "parameter", **fields: Any) -> Copy:
    return Copy(
        path, kind, fields.pop("parts", WHOLE), fields.pop("shape", (2, 3)), fields.pop("dtype", "float32"), digest
    )


def test_equal_copies_do_not_differ() -> None:
    found = compare({rank: [copy(), copy("m.b")] for rank in range(4)})
    assert (found.compared, found.unique, found.differences, found.buffers) == (2, 0, (), ())


def test_the_rank_that_differs_from_the_majority_is_named() -> None:
    found = compare({rank: [copy(digest=b"2" if rank == 2 else b"1")] for rank in range(4)})
    (difference,) = found.differences
    assert difference.sets == ((0, 1, 3), (2,))
    assert difference.odd == (2,)
    assert difference_text(difference) == "m.a: [2] differs from [0-1,3]"


def test_of_two_ranks_neither_is_blamed() -> None:
    (difference,) = compare({rank: [copy(digest=bytes([rank]))] for rank in range(2)}).differences
    assert difference.odd == ()
    assert difference_text(difference) == "m.a: [0] and [1] differ"


@pytest.mark.parametrize(
    ("digests", "text"),
    [
        ("0123", "m.a: all of [0-3] differ"),
        ("0011", "m.a: [0-1] and [2-3] differ"),
        ("0012", "m.a: [2-3] differ from [0-1]"),
        ("0011223344", "m.a: 5 different values on [0-9]"),
    ],
)
def test_sets_of_equal_ranks_are_listed(digests: str, text: str) -> None:
    (difference,) = compare({rank: [copy(digest=each.encode())] for rank, each in enumerate(digests)}).differences
    assert difference_text(difference) == text


def test_shards_are_compared_only_where_they_are_replicas() -> None:
    halves = ((((0, 1), (0, 3)),), (((1, 2), (0, 3)),))
    by_rank = {rank: [copy(digest=bytes([rank]), parts=halves[rank % 2])] for rank in range(2)}
    found = compare(by_rank)
    assert (found.compared, found.unique, found.differences) == (0, 1, ())
    again = {rank + 2: [copy(digest=bytes([rank if rank else 9]), parts=halves[rank % 2])] for rank in range(2)}
    found = compare(by_rank | again)  # twice each half: that of ranks 0 and 2 differs
    assert found.compared == 1
    assert [each.sets for each in found.differences] == [((0,), (2,))]


def test_a_shard_without_elements_is_no_copy_and_is_not_missing() -> None:
    found = compare({0: [copy()], 1: [copy(digest=b"", parts=())], 2: [copy()]})
    assert (found.compared, found.differences) == (1, ())


def test_ranks_at_different_places_are_not_compared() -> None:
    by_rank = {rank: [copy(digest=bytes([rank // 2]))] for rank in range(4)}
    assert compare(by_rank).differences
    assert not compare(by_rank, lambda rank: rank // 2).differences
    assert compare(by_rank, lambda rank: rank % 2).differences


def test_a_tensor_that_ranks_lack_is_a_difference_if_they_have_the_rest() -> None:
    gradient = copy(kind="gradient")
    found = compare({0: [copy(), gradient], 1: [copy(), gradient], 2: [copy()]})
    assert [difference_text(each) for each in found.differences] == ["the gradient of m.a: [2] does not have it"]
    found = compare({rank: [copy(), gradient] if rank == 0 else [copy()] for rank in range(4)})
    assert [difference_text(each) for each in found.differences] == ["the gradient of m.a is on [0] only"]
    assert (found.compared, found.different, found.unique) == (2, 1, 0)


def test_a_variable_that_some_ranks_lack_is_one_difference() -> None:
    found = compare({rank: [copy()] + [copy("big.a"), copy("big.b")] * (rank == 1) for rank in range(4)})
    assert [difference_text(each) for each in found.differences] == ["big is on [1] only"]
    assert (found.compared, found.different, found.unique) == (3, 2, 0)
    found = compare({rank: [copy("big.a")] * (rank != 3) for rank in range(4)})
    assert [difference_text(each) for each in found.differences] == ["big: [3] does not have it"]
    by_place = compare({rank: [copy("big.a")] * (rank < 2) for rank in range(4)}, lambda rank: rank // 2)
    assert by_place.differences == ()


def test_a_variable_without_tensors_is_not_absent() -> None:
    names = {rank: ["d"] for rank in range(2)}
    found = compare({0: [copy("d.a", kind="tensor")], 1: []}, variables=names)
    assert [difference_text(each) for each in found.differences] == ["d.a is on [0] only"]


def test_a_tensor_that_a_rank_lacks_can_differ_between_the_others() -> None:
    found = compare({rank: [copy("m.b"), *[copy(digest=bytes([rank]))] * (rank < 2)] for rank in range(3)})
    assert difference_text(found.differences[0]) == "m.a: [2] does not have it; m.a: [0] and [1] differ"


def test_a_missing_tensor_of_several_shards_is_one_difference() -> None:
    halves = ((((0, 1), (0, 3)),), (((1, 2), (0, 3)),), ())
    found = compare({rank: [copy("m.b"), *[copy(parts=halves[rank])] * (rank < 2)] for rank in range(3)})
    assert len(found.differences) == found.different == 1


def test_parameters_come_before_gradients_and_buffers_apart() -> None:
    kinds = ("gradient", "buffer", "parameter")
    found = compare({rank: [copy(f"m.{kind}", bytes([rank]), kind) for kind in kinds] for rank in range(2)})
    assert [each.copy.kind for each in found.differences] == ["parameter", "gradient"]
    assert [each.copy.kind for each in found.buffers] == ["buffer"]


def test_different_shapes_and_types_are_named() -> None:
    (difference,) = compare({0: [copy()], 1: [copy(shape=(4,))], 2: [copy(), copy("m.b")]}).differences[:1]
    assert difference_text(difference) == "m.a: float32 [2, 3] on [0,2], [4] on [1]"


def test_each_shape_is_named_once_and_values_by_their_type() -> None:
    copies = {rank: [copy(digest=bytes([rank]), parts=None, shape=(3 if rank else 4,))] for rank in range(4)}
    (difference,) = compare(copies).differences
    assert difference_text(difference) == "m.a: float32 [4] on [0], [3] on [1-3]"
    kinds = {0: [copy("x", kind="value", shape=(), dtype="int")], 1: [copy("x", kind="value", shape=(), dtype="float")]}
    assert difference_text(compare(kinds).differences[0]) == "x: int on [0], float on [1]"
    dtypes = {0: [copy()], 1: [copy(dtype="float64")]}
    assert difference_text(compare(dtypes).differences[0]) == "m.a: float32 [2, 3] on [0], float64 [2, 3] on [1]"


def test_long_lists_are_cut() -> None:
    difference = Difference(copy(), ((0,), (1,)))
    assert differences_lines([difference] * 20)[-1] == "and 12 more"
    assert len(differences_lines([difference] * 8)) == 8


# -- where the first difference is


def pieces(*values: float, number: int = 0, total: int = 1) -> Pieces:
    return Pieces((number,), (values,), total)


RANKS = ((0, 2), (1,))


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ((1.0, 2, 3, 4, 5, 6), (1.0, 2, 3, 4, 5.5, 6), "at [1, 1]: 5.5 on [1], 5 on [0,2]; 1 of 6 elements differs"),
        (
            (1.0, 2, 3, 4, 5, 6),
            (1.0, 0, 3, 4, 9, 6),
            "at [0, 1]: 0 on [1], 2 on [0,2]; 2 of 6 elements differ, by up to 4",
        ),
        ((1.0,) * 6, (1.0,) * 5 + (float("nan"),), "at [1, 2]: nan on [1], 1 on [0,2]; 1 of 6 elements differs"),
        ((0.0,) * 6, (-0.0,) * 6, "only in bits that do not change the value, such as the sign of 0"),
        ((float("nan"),) * 6, (float("nan"),) * 6, "only in bits that do not change the value, such as the sign of 0"),
    ],
)
def test_the_first_element_that_differs_is_named(one: Any, other: Any, text: str) -> None:
    assert locate(copy(), pieces(*one), pieces(*other), RANKS) == text


def test_the_index_is_that_in_the_whole_tensor() -> None:
    shard = copy(parts=(((4, 6), (0, 3)),))
    assert locate(shard, pieces(*range(6)), pieces(*range(5), 9), RANKS).startswith("at [5, 2]: 9 on [1]")
    strided = copy(parts=(((0, 1), (0, 3)), ((4, 5), (0, 3))))
    assert locate(strided, pieces(*range(6)), pieces(*range(5), 9), RANKS).startswith(
        "at [1, 2] of the shard: 9 on [1]"
    )


def test_a_scalar_has_no_index() -> None:
    assert locate(copy(shape=(), parts=((),)), pieces(1), pieces(2), RANKS).startswith("2 on [1], 1 on [0,2]; 1 of 1")


def test_a_count_of_some_pieces_is_a_lower_bound() -> None:
    text = locate(
        copy(shape=(10 * PIECE,), parts=(((0, 10 * PIECE),),)), pieces(1, number=2, total=9), pieces(2, number=2), RANKS
    )
    assert text.startswith(f"at [{2 * PIECE}]: 2 on [1]")
    assert "at least 1 of 163,840 elements differ, by up to 1" in text


def test_the_first_pieces_that_differ_are_asked_for() -> None:
    assert differing([b"1", b"2", b"3"], [b"1", b"0", b"0"]) == ((1, 2), 2)
    assert differing([b"1"] * 9, [b"2"] * 9) == ((0, 1, 2, 3), 9)
    assert differing([b"1"], [b"1"]) == ((), 0)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_an_index_counts_in_row_major_order(shape: list[int], data: st.DataObject) -> None:
    index = [data.draw(st.integers(0, size - 1)) for size in shape]
    at = 0
    for size, each in zip(shape, index):
        at = at * size + each
    assert index_text(at, shape, [0] * len(shape)) == str(index)
