"""Versions of the software on a machine, for comparison with other machines; reading them imports nothing."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from monarch_kernel.net.wire.messages import Software

__all__ = ["PACKAGES", "software_here"]

_OURS = __name__.partition(".")[0]
PACKAGES = ("monarch_kernel", "torch", "cloudpickle")
"""Packages whose versions affect whether values and calls have the same meaning on both sides."""


def software_here() -> Software:
    """Return the versions of this process."""
    return Software(platform.python_version(), sys.executable, {name: _version(name) for name in PACKAGES})


def _version(name: str) -> str:
    if name == _OURS:  # the running version, which may differ from the installed one
        return str(sys.modules[_OURS].__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
