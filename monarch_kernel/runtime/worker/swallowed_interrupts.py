"""Interrupts that Python swallows: it only reports an exception of a ``__del__``, and of a callback of a weak reference."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from monarch_kernel.runtime.worker.executor import Executor

__all__ = ["repeat_swallowed"]


def repeat_swallowed(executor: Executor, interrupt: Callable[[int, bool], object], after_s: float) -> None:
    """Raise KeyboardInterrupt again in a request in which Python has swallowed it; other exceptions are reported as before.

    Args:
        executor: the executor of the calling thread.
        interrupt: interrupts a request, by its id, on another thread; the second argument is whether to abort process groups.
        after_s: when, in seconds: the thread has to leave what Python calls when it has swallowed an exception.
    """
    thread, process, report = threading.get_ident(), os.getpid(), sys.unraisablehook

    def again(id: int) -> None:
        time.sleep(after_s)
        interrupt(id, False)

    def hook(swallowed: Any, /) -> None:
        id = executor.current
        is_here = threading.get_ident() == thread and os.getpid() == process
        if swallowed.exc_type is not KeyboardInterrupt or not is_here or not id or executor.delivered != id:
            report(swallowed)
            return
        executor.delivered = 0
        _thread.start_new_thread(again, (id,))  # not by `threading`: the interrupt may have arrived within it

    sys.unraisablehook = hook
