"""What the program is told of failures that no actor has handled."""

from __future__ import annotations

import sys

from monarch_kernel.controller.faults import show_fault
from monarch_kernel.errors import MeshFailure

__all__ = ["call_fault_hook", "unhandled_fault_hook"]


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """Told of each failure that no actor has handled; put a function of your own into ``monarch_kernel.actor`` in its place.

    This one writes it to stderr. It is called on a thread of its own, one failure at a time, and may take long.
    """
    show_fault(failure)


def call_fault_hook(failure: MeshFailure) -> None:
    """Call the hook as it is now."""
    sys.modules["monarch_kernel.actor"].unhandled_fault_hook(failure)
