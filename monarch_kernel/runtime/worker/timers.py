"""Timers of a rank, which run also while an editor has stopped the rank at a breakpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["hide", "later"]


def hide(thread: threading.Thread) -> None:
    """Mark a thread of this package, which the debugger of an editor must neither stop nor list."""
    thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]


def later(seconds: float, function: Callable[..., Any], *args: Any) -> None:
    """Call a function on a separate thread, after this time."""
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.name = "monarch-timer"
    hide(timer)
    timer.start()
