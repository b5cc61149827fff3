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


def wait_until(condition: Callable[[], object], what: str, within_s: float = LONG_S) -> float:
    """Wait until a condition holds; gives how long that took, as `undisturbed_s` tells time.

    Args:
        condition: is asked again and again.
        what: is waited for, in words.
        within_s: it has taken too long if it took more.
    """
    begun, last = undisturbed_s(), time.monotonic() + max(within_s, LONG_S)
    while not condition():
        assert time.monotonic() < last, f"in vain waited for: {what}"
        time.sleep(0.002)
    took_s = undisturbed_s() - begun
    assert took_s < within_s, f"took {took_s:.1f} s instead of {within_s:g}: {what}"
    return took_s


def undisturbed_s() -> float:
    """A clock that stands still while some program of this machine waits for a core: what takes how long is told by it.

    Our bars are for a machine that has time. Other tests, other programs, and other machines of the same host may take it.
    """
    waited_s = 0.0
    with suppress(OSError):  # a kernel that does not say
        waited_s = int(Path("/proc/pressure/cpu").read_text().split()[4].removeprefix("total=")) / 1e6
    stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    return time.monotonic() - waited_s - stolen / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
