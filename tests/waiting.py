"""Waiting in tests: for what has to happen, not for some time."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["LONG_S", "wait_until"]

LONG_S = 60.0
"""Far more than anything here takes."""


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = LONG_S) -> float:
    """Wait until a condition holds; gives how long that took, in seconds.

    Args:
        condition: is asked again and again.
        what: is waited for, in words.
        timeout_s: after which the test has failed.
    """
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + timeout_s, f"in vain waited for: {what}"
        time.sleep(0.002)
    return time.monotonic() - begun
