"""Interrupts during imports and finalizers: a library that is imported by half can often not be imported again.

Python removes a module from ``sys.modules`` when its import fails, but not the submodules that it has imported, and nothing
undoes what they have registered elsewhere. After an interrupted ``import torch._dynamo`` each later one fails in this process,
with *module 'sympy' has no attribute 'printing'* or *already registered*. So an interrupt waits for the end of the import.

In a sync actor it also waits for the end of a finalizer (``__del__``): Python prints an exception that leaves one, and goes on.
On the main thread, KeyboardInterrupt is raised again then (`monarch_kernel.runtime.worker.swallowed_interrupts`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType

from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user

__all__ = ["defers_interrupts", "forget_torn_imports", "is_importing"]

_IMPORT = "<frozen importlib._bootstrap>"


def defers_interrupts(frames: Sequence[FrameType]) -> bool:
    """Whether an interrupt of a sync actor has to wait, because a library is imported or a finalizer runs.

    Args:
        frames: the frames of the thread, the innermost first.
    """
    return is_importing(frames) or any(frame.f_code.co_name == "__del__" for frame in frames)


def is_importing(frames: Iterable[FrameType]) -> bool:
    """Whether code of a library runs because it is imported; a module of the user's own may be left at any line.

    Args:
        frames: the frames of the thread, the innermost first.
    """
    for frame in frames:
        if frame.f_code.co_filename == _IMPORT:
            return True
        if is_user(frame) and not is_machinery(frame.f_code.co_filename):
            return False
    return False


def forget_torn_imports(trace: TracebackType | None) -> None:
    """Forget the submodules of modules whose import an exception has left, so that they are imported again with these."""
    torn = set()
    while trace is not None:
        if (
            trace.tb_frame.f_code.co_name == "<module>"
        ):  # Python leaves the frames of the import itself out of tracebacks
            torn.add(str(trace.tb_frame.f_globals.get("__name__", "")))
        trace = trace.tb_next
    prefixes = tuple(f"{name}." for name in torn if name not in sys.modules)
    for name in [name for name in sys.modules if name.startswith(prefixes)] if prefixes else ():
        del sys.modules[name]
