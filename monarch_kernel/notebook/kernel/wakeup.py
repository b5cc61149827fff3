"""Ensures that the main thread handles SIGINT even while it waits in a system call.

Theory of operation
===================

Python runs the handler of a signal in the main thread, between two bytecodes. While the main thread waits in a system call, as
in ``await asyncio.sleep(60)`` or ``time.sleep(60)``, the signal has to end that call first. Two races prevent it:

1. The signal arrives after the main thread has checked for signals, and before it enters the system call.
2. The operating system delivers the signal to another thread.

The handler then runs only when the system call ends by itself, a minute later in the examples.

Python also writes the number of each signal to a socket (`signal.set_wakeup_fd`). The thread of the control channel reads it,
and `RETRY_S` later sends another signal, `WAKE_SIGNAL`, to the main thread alone, which waits in its system call by then. That
signal ends the system call and does nothing else. Python then runs the handler of SIGINT if it has not run yet, so no
interrupt counts twice.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading

__all__ = ["RETRY_S", "WAKE_SIGNAL", "Wakeup"]

RETRY_S = 0.05
"""Seconds after which the main thread has run the handler of a signal, or waits in a system call."""

WAKE_SIGNAL = signal.SIGRTMIN + 2
"""Ends a system call of the main thread, and does nothing else."""

_READ_NBYTES = 4096


class Wakeup:
    """Ensures that the main thread handles each SIGINT, for the life of the process. Create it in the main thread.

    Args:
        loop: an event loop that does not run in the main thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived, self._noted = socket.socketpair()
        self._arrived.setblocking(False)
        self._noted.setblocking(False)
        signal.signal(WAKE_SIGNAL, lambda signum, frame: None)
        os.register_at_fork(after_in_child=self._uninstall)  # else a child would write to the socket of its parent
        loop.call_soon_threadsafe(loop.add_reader, self._arrived, self._read)

    def install(self) -> None:
        """Make Python report signals here, unless an event loop of the user receives them; call it in the main thread."""
        previous = signal.set_wakeup_fd(self._noted.fileno(), warn_on_full_buffer=False)
        if previous not in (-1, self._noted.fileno()):
            signal.set_wakeup_fd(previous)

    def _uninstall(self) -> None:
        previous = signal.set_wakeup_fd(-1)
        if previous != self._noted.fileno():
            signal.set_wakeup_fd(previous)

    def _read(self) -> None:
        if signal.SIGINT in self._arrived.recv(_READ_NBYTES):
            self._loop.call_later(RETRY_S, signal.pthread_kill, threading.main_thread().ident or 0, WAKE_SIGNAL)
