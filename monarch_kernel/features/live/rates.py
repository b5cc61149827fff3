"""What of all that is logged is counted."""

from __future__ import annotations

__all__ = ["PER_SECOND"]

PER_SECOND = ("samples", "tokens", "flops")
"""Logged under these names is how many there were in a step; shown is how many there are in a second, on all ranks together."""
