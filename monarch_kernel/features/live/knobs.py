"""Checks of the values of knobs."""

from __future__ import annotations

import math
from typing import Any

from monarch_kernel.features.live.limits import integer_problem, text_problem
from monarch_kernel.net.wire.messages import Knob

__all__ = ["bounds_text", "fitting"]

_SHOWN = 40


def fitting(knob: Knob, value: Any) -> Any:
    """Check a new value of a knob, and convert it to the type of the knob.

    Raises:
        TypeError: the value has another type than the knob, or is None although the knob has bounds.
        ValueError: the value is not finite, too long, or out of the bounds of the knob.
    """
    if problem := text_problem(value) or integer_problem(value):
        raise ValueError(f"knob {knob.name!r}: {problem}")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    was_number = isinstance(knob.value, (int, float)) and not isinstance(knob.value, bool)
    is_bounded = knob.low is not None or knob.high is not None
    if value is None and is_bounded:
        raise TypeError(f"knob {knob.name!r} is a number, not None")
    if knob.value is not None and value is not None and (is_number, was_number) != (True, True):
        if type(value) is not type(knob.value):
            raise TypeError(f"knob {knob.name!r} is {_kind(knob.value)}, not {_brief(value)}")
    elif value is not None and not isinstance(value, (int, float, str, bool)):
        raise TypeError(f"knob {knob.name!r} can't be a {type(value).__name__}: a number, a text, True, False or None")
    if is_number and not math.isfinite(value):
        raise ValueError(f"knob {knob.name!r} can't be {value}")
    if is_number and ((knob.low is not None and value < knob.low) or (knob.high is not None and value > knob.high)):
        raise ValueError(f"knob {knob.name!r} is {bounds_text(knob.low, knob.high)}, not {value:g}")
    return float(value) if isinstance(knob.value, float) and is_number else value


def _kind(value: float | str | bool) -> str:
    """The kind of the values of a knob, in the terms of the magic and of the view."""
    return "True or False" if isinstance(value, bool) else "a text" if isinstance(value, str) else "a number"


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def bounds_text(low: float | None, high: float | None) -> str:
    """Describe bounds, such as "at least 0 and at most 1"."""
    least = "" if low is None else f"at least {low:g}"
    most = "" if high is None else f"at most {high:g}"
    return " and ".join(filter(None, (least, most)))
