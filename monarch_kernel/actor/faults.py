"""What the program is told of failures that no actor has handled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import cast

from monarch_kernel.errors import MeshFailure

__all__ = ["FaultHook", "call_fault_hook"]

FaultHook = Callable[[MeshFailure], object]


def call_fault_hook(failure: MeshFailure) -> None:
    """Call ``monarch_kernel.actor.unhandled_fault_hook`` as it is now: it may have been replaced."""
    cast(FaultHook, sys.modules["monarch_kernel.actor"].unhandled_fault_hook)(failure)
