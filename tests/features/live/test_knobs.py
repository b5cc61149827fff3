"""A knob accepts values of its type within its bounds, and explains why it refuses others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from monarch_kernel.features.live.knobs import fitting
from monarch_kernel.net.wire.messages import Knob

LR = Knob("lr", 0.1, 0.0, 1.0)


@pytest.mark.parametrize(
    ("knob", "value", "expected"),
    [
        (LR, 0.5, 0.5),
        (LR, 1, 1.0),
        (Knob("n", 3), 4, 4),
        (Knob("n", 3), 4.5, 4.5),
        (Knob("x", None), "a", "a"),
        (Knob("m", "a"), None, None),
        (Knob("on", True), False, False),
    ],
)
def test_a_fitting_value_is_accepted(knob: Knob, value: Any, expected: Any) -> None:
    assert fitting(knob, value) == expected
    assert type(fitting(knob, value)) is type(expected)


@pytest.mark.parametrize(
    ("knob", "value", "match"),
    [
        (LR, 2.0, "at least 0 and at most 1, not 2"),
        (Knob("n", 3, low=1), 0, "at least 1, not 0"),
        (Knob("n", 3, high=5), 6, "at most 5, not 6"),
        (LR, math.nan, "can't be nan"),
        (Knob("n", 3), -math.inf, "can't be -inf"),
    ],
)
def test_an_error_says_which_values_fit(knob: Knob, value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fitting(knob, value)


@pytest.mark.parametrize(
    ("knob", "value"), [(LR, "x"), (LR, True), (Knob("m", "a"), 1), (Knob("on", True), 1), (Knob("x", None), [])]
)
def test_another_type_is_refused(knob: Knob, value: Any) -> None:
    with pytest.raises(TypeError, match=f"knob {knob.name!r}"):
        fitting(knob, value)


@pytest.mark.parametrize("knob", [LR, Knob("n", 3, low=1), Knob("n", 3, high=5)])
def test_none_is_refused_where_there_are_bounds(knob: Knob) -> None:
    with pytest.raises(TypeError, match=f"knob {knob.name!r} is a number, not None"):
        fitting(knob, None)


@pytest.mark.parametrize(
    ("knob", "value", "says"),
    [
        (LR, "nan", "knob 'lr' is a number, not 'nan'"),
        (Knob("n", 3), True, "knob 'n' is a number, not True"),
        (Knob("m", "a"), 7, "knob 'm' is a text, not 7"),
        (Knob("on", True), "maybe", "knob 'on' is True or False, not 'maybe'"),
        (LR, "x" * 900, "knob 'lr' is a number, not '" + "x" * 39 + "…"),
    ],
)
def test_an_error_names_what_was_given(knob: Knob, value: Any, says: str) -> None:
    with pytest.raises(TypeError) as caught:
        fitting(knob, value)
    assert str(caught.value) == says
