"""Defers interrupts (SIGINT) of the notebook's process while a cell runs on ranks.

Python can raise KeyboardInterrupt between any two bytecodes. In the user's code that is expected. In the code around it,
ipykernel would not reply to the cell, and a cell on ranks would continue to run there without being shown. So our kernel
raises interrupts in the user's code only (``notebook/kernel/interrupts.py``). In any IPython, `HeldInterrupts` counts them
while a cell runs on ranks, and the cell handles them between its turns.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any

from monarch_kernel.net.transport.forks import in_forks
from monarch_kernel.net.transport.thread_interrupts import USER_THREAD

__all__ = ["HeldInterrupts"]


class HeldInterrupts:
    """Context manager that counts interrupts of this thread instead of raising them.

    Args:
        others: interrupts what runs on other threads; called for each interrupt of the main thread, which alone receives
            the signal.

    Attributes:
        count: number of interrupts so far.
    """

    def __init__(self, others: Callable[[], object] = lambda: None) -> None:
        self.count = 0
        self._raises = False
        self._others = others
        self._before: Any = None
        self._held: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> HeldInterrupts:
        thread = USER_THREAD.get()
        if threading.current_thread() is threading.main_thread():
            if callable(signal.getsignal(signal.SIGINT)):
                self._before = signal.signal(signal.SIGINT, self._on_signal)
        elif thread is not None:
            self._held = thread.hold(self._note)
        self._held.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._held.__exit__(kind, error, tb)
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @in_forks(lambda held: held._before)
    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._note()
        self._others()

    def _note(self) -> None:
        self.count += 1
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """Also raise the next interrupt, to end a wait that nothing else can end; enter this inside a ``try``."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False
