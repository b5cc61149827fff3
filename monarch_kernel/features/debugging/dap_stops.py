"""Interrupts of code that an editor has stopped at a breakpoint.

Theory of operation. At a breakpoint pydevd, the debugger within debugpy, holds the thread in its trace function. An interrupt
must not be raised within pydevd, which would never notice that the thread goes on. So the interrupt waits
(`monarch_kernel.runtime.worker.imports`), and makes the thread go on as *Continue* in the editor does. When pydevd has told the
editor so, `Stops.hold` raises KeyboardInterrupt, at the line at which the code stands. Python then stops tracing the thread; it
is traced again from the end of the request. What the code does until then, such as in ``finally``, does not stop any more.

pydevd also stops a thread at exceptions, and because another thread is at a breakpoint. It must not do so in a library that
code of this package has called: that thread may hold the I/O lock, without which no command of the editor arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user
from monarch_kernel.runtime.diagnostics.thread_frames import callers_of
from monarch_kernel.runtime.worker.executor import Executor
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["Stops", "answer_continue_at_once", "drop_late_steps", "explain_interrupts", "is_our_thread"]

_OURS = "monarch-"
"""Names of the threads of this package begin with this."""
_USERS = ("monarch-actor-", "monarch-coroutine", "monarch-worker-loop")
"""Names of those that run code of the user begin with one of these."""
_BREAKPOINT = 111
"""pydevd's reason of a stop at a breakpoint (``CMD_SET_BREAK``)."""
_SUSPENDED = 2
"""pydevd's state of a thread that is stopped (``STATE_SUSPEND``)."""


class Stops:
    """The threads of a rank that stand at a breakpoint of an editor.

    Args:
        rank: the rank.
        resume: makes all threads go on.
    """

    def __init__(self, rank: Rank, resume: Callable[[], object]) -> None:
        self._rank = rank
        self._resume = resume
        self._waiting: set[int] = set()

    def hold(self, wait: Callable[[], object], *, raises: bool = True) -> None:
        """Wait until the editor lets this thread go on, or an interrupt does.

        Args:
            wait: waits for either.
            raises: whether to raise an interrupt here; otherwise it is raised when the thread has left pydevd.

        Raises:
            KeyboardInterrupt: it was an interrupt.
        """
        thread = threading.get_ident()
        executor = next((each for each in self._executors() if each.thread_id == thread), None)
        if executor is None:
            wait()
            return
        request = executor.current
        self._waiting.add(thread)  # before it looks for an interrupt, which looks for the thread
        try:
            if request and executor.interrupted == request:
                self._resume()
            else:
                wait()
        finally:
            self._waiting.discard(thread)
        if raises and request and executor.interrupted == request != executor.delivered:
            executor.delivered = request
            executor.is_traced = True  # so it is traced again when it leaves the user's code
            raise KeyboardInterrupt

    def interrupt(self, id: int) -> None:
        """Make a request go on that stands at a breakpoint, so that the interrupt reaches its code."""
        for executor in self._executors():
            if executor.thread_id in self._waiting and (executor.current == id or id in executor.interrupters):
                self._resume()

    def install(self, debugger: Any) -> None:
        """Make pydevd wait by means of `hold`.

        Args:
            debugger: pydevd's class ``PyDB``.
        """
        original = debugger.do_wait_suspend

        def do_wait_suspend(self_: Any, thread: Any, frame: Any, event: str, *args: Any, **options: Any) -> None:
            is_exception = event == "exception"  # there pydevd prints errors, and goes on
            if is_our_thread(thread) or (thread.stop_reason != _BREAKPOINT and _is_called_by_us(frame)):
                if is_exception:
                    self._resume()
                return  # it stops in the user's code, if at all
            self.hold(lambda: original(self_, thread, frame, event, *args, **options), raises=not is_exception)

        debugger.do_wait_suspend = do_wait_suspend

    def _executors(self) -> list[Executor]:
        return [self._rank.main, *list(self._rank.actors.values())]


def answer_continue_at_once(notification: Any) -> None:
    """Make pydevd answer *continue* also if no thread is stopped: an interrupt may have come first.

    Otherwise it answers when the next stopped thread goes on.

    Args:
        notification: pydevd's class ``ThreadsSuspendedSingleNotification``.
    """
    original = notification.add_on_resumed_callback

    def add(self: Any, callback: Callable[[], object]) -> None:
        original(self, callback)
        with self._lock:
            if self._suspended_thread_id_to_thread:  # the first of them to go on makes the calls
                return
        with self._callbacks_lock:
            callbacks, self._callbacks = self._callbacks, []
        for answer in callbacks:
            answer()

    notification.add_on_resumed_callback = add


def drop_late_steps(api: Any, find: Callable[[str], Any]) -> None:
    """Make pydevd ignore steps of a thread that an interrupt has made go on; otherwise it makes them at the next breakpoint.

    Args:
        api: pydevd's class ``PyDevdAPI``.
        find: returns the thread with an id.
    """
    original = api.request_step

    def request_step(self: Any, py_db: Any, thread_id: str, command: int) -> None:
        info = getattr(find(thread_id), "additional_info", None)
        if info is None or info.pydev_state == _SUSPENDED:
            original(self, py_db, thread_id, command)

    api.request_step = request_step


def explain_interrupts(factory: Any) -> None:
    """Make pydevd's console say what an interrupt does; otherwise it says that the thread is not debugged any more.

    Args:
        factory: pydevd's class ``NetCommandFactoryJson``.
    """
    original = factory.make_console_message

    def make_console_message(self: Any, text: str) -> Any:
        if "KeyboardInterrupt" in text and "callback set in sys.settrace" in text:
            text = "interrupted; the breakpoints hold again when this cell or call has ended\n"
        return original(self, text)

    factory.make_console_message = make_console_message


def is_our_thread(thread: threading.Thread) -> bool:
    """Whether a thread runs only code of this package, which an editor must not stop."""
    return thread.name.startswith(_OURS) and not thread.name.startswith(_USERS)


def _is_called_by_us(frame: FrameType | None) -> bool:
    """Whether this package has called a frame, and not code of the user."""
    for caller in callers_of(frame):
        if is_machinery(caller.f_code.co_filename):
            return True
        if is_user(caller):
            return False
    return False
