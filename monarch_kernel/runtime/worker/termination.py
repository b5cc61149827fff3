"""The end of a rank by SIGTERM: at once, or after work that a scheduler that preempts the job leaves time for.

The host agent and schedulers both send SIGTERM; `monarch_kernel.runtime.host.preemption` says how a rank tells them apart. At
the first signal from outside, functions in ``Termination.hooks`` may put the end off; the scheduler's SIGKILL bounds the time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from monarch_kernel.net.transport.forks import in_forks
from monarch_kernel.runtime.host.preemption import STOP_SIGNAL

__all__ = ["Termination"]


class Termination:
    """Handles SIGTERM in a rank.

    Attributes:
        hooks: functions that learn of a signal from outside, in its handler; each returns whether the end must wait for
            `finish`.
        has_started: whether the process ends now.
        is_ending: whether the main thread has left the user's code and its own loop for that.
        by_signal: whether SIGTERM ends it.
        is_put_off: whether a signal has come, and the end waits for something.
    """

    def __init__(self) -> None:
        self.hooks: list[Callable[[], bool]] = []
        self.has_started = self.is_ending = self.by_signal = self.is_put_off = False
        self._must_end = False

    def install(self) -> None:
        """Handle SIGTERM from now on; call this in the main thread, in which `block_stop_signal` has been called."""
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def end_if_put_off(self) -> None:
        """End now, in the main thread, if a signal has come before."""
        if self.is_put_off:
            self.has_started = self.by_signal = True
        if self.has_started:
            raise SystemExit(0)

    def insist(self) -> None:
        """End now, in the main thread, if the exception of the handler was lost, as in a ``__del__``."""
        if self.has_started and not self.is_ending:
            raise SystemExit(0)

    def finish(self) -> None:
        """End, if a signal has come before; for any thread."""
        if self.is_put_off:
            self._must_end = True
            os.kill(os.getpid(), signal.SIGTERM)

    @in_forks(lambda termination: signal.SIG_DFL)
    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if self.has_started:
            return
        is_from_outside = not self._must_end and signal.sigtimedwait((STOP_SIGNAL,), 0) is None
        if is_from_outside and not self.is_put_off:
            self.is_put_off = sum(hook() for hook in self.hooks) > 0  # all are called
        if is_from_outside and self.is_put_off:
            return
        self.has_started = self.by_signal = True
        raise SystemExit(0)
