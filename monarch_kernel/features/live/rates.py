"""Names of logged values that are counters."""

from __future__ import annotations

__all__ = ["PER_SECOND"]

PER_SECOND = ("samples", "tokens", "flops")
"""Ranks log counts per step under these names; the view shows them as rates per second, summed over ranks."""
