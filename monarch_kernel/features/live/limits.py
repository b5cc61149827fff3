"""Limits of the names and texts in a live loop: ranks refuse what is above them, and so does the controller.

Each name costs the controller a curve, and each view a line. A name may come from data, such as the name of a file.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["MAX_KNOBS", "MAX_LOGGED", "MAX_NAME", "MAX_TEXT", "integer_problem", "name_problem", "text_problem"]

MAX_NAME = 200
"""Characters in the name of a knob or of a logged value."""

MAX_LOGGED = 1_000
"""Names that a loop logs values under, on all its ranks together."""

MAX_KNOBS = 200
"""Knobs of a loop."""

MAX_TEXT = 1_000
"""Characters of a knob whose value is a string."""

_MOST = 1 << 63
_SHOWN = 40


def name_problem(name: str, known: Collection[str], most: int) -> str:
    """Say why a loop can't have one more name; empty if it can.

    Args:
        name: the new name.
        known: the names that the loop has.
        most: how many it may have.
    """
    if not name.strip():
        return f"a name needs a visible character, and {name[:_SHOWN]!r} has none"
    if "\0" in name:  # names of ours begin with it (`features.live.pace`)
        return f"the name has a NUL ({name[:_SHOWN]!r}), which no name may have"
    if len(name) > MAX_NAME:
        return f"the name has {len(name):,} characters ({name[:_SHOWN]!r}…), but may have at most {MAX_NAME:,}"
    if len(known) >= most and name not in known:
        return f"a loop can have at most {most:,} names, and {name!r} is one more"
    return ""


def text_problem(value: object) -> str:
    """Say why a value of a knob is too long; empty if it is not."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"the text has {len(value):,} characters, but may have at most {MAX_TEXT:,}"
    return ""


def integer_problem(value: object) -> str:
    """Say why an integer can't be sent; empty if it can, and for all other values."""
    if isinstance(value, int) and not -_MOST <= value < _MOST:
        return f"the integer has {value.bit_length()} bits, but may have at most 63 and a sign; write it as a float"
    return ""
