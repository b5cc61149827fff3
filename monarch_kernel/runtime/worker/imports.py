"""Interrupts during imports, finalizers and trace functions, of which none can be left at any line.

A library that is imported by half can often not be imported again. Python removes a module from ``sys.modules`` when its import
fails, but not the submodules that it has imported, and nothing undoes what they have registered elsewhere. After an interrupted
``import torch._dynamo`` each later one fails in this process, with *module 'sympy' has no attribute 'printing'* or *already
registered*. So an interrupt waits for the end of the import.

In a sync actor it also waits for the end of a finalizer (``__del__``): Python prints an exception that leaves one, and goes on.
On the main thread, KeyboardInterrupt is raised again then (`monarch_kernel.runtime.worker.swallowed_interrupts`).

It also waits until a debugger has left its trace function: Python stops tracing a thread whose trace function raises.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType

from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user

__all__ = ["TRACERS", "WAITS", "defers_interrupts", "defers_signal", "forget_torn_imports", "is_importing"]

_IMPORT = "<frozen importlib._bootstrap>"
TRACERS: list[str] = []
"""Folders of debuggers whose trace functions are called by code of the user."""
WAITS: list[str] = []
"""Files whose functions wait in a trace function until a person lets the code go on, and raise interrupts themselves."""


def defers_interrupts(frames: Sequence[FrameType]) -> bool:
    """Whether an interrupt of a sync actor has to wait, because a library is imported, or a finalizer or a debugger runs.

    Args:
        frames: the frames of the thread, the innermost first.
    """
    return is_importing(frames) or _is_tracing(frames) or any(frame.f_code.co_name == "__del__" for frame in frames)


def defers_signal(frames: Iterable[FrameType], *, insists: bool) -> bool:
    """Whether an interrupt of the main thread has to wait, because a library is imported or a debugger runs.

    Args:
        frames: the frames of the thread, the innermost first.
        insists: whether the interrupt also ends imports.
    """
    stack = list(frames)
    return (not insists and is_importing(stack)) or _is_tracing(stack)


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


def _is_tracing(frames: Iterable[FrameType]) -> bool:
    """Whether a trace function runs, or waits while it evaluates an expression."""
    is_innermost = True
    for frame in frames if TRACERS else ():
        file = frame.f_code.co_filename
        if file in WAITS or (is_innermost and file.startswith(tuple(TRACERS))):
            return True
        is_innermost = is_innermost and not is_machinery(file) and not is_user(frame)
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
