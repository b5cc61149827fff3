"""Where this package is installed."""

from __future__ import annotations

import os

__all__ = ["PACKAGE"]

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The directory of the package, with a separator at the end: the prefix of the names of its source files."""
