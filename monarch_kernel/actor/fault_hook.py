"""What the program is told of failures that no actor has handled."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import cast

from monarch_kernel.errors import MeshFailure
from monarch_kernel.runtime.controller.unhandled import show_fault

__all__ = ["FaultHook", "call_fault_hook"]

FaultHook = Callable[[MeshFailure], object]


def call_fault_hook(failure: MeshFailure) -> None:
    """Call ``monarch_kernel.actor.unhandled_fault_hook`` as it is now: it may have been replaced."""
    hook = cast(FaultHook, sys.modules["monarch_kernel.actor"].unhandled_fault_hook)
    try:
        hook(failure)
    except (
        BaseException
    ) as error:  # the user's, which must not hide the failure; an exit would be that of this thread only
        where = error.__traceback__.tb_next if error.__traceback__ is not None else None
        told = "".join(traceback.format_exception(type(error), error, where))
        sys.stderr.write(f"unhandled_fault_hook failed:\n{told}It was told of this:\n")
        show_fault(failure)
