"""Interrupts of threads that no signal reaches: where KeyboardInterrupt may be raised in such a thread.

Theory of operation
===================

Python runs signal handlers in the main thread. Another thread that runs the user's code (that of a subshell of the kernel) is
interrupted by the code that learns of the signal, with `UserThread.interrupt`. The effect depends on where the thread is:

- If it holds interrupts back, and counts them (`hold`), the counter is called.
- If it waits for ranks in `Driver.wait`, which must not be interrupted midway, its wait wakes up, and raises when the state
  is consistent (`ThreadShield`).
- If it runs the user's code (`user_code`), it gets an asynchronous KeyboardInterrupt, raised at the next bytecode.
- If it is in an event loop that waits for the user's coroutine, the coroutine is cancelled (``cancel``).
- Otherwise it is about to run the user's code, or has just run it: the interrupt applies to the next code that it runs, if any.

The thread of an actor (`ActorThread`) is interrupted by a message that names what it runs. The thread itself may even handle
that message, since it drives the transport while it waits: so it, too, is interrupted only when the state is consistent.

An asynchronous exception is delivered some time after it was set. So a thread that leaves the user's code takes back an
undelivered one, with the lock held under which it is set: the exception never reaches code that is not the user's
(`_take_back`).

Locks
-----

KeyboardInterrupt may be raised between any two bytecodes. ``with lock:`` has none between taking a lock and its block if the
lock is one of C code. ``lock.acquire()`` before a ``try`` has one, as does ``with condition:``, because
`threading.Condition.__enter__` is Python code: an interrupt there leaves the lock taken for good. So code that may run in a
thread of the user enters locks by ``with``, and a condition by its lock.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

__all__ = ["ACTOR_THREAD", "USER_THREAD", "ActorThread", "ThreadShield", "UserThread"]

_BURST_S = 0.1


class UserThread:
    """The calling thread, while it runs code for the user.

    Attributes:
        cancel: cancels the user's coroutine for which the thread's event loop waits, if there is one.
    """

    def __init__(self) -> None:
        self.cancel: Callable[[], object] | None = None
        self._ident = threading.get_ident()
        self._lock = threading.RLock()  # the main thread's handler may interrupt the main thread's handler
        self._in_user_code = False
        self._is_noted = False
        self._interrupted = False
        self._interrupted_at = 0.0
        self._holders: list[Callable[[], object]] = []
        self._shields: list[ThreadShield] = []

    def interrupt(self) -> None:
        """Interrupt the thread; call this from any other."""
        with self._lock:
            if self._holders:
                self._holders[-1]()
            elif self._shields:
                self._shields[-1].interrupt()
            elif self._in_user_code:
                now = time.monotonic()
                if self._interrupted and now < self._interrupted_at + _BURST_S:
                    return  # a second one must not interrupt the handling of the first
                self._interrupted, self._interrupted_at = True, now
                _send(self._ident, KeyboardInterrupt)
            else:
                self.note()

    @property
    def is_noted(self) -> bool:
        """Whether an interrupt has come that applies to the code that the thread runs next."""
        return self._is_noted

    def note(self) -> None:
        """Make the user's code that the thread runs next raise KeyboardInterrupt, or cancel what it waits for."""
        with self._lock:
            if self.cancel is not None:
                self.cancel()
            else:
                self._is_noted = True

    def enter_user_code(self) -> None:
        """Mark the start of the user's code, in which an interrupt may be raised between any two bytecodes.

        Raises:
            KeyboardInterrupt: an interrupt came before, and did not call ``cancel``.
        """
        with self._lock:
            is_noted, self._is_noted = self._is_noted, False
            self._in_user_code = not is_noted
        if is_noted:
            raise KeyboardInterrupt

    def leave_user_code(self) -> None:
        """Mark the end of the user's code; an undelivered interrupt applies to the next. May be called twice."""
        with self._lock:
            is_on_its_way = self._take_back()
            self._in_user_code = False
            if is_on_its_way:
                self.note()

    @contextmanager
    def hold(self, note: Callable[[], object]) -> Iterator[None]:
        """Call ``note`` for each interrupt, instead of raising it."""
        with self._lock:
            if self._take_back():
                note()
            self._holders.append(note)
        try:
            yield
        finally:
            with self._lock:
                self._holders.remove(note)

    def shield(self, shield: ThreadShield) -> bool:
        """Send interrupts to a shield instead; returns whether one is on its way already."""
        with self._lock:
            pending = self._take_back()  # first: what it takes back can't be raised between the two
            self._shields.append(shield)
            return pending

    def unshield(self, shield: ThreadShield) -> None:
        """End `shield`."""
        with self._lock:
            self._shields.remove(shield)

    def _take_back(self) -> bool:
        """Take back an undelivered exception; returns whether there was one."""
        interrupted, self._interrupted = self._interrupted, False
        return interrupted and _take_back()


