"""The calls of other processes that code of this process has waited for, for longer than a moment."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch_kernel.runtime.diagnostics.stacks import AwaitedCall
from monarch_kernel.runtime.rpc.waits import Wait

__all__ = ["AwaitedCalls"]


class _Noted(NamedTuple):
    wait: weakref.ref[Wait]  # its future has the answers, which may be large
    since: float
    thread: int


class AwaitedCalls:
    """Keeps the waits that were reported because they last (`FutureOwner.on_slow_wait`), until they end.

    Args:
        waiting_for: returns the processes that have not answered a request; for the I/O thread.
    """

    def __init__(self, waiting_for: Callable[[int], Sequence[int]]) -> None:
        self._waiting_for = waiting_for
        self._noted: dict[int, _Noted] = {}

    def note(self, wait: Wait) -> None:
        """Note a wait, on the thread that waits; again has no effect."""
        self._forget()
        if not wait.future.description or id(wait) in self._noted:
            return
        self._noted[id(wait)] = _Noted(weakref.ref(wait), time.monotonic() - wait.lasts_s, threading.get_ident())

    def describe(self) -> tuple[AwaitedCall, ...]:
        """Describe the waits that last, the oldest first; on the I/O thread."""
        self._forget()
        now = time.monotonic()
        found = [
            AwaitedCall(wait.future.description, tuple(procs), now - since, thread)
            for noted, since, thread in self._noted.copy().values()
            if (wait := noted()) is not None
            and (procs := self._waiting_for(wait.future.id) if wait.future.id else wait.future.procs)
        ]
        return tuple(sorted(found, key=lambda each: -each.age_s))

    def _forget(self) -> None:
        for key, noted in self._noted.copy().items():
            wait = noted.wait()
            if wait is None or wait.over or wait.future.done():
                self._noted.pop(key, None)
