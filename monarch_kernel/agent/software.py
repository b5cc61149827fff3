"""What a machine runs our processes with, for comparison with others; nothing is imported for it."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from monarch_kernel.wire.messages import Software

__all__ = ["PACKAGES", "software_here"]

PACKAGES = ("monarch_kernel", "torch", "cloudpickle")
"""Those whose versions have to do with whether values and calls mean the same on both sides."""


def software_here() -> Software:
    """Of this process."""
    return Software(platform.python_version(), sys.executable, {name: _version(name) for name in PACKAGES})


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
