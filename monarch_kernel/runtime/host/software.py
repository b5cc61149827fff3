"""What a machine runs our processes with, for comparison with others; nothing is imported for it."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from monarch_kernel.net.wire.messages import Software

__all__ = ["PACKAGES", "software_here"]

_OURS = __name__.partition(".")[0]
PACKAGES = ("monarch_kernel", "torch", "cloudpickle")
"""Those whose versions have to do with whether values and calls mean the same on both sides."""


def software_here() -> Software:
    """Of this process."""
    return Software(platform.python_version(), sys.executable, {name: _version(name) for name in PACKAGES})


def _version(name: str) -> str:
    if name == _OURS:  # of what runs, which may not be what is installed
        return str(sys.modules[_OURS].__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
