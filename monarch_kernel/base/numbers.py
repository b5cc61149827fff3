"""Reads the numbers of a command line for argparse, whose own types accept ``nan`` and negative counts."""

from __future__ import annotations

import argparse
import math

__all__ = ["count", "seconds"]


def count(text: str) -> int:
    """Read a whole number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: it is no such number.
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"write a whole number of 1 or more, not {text!r}")
    return value


def seconds(text: str) -> float:
    """Read a time in seconds, above 0 and finite.

    Raises:
        argparse.ArgumentTypeError: it is no such number.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"write a number of seconds above 0, such as 10, not {text!r}")
    return value
