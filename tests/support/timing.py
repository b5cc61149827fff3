"""Bounds on elapsed time, which only the timing tier asserts.

The duration of an operation depends on what else the machine does. So a test asserts results in every tier, but durations only
in the timing tier, which runs serially on an idle machine (``make test-timing``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Bar", "undisturbed_s"]


class Bar:
    """The fixture ``bar``: a test that uses it runs in its own tier without the bounds, and in the timing tier with them.

    Args:
        is_asserted: whether this is the timing tier.
    """

    def __init__(self, is_asserted: bool) -> None:
        self.is_asserted = is_asserted

    @contextmanager
    def below(self, limit_s: float, what: str = "this") -> Iterator[None]:
        """Check that the block takes less than ``limit_s`` seconds."""
        begin = undisturbed_s()
        yield
        self.check(undisturbed_s() - begin, limit_s, what)

    def check(self, took_s: float, limit_s: float, what: str = "this") -> None:
        """Check that ``took_s`` is less than ``limit_s`` seconds."""
        if self.is_asserted:
            assert took_s < limit_s, f"{what} took {took_s:.2f} s instead of less than {limit_s:g} s"

    def check_above(self, took_s: float, limit_s: float, what: str = "this") -> None:
        """Check that ``took_s`` is more than ``limit_s`` seconds."""
        if self.is_asserted:
            assert took_s > limit_s, f"{what} took {took_s:.2f} s instead of more than {limit_s:g} s"


def undisturbed_s() -> float:
    """A clock that stands still while any program of this machine waits for a core.

    Other tests, other programs, and other virtual machines of the same host may take the time that a bound is about.
    """
    waited_s = 0.0
    with suppress(OSError):  # a Linux kernel without pressure information
        waited_s = int(Path("/proc/pressure/cpu").read_text().split()[4].removeprefix("total=")) / 1e6
    stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    return time.monotonic() - waited_s - stolen / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
