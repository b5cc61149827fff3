"""Waiting in tests: for an event, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["LONG_S", "wait_for_files", "wait_until"]

LONG_S = 60.0
"""Far longer than anything here takes."""

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, within_s: float = LONG_S) -> T:
    """Wait until a condition holds, and return its value.

    Args:
        condition: called again and again until its value is true.
        what: the event, in words, for the error.
        within_s: deadline in seconds. It only limits how long a failure takes: the fixture ``bar`` asserts how soon something
            happens.
    """
    asked_at = time.monotonic()
    deadline = asked_at + within_s
    while not (value := condition()):
        now = time.monotonic()
        assert now < deadline, f"after {within_s:g} s still waiting for {what}"
        # A condition that asks a kernel or ranks would otherwise take their processor time from what the test waits for.
        time.sleep(min(max(2 * (now - asked_at), 0.002), 0.02))
        asked_at = time.monotonic()
    return value


def wait_for_files(folder: Path, *names: str) -> None:
    """Wait until files exist in a folder; this module travels to ranks by value, so actors may call it, too."""
    wait_until(lambda: all((folder / name).exists() for name in names), f"{', '.join(names)} in {folder}")
