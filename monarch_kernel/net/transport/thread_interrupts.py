"""Interrupts of threads that no signal reaches: where in such a thread KeyboardInterrupt may be raised.

Theory of operation
===================

Python runs signal handlers in the main thread. Another thread that runs the user's code (that of a subshell of the kernel) is
interrupted by whoever learns of the signal: `UserThread.strike`. What that does depends on where the thread is:

- it holds interrupts back, and counts them (`hold`): it is told;
- it waits for ranks in `Driver.wait`, which nothing may cut in two: its wait is woken, and raises when all is in order
  (`ThreadShield`);
- it runs the user's code (`user_code`): an asynchronous KeyboardInterrupt, which is seen at the next bytecode;
- it is in an event loop, which waits for the user's coroutine: that is cancelled (``cancel``);
- else it is about to run the user's code, or has just run it: the interrupt strikes the next code that it runs, if any.

The thread of an actor (`ActorThread`) is interrupted by a message that names what it runs. That message may even be handled by
the thread itself, which drives the transport while it waits: so it, too, is struck only when all is in order.

An asynchronous exception is delivered some time after it was set. So whoever leaves the user's code takes back what has not
been delivered, with the lock held under which it is set: it never strikes code that is not the user's (`_take_back`).
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
    """The calling thread, for as long as it runs code for the user.

    Attributes:
        cancel: cancels what the thread's event loop waits for on behalf of the user, if it does.
    """

    def __init__(self) -> None:
        self.cancel: Callable[[], object] | None = None
        self._ident = threading.get_ident()
        self._lock = threading.RLock()  # the main thread's handler may interrupt the main thread's handler
        self._in_user_code = False
        self._is_noted = False
        self._struck = False
        self._struck_at = 0.0
        self._holders: list[Callable[[], object]] = []
        self._shields: list[ThreadShield] = []

    def strike(self) -> None:
        """Interrupt the thread; from any other."""
        with self._lock:
            if self._holders:
                self._holders[-1]()
            elif self._shields:
                self._shields[-1].strike()
            elif self._in_user_code:
                now = time.monotonic()
                if self._struck and now < self._struck_at + _BURST_S:
                    return  # what handles the first one must not be struck by a second
                self._struck, self._struck_at = True, now
                _send(self._ident, KeyboardInterrupt)
            else:
                self.note()

    def note(self) -> None:
        """Have the user's code that the thread runs next raise KeyboardInterrupt, or wait no longer."""
        with self._lock:
            if self.cancel is not None:
                self.cancel()
            else:
                self._is_noted = True

    def enter_user_code(self) -> None:
        """From now on an interrupt may strike between any two bytecodes.

        Raises:
            KeyboardInterrupt: an interrupt came before, which has not told ``cancel``.
        """
        with self._lock:
            is_noted, self._is_noted = self._is_noted, False
            self._in_user_code = not is_noted
        if is_noted:
            raise KeyboardInterrupt

    def leave_user_code(self) -> None:
        """From now on none does; one that is on its way strikes what comes next. May be called twice."""
        with self._lock:
            is_on_its_way = self._take_back()
            self._in_user_code = False
            if is_on_its_way:
                self.note()

    @contextmanager
    def hold(self, note: Callable[[], object]) -> Iterator[None]:
        """Have ``note`` called for each interrupt, instead."""
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
        """Have a shield told, instead; whether an interrupt is on its way already."""
        with self._lock:
            pending = self._take_back()  # first: what it takes back can't strike between the two
            self._shields.append(shield)
            return pending

    def unshield(self, shield: ThreadShield) -> None:
        """End `shield`."""
        with self._lock:
            self._shields.remove(shield)

    def _take_back(self) -> bool:
        """Take an exception back that was not delivered; whether there was one."""
        struck, self._struck = self._struck, False
        return struck and _take_back()


class ActorThread:
    """A thread that runs the code of an actor.

    Attributes:
        ident: of the thread, once it runs.
        in_user_code: whether it does so now; else it is never struck, and needs no shield.
    """

    def __init__(self) -> None:
        self.ident = 0
        self.in_user_code = False
        self._lock = threading.Lock()
        self._struck = False
        self._shields: list[ThreadShield] = []

    def strike(self) -> None:
        """Interrupt the user's code, if it runs that; from any thread, also from the one that is struck."""
        with self._lock:
            if not self.in_user_code:
                return
            if self._shields:
                self._shields[-1].strike()
            else:
                self._struck = True
                _send(self.ident, KeyboardInterrupt)

    def take_back(self) -> None:
        """Have nothing raised that has not been delivered yet; for the thread itself, when it has left the user's code."""
        with self._lock:
            struck, self._struck = self._struck, False
            if struck:
                _take_back()

    def shield(self, shield: ThreadShield) -> bool:
        """Have a shield told, instead; what was on its way is raised here."""
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
    """Have an exception raised in a thread, in place of one that is on its way to it."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


def _take_back() -> bool:
    """Take back what is on its way to the calling thread; whether there was something.

    It is delivered, and caught: until Python 3.12 the interpreter looks for such an exception, in all threads, until it has
    found one, and each thread that has a trace function (that of a debugger, say) then looks for ever.
    """
    try:
        _deliver()
    except KeyboardInterrupt:
        return True
    return False


def _deliver() -> None:
    """Does nothing; the interpreter delivers what is on its way where a function begins, and where a loop goes around."""
    for _ in range(2):
        pass


USER_THREAD: ContextVar[UserThread | None] = ContextVar("USER_THREAD", default=None)
"""The thread that runs the code of this context for the user, if it is one that no signal reaches."""


ACTOR_THREAD: ContextVar[ActorThread | None] = ContextVar("ACTOR_THREAD", default=None)
"""The thread of the actor that this code belongs to; code that the actor runs elsewhere may inherit it."""


class ThreadShield:
    """Keeps KeyboardInterrupt out of a user's thread, but for the moments when it is ``open``.

    Args:
        thread: the calling thread.
        wake: wakes its wait, wherever it waits.
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
        if self._pending and not isinstance(error, KeyboardInterrupt):  # it counts for more than another error
            raise KeyboardInterrupt

    def strike(self) -> None:
        """Note an interrupt, and wake the thread; from any other."""
        self._pending = True
        self._wake()

    def expose(self) -> None:
        """Let interrupts through from now on, also one that was held back; to be called in a ``try`` that closes again."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt
        self.open = True
