"""What a rank displays can be sent and read, whatever the user's code has put into it."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_kernel.net.wire.codec import pack, split
from monarch_kernel.net.wire.messages import Rich
from monarch_kernel.runtime.diagnostics.mime import (
    MAX_DEPTH,
    MAX_PARTS,
    encoded,
    encoded_metadata,
    structure_problem,
    with_text_keys,
)


def nested(depth: int) -> list[Any]:
    inside: list[Any] = []
    for _ in range(depth - 1):
        inside = [inside]
    return inside


def cyclic() -> dict[str, Any]:
    inside: dict[str, Any] = {}
    inside["a"] = inside
    return inside


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (cyclic(), "levels, or it contains itself"),
        (nested(5_000), "levels, or it contains itself"),
        (["x" * 1_000_000] * 100, "more than 67 MB"),
        ([0.5] * 9_000_000, "more than 67 MB"),
        ({"x" * 70_000_000: 1}, "more than 67 MB"),
    ],
    ids=["cyclic", "deep", "texts", "numbers", "key"],
)
def test_a_structure_that_is_too_much_is_left_out_with_the_reason(value: object, problem: str) -> None:
    data = encoded({"application/x+json": value, "text/plain": "a chart"})
    assert list(data) == ["text/plain"]
    assert data["text/plain"].startswith("a chart\n(application/x+json left out: ")
    assert problem in data["text/plain"]


def test_a_structure_within_the_limits_is_the_same_object() -> None:
    chart = {"data": [{"x": [1, 2, None], "y": (0.5, float("nan"))}], "text": "x" * 60_000_000}
    assert encoded({"application/x+json": chart})["application/x+json"] is chart
    assert structure_problem(nested(MAX_DEPTH)) == ""
    assert structure_problem(nested(MAX_DEPTH + 1))


def test_keys_are_texts_as_in_json() -> None:
    assert with_text_keys({1: {(2, "a"): [{None: 1}]}, "b": 3}) == {"1": {"(2, 'a')": [{"null": 1}]}, "b": 3}
    assert with_text_keys({None: {False: 0.5}, 1.5: 1}) == {"null": {"false": 0.5}, "1.5": 1}


def test_metadata_has_a_limit_too() -> None:
    data = {"text/plain": "a"}
    assert encoded_metadata({1: {2: 3}}, data) == {"1": {"2": 3}}
    assert data == {"text/plain": "a"}
    assert encoded_metadata({"x": "y" * 2_000_000}, data) == {}
    assert data["text/plain"] == "a\n(metadata left out: more than 1 MB: make it smaller, or save it to a file)"


def test_a_display_has_a_bounded_number_of_types() -> None:
    data = encoded({f"a/b{i}": "x" for i in range(100_000)})
    assert len(data) == MAX_PARTS + 1
    assert data["text/plain"] == "(99,900 MIME types left out, more than the 100 that are shown)"


@pytest.mark.parametrize(
    "value",
    [{5: 5}, {("a",): 1}, {None: {(1, 2): {b"x": 1}}}, {"a/b": nested(MAX_DEPTH - 1)}, {5: b"\xff", "\ud800": 1}],
)
def test_what_a_rank_sends_can_be_read(value: dict[Any, Any]) -> None:
    """Otherwise the controller drops it, with the messages that came in the same batch."""
    data = encoded(value)
    ((message, _),) = split([b"\x91" + pack(Rich(7, data, encoded_metadata(value, data))).header])
    assert isinstance(message, Rich)
    assert all(isinstance(key, str) for key in (*message.data, *message.metadata))
