"""Where an interrupt (SIGINT) may strike in the notebook's process.

KeyboardInterrupt can be raised between any two bytecodes. In the user's code that is what everybody expects. In the code
around it the price is high: ipykernel would not reply to the cell, and a cell that ranks run would go on there, unseen.
So our kernel lets interrupts through to the user's code only (``notebook/kernel/interrupts.py``), and in any IPython
they are counted while a cell runs on ranks, and acted upon when nothing is half done (`HeldInterrupts`).
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
    """Counts interrupts of this thread, instead of raising them, as long as it is entered.

    Args:
        others: interrupts what runs on other threads; called for each interrupt of the main thread, the only one to learn
            of it.

    Attributes:
        count: interrupts so far.
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
        """Raise the next one, too, while something waits that only that can end; to be entered in a ``try``."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False