class ActorThread:
    """A thread that runs the code of an actor.

    Attributes:
        ident: of the thread, once it runs.
        in_user_code: whether it runs the user's code now; otherwise it is never interrupted, and needs no shield.
    """

    def __init__(self) -> None:
        self.ident = 0
        self.in_user_code = False
        self._lock = threading.Lock()
        self._interrupted = False
        self._shields: list[ThreadShield] = []

    def interrupt(self) -> None:
        """Interrupt the user's code, if the thread runs it; call this from any thread, including this one."""
        with self._lock:
            if not self.in_user_code:
                return
            if self._shields:
                self._shields[-1].interrupt()
            else:
                self._interrupted = True
                _send(self.ident, KeyboardInterrupt)

    def take_back(self) -> None:
        """Take back an undelivered exception; the thread itself calls this after it has left the user's code."""
        with self._lock:
            interrupted, self._interrupted = self._interrupted, False
            if interrupted:
                _take_back()

    def shield(self, shield: ThreadShield) -> bool:
        """Send interrupts to a shield instead; raises an undelivered one here."""
        try:
            with self._lock:
                self._shields.append(shield)
            _deliver()
        except BaseException:
            self.unshield(shield)
            raise
        return False

    def unshield(self, shield: ThreadShield) -> None:
        """End `shield`."""
        with self._lock:
            if shield in self._shields:
                self._shields.remove(shield)


def _send(ident: int, error: type[BaseException]) -> None:
    """Raise an exception in a thread, in place of an undelivered one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


def _take_back() -> bool:
    """Take back an undelivered exception of the calling thread; returns whether there was one.

    The exception is delivered, and caught: until Python 3.12 the interpreter looks for such an exception, in all threads, until
    it has found one, and each thread with a trace function (that of a debugger, say) then looks forever.
    """
    try:
        _deliver()
    except KeyboardInterrupt:
        return True
    return False


def _deliver() -> None:
    """Do nothing; the interpreter delivers asynchronous exceptions where a function starts, and where a loop repeats."""
    for _ in range(2):
        pass


USER_THREAD: ContextVar[UserThread | None] = ContextVar("USER_THREAD", default=None)
"""The thread that runs the code of this context for the user, if no signal reaches that thread."""


ACTOR_THREAD: ContextVar[ActorThread | None] = ContextVar("ACTOR_THREAD", default=None)
"""The thread of the actor that this code belongs to; code that the actor runs elsewhere may inherit it."""


class ThreadShield:
    """Defers KeyboardInterrupt in a user's thread, except while it is ``open``.

    Args:
        thread: the calling thread.
        wake: wakes the thread, wherever it waits.
    """

    __slots__ = ("_pending", "_thread", "_wake", "open")

    def __init__(self, thread: UserThread | ActorThread, wake: Callable[[], object]) -> None:
        self.open = False
        self._thread = thread
        self._wake = wake
        self._pending = False

    def __enter__(self) -> ThreadShield:
        self._pending = self._thread.shield(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._thread.unshield(self)
        if self._pending and not isinstance(error, KeyboardInterrupt):  # it takes precedence over another error
            raise KeyboardInterrupt

    def interrupt(self) -> None:
        """Record an interrupt, and wake the thread; call this from any other."""
        self._pending = True
        self._wake()

    def expose(self) -> None:
        """Let interrupts through, including a deferred one; call this in a ``try`` whose ``finally`` closes the shield."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt
        self.open = True
