"""Drives objects without a thread until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tests.support.waiting import LONG_S

__all__ = ["pump_until"]

T = TypeVar("T")


def pump_until(condition: Callable[[], T], step: Callable[[], object], what: str) -> T:
    """Call ``step`` again and again, without a pause, until a condition holds; returns the value of the condition.

    Args:
        condition: what must become true.
        step: drives the objects under test; it sleeps a moment if there is nothing to do.
        what: the event, in words, for the error.
    """
    deadline = time.monotonic() + LONG_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {LONG_S:g} s still waiting for {what}"
        step()
    return value
