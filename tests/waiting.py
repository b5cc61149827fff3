"""Waiting in tests: for what has to happen, not for some time; and how long it took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["LONG_S", "undisturbed_s", "wait_until"]

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


def undisturbed_s() -> float:
    """A clock that stands still while some program of this machine waits for a core: what takes how long is told by it.

    Our bars are for a machine that has time. Other tests, other programs, and other machines of the same host may take it.
    """
    waited_s = 0.0
    with suppress(OSError):  # a kernel that does not say
        waited_s = int(Path("/proc/pressure/cpu").read_text().split()[4].removeprefix("total=")) / 1e6
    stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    return time.monotonic() - waited_s - stolen / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
