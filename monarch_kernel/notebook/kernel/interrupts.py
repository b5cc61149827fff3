"""Interrupts the user's code in the main shell and in subshells, including cells that await.

Theory of operation
===================

Both ways in which a frontend interrupts end in SIGINT: Jupyter signals the kernel's process group, and ipykernel answers an
``interrupt_request`` by doing the same. The signal handler runs in the main thread, between two bytecodes, and knows from the
stack what the main thread is doing. It raises only in code that users wrote: cells, functions that IPython calls before and
after each cell, callbacks of widgets. So no interrupt hits the kernel itself.

While the kernel handles a request and runs no such code, such as before the first statement of a cell and between two
statements, the handler notes the interrupt. The next statement of the request then raises it, or the callback of a comm. An
interrupt of the code of a user that rewrites cells is also noted: IPython would not answer a cell that ends there.

An interrupt that comes after the last statement of a cell, or between two cells, applies to the cell that waits for the main
shell, if one does: "Run All" sends all cells at once, and an interrupt ends the run. It never hits a cell that arrives later.
The thread of the shell channel records which cells wait (`WaitingCells`). A cell that arrives while the main thread is idle
does not count: the signal may have been sent before that cell. A message of a comm that waits is interrupted in the same way,
when its callback begins. It does not use up the interrupt of the cells that wait: with widgets on the page, messages come
between the cells of a run. All this holds for the cells that wait for a subshell, too.

A cell that awaits has left the stack. The handler cancels its task, and the cell sees the cancellation as a KeyboardInterrupt
(`_steps`). ipykernel's own handler cancels without waking the event loop, so that nothing happens until the next message. If
the event loop is about to resume the cell, and the cell never awaits again, a cancellation would come too late; then the cell
is interrupted as it resumes.

Subshells run their cells on other threads, which no signal reaches; the handler interrupts these threads (`Subshells`).

The handler must also run while the main thread waits in a system call; the module `wakeup` ensures that.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any, TypeVar

from ipykernel.comm import Comm
from ipykernel.ipkernel import IPythonKernel
from IPython.core.events import EventManager
from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.net.transport.forks import Forking, in_forks
from monarch_kernel.net.transport.thread_interrupts import USER_THREAD, UserThread
from monarch_kernel.notebook.kernel.waiting_cells import Subshells, WaitingCells
from monarch_kernel.notebook.kernel.wakeup import Wakeup

__all__ = ["KernelInterrupts"]

T = TypeVar("T")

# Functions that call the user's code, and handle whatever it raises.
_CALLERS = frozenset(
    function.__code__
    for function in (
        InteractiveShell.run_code,
        InteractiveShell.user_expressions,
        InteractiveShell.transform_cell,
        InteractiveShell.transform_ast,
        IPythonKernel.do_complete,
        IPythonKernel.do_inspect,
        EventManager.trigger,
        Comm.handle_msg,
        Comm.handle_close,
    )
)
AGAIN_S = 0.02
"""Delay, in seconds, after which an interrupt that came while the kernel forked is repeated."""

# IPython shows or discards what the user's code raises in these, and continues.
_CONTINUING = (EventManager.trigger.__code__, InteractiveShell.user_expressions.__code__)

# Runs if an interrupt came just before the user's code or just after it: IPython reports what this raises.
_INTERRUPTED = compile("raise KeyboardInterrupt", "<interrupted>", "exec")


class _Request:
    """A request that the main thread handles.

    Attributes:
        in_user_code: whether the user's code runs for it now.
        next_ids: ids of the cells and messages that waited at an interrupt that the user's code has not raised.
    """

    def __init__(self) -> None:
        self.in_user_code = False
        self.next_ids: frozenset[str] = frozenset()
        self._is_interrupted = False

    @property
    def is_interrupted(self) -> bool:
        """Whether an interrupt was noted that no code of the user has raised."""
        return self._is_interrupted

    def note(self, next_ids: frozenset[str] = frozenset()) -> None:
        """Make the user's code that runs next raise KeyboardInterrupt: that of this request, or of the first of these."""
        self._is_interrupted = True
        self.next_ids = next_ids

    def enter_user_code(self) -> None:
        """Note that the user's code starts, or resumes after a wait.

        Raises:
            KeyboardInterrupt: an interrupt came before.
        """
        self.in_user_code = True  # first: from here on the signal handler raises
        if self._is_interrupted:
            self._is_interrupted, self.next_ids = False, frozenset()
            raise KeyboardInterrupt

    def leave_user_code(self) -> None:
        """Note that the user's code has ended, or waits; may be called twice."""
        self.in_user_code = False


class _Awaited(_Request):
    """A cell that awaits, with the task that runs it on its event loop.

    Attributes:
        is_cancelled: whether a cancellation by `cancel` is on its way to the cell.
    """

    def __init__(self, task: asyncio.Future[Any]) -> None:
        super().__init__()
        self.is_cancelled = False
        self._task = task
        self._loop = asyncio.get_running_loop()

    def cancel(self, next_ids: frozenset[str] = frozenset()) -> None:
        """Cancel the task, or make its next step raise, whichever comes first; callable from any thread and signal handler."""
        self.note(next_ids)
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._is_interrupted and not self._task.done():
            self._is_interrupted, self.next_ids = False, frozenset()
            self.is_cancelled = True
            self._task.cancel()


class KernelInterrupts:
    """Handles SIGINT for a kernel by interrupting the user's code.

    Args:
        call_later: calls a function on another thread after a number of seconds; a signal handler may call it.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], object]], object]) -> None:
        self._call_later = call_later
        self._wakeup: Wakeup | None = None
        self._forking = Forking()
        self._subshells = Subshells()
        self._awaited: dict[int, _Awaited] = {}
        self._request: _Request | None = None  # the request that the main thread handles
        self._waiting = WaitingCells()  # for the main shell

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make an event loop of another thread ensure that the main thread handles SIGINT soon."""
        self._wakeup = Wakeup(loop)

    def install(self) -> None:
        """Handle SIGINT from now on, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.interrupt)
            if self._wakeup is not None:
                self._wakeup.install()

    @in_forks(lambda kernel: signal.default_int_handler)
    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Interrupt all code of the user that runs; the handler of SIGINT."""
        if self._forking.is_now:  # Python would discard an exception raised now
            self._call_later(AGAIN_S, partial(self._interrupt_again, self._request))
            return
        self.interrupt_subshells()
        caller = _caller_of(frame or sys._getframe(1))  # a repeated interrupt has no frame
        request, awaited = self._request, self._awaited.get(threading.get_ident())
        waiting = self._waiting.waiting
        if caller in _CONTINUING and request is not None:
            request.note(waiting)
        if caller is not None or any(each is not None and each.in_user_code for each in (request, awaited)):
            raise KeyboardInterrupt
        if awaited is not None:
            awaited.cancel(waiting)
        elif request is not None:
            request.note(waiting)
        else:
            self._waiting.next_ids = waiting

    def _interrupt_again(self, request: _Request | None) -> None:
        if self._request is request:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def interrupt_subshells(self) -> None:
        """Interrupt what runs in other threads than the main one."""
        self._subshells.interrupt()

    def cell_arrived(self, id: str, subshell: str | None, *, is_message: bool = False) -> None:
        """Note a cell or a message of a comm, on the thread of the shell channel, before its shell gets it.

        Args:
            id: of the cell or the message.
            subshell: for which it waits; None for the main shell.
            is_message: whether it is a message of a comm.
        """
        if subshell is None:
            self._waiting.arrive(id, is_busy=self._request is not None, is_message=is_message)
        else:
            self._subshells.cell_arrived(subshell, id, is_message=is_message)

    def cell_starts(self, id: str) -> None:
        """Interrupt the cell or the message that starts, in the thread that handles it, if an interrupt came while it waited.

        A cell that arrived before those that waited starts first, and is not interrupted; the interrupt still applies to them.
        It also applies to the others if a message calls no code of the user.
        """
        if threading.current_thread() is not threading.main_thread():
            self._subshells.cell_starts(id)
        elif self._request is not None and (applies_to := self._waiting.start(id)):
            self._request.note(applies_to)

    def cell_ended(self, id: str) -> None:
        """Forget a cell or a message; a cell may have been aborted before it started."""
        self._waiting.end(id)
        self._subshells.cell_ended(id)

    @contextmanager
    def request(self, subshell: str | None) -> Iterator[None]:
        """Enclose the handling of a request by a thread of the kernel, from before the kernel reports that it is busy."""
        if threading.current_thread() is not threading.main_thread():
            with self._subshells.request(subshell):
                yield
            return
        outer, self._request = self._request, (request := _Request())
        try:
            yield
        finally:
            self._request = outer
            self._waiting.next_ids |= request.next_ids

    @contextmanager
    def awaited(self, task: asyncio.Future[Any]) -> Iterator[None]:
        """Enclose the time in which the event loop of the calling thread runs a task for the user's cell."""
        ident = threading.get_ident()
        thread = USER_THREAD.get()
        awaited = self._awaited[ident] = _Awaited(task)
        if thread is not None:
            thread.cancel = awaited.cancel
        try:
            yield
        finally:
            del self._awaited[ident]
            if thread is not None:
                thread.cancel = None
                if awaited.is_interrupted:
                    thread.note()
            elif awaited.next_ids and self._request is not None:  # the cell has ended without being interrupted
                self._request.note(awaited.next_ids)

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Enclose code of the user that a request other than a cell runs; raises an interrupt that has come before."""
        request = self._current()
        try:
            if request is not None:
                request.enter_user_code()
            yield
        finally:
            _leave_user_code(None, request)

    def _current(self) -> _Request | UserThread | None:
        """The request that the calling thread handles."""
        return self._request if threading.current_thread() is threading.main_thread() else USER_THREAD.get()

    def guard(self, shell: InteractiveShell) -> None:
        """Make a shell run the user's code so that interrupts can reach it."""
        run_code: Callable[..., Coroutine[Any, Any, bool]] = shell.run_code

        async def guarded(code: CodeType, *args: Any, **kwargs: Any) -> bool:
            def run(code: CodeType) -> Coroutine[Any, Any, bool]:
                return run_code(code, *args, **kwargs)

            return await _steps(run, code, self._awaited.get(threading.get_ident()), self._current())

        vars(shell)["run_code"] = guarded
        user_expressions: Callable[[dict[str, str]], dict[str, Any]] = shell.user_expressions

        def evaluated(expressions: dict[str, str]) -> dict[str, Any]:
            try:
                return user_expressions(expressions)
            except KeyboardInterrupt:  # before the first or after the last expression; else it is the error of one
                return {}

        vars(shell)["user_expressions"] = evaluated
        trigger: Callable[..., None] = shell.events.trigger

        def triggered(event: str, *args: Any, **kwargs: Any) -> None:
            with suppress(KeyboardInterrupt):  # between two hooks, or while IPython showed the error of a hook
                trigger(event, *args, **kwargs)

        vars(shell.events)["trigger"] = triggered
        vars(shell)["transform_cell"] = self._noting(shell.transform_cell, "pass\n")
        vars(shell)["transform_ast"] = self._noting(shell.transform_ast, ast.parse("pass"))

    def _noting(self, transform: Callable[[T], T], instead: T) -> Callable[[T], T]:
        """Make an interrupt of code that rewrites a cell apply to the cell, of which nothing runs."""
        interrupted: weakref.WeakSet[_Request | UserThread] = weakref.WeakSet()

        def transformed(cell: T) -> T:
            request = self._current()
            if (
                request is not None and request in interrupted
            ):  # ipykernel rewrites a cell twice, and must come to the same result
                return instead
            try:
                return transform(cell)
            except KeyboardInterrupt:
                if request is None or _caller_of(sys._getframe(1)) is not None:  # the user's code calls this
                    raise
                interrupted.add(request)
                request.note()
                return instead

        return transformed


@types.coroutine
def _steps(
    run: Callable[[CodeType], Coroutine[Any, Any, T]],
    code: CodeType,
    awaited: _Awaited | None,
    request: _Request | UserThread | None,
) -> Generator[Any, Any, T]:
    """Run a coroutine step by step: each step is the user's code, and the event loop runs between steps.

    The cancellation by which `_Awaited` interrupts the cell becomes KeyboardInterrupt. An interrupt in the code around the
    user's code, which may have kept the user's code from running, becomes an error of the cell.
    """
    coroutine = run(code)
    step: Callable[[Any], Any] = coroutine.send
    argument: Any = None
    while True:
        try:
            try:
                if request is not None:
                    request.enter_user_code()
                if awaited is not None:
                    awaited.enter_user_code()
                waits_for = step(argument)
            finally:
                _leave_user_code(awaited, request)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except KeyboardInterrupt as interrupt:  # on the way to or from the user's code, which handles all others
            _leave_user_code(awaited, request)
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_SUSPENDED:
                step, argument = coroutine.throw, interrupt
            else:  # it has not started, or has left the part that handles what the user's code raises
                coroutine.close()
                coroutine = run(_INTERRUPTED)
                step, argument = coroutine.send, None
            continue
        try:
            argument = yield waits_for
            step = coroutine.send
        except asyncio.CancelledError as cancelled:
            by_user = awaited is not None and awaited.is_cancelled
            step, argument = coroutine.throw, KeyboardInterrupt() if by_user else cancelled
            if awaited is not None:
                awaited.is_cancelled = False
        except BaseException as error:
            step, argument = coroutine.throw, error


def _leave_user_code(awaited: _Awaited | None, request: _Request | UserThread | None) -> None:
    if awaited is not None:
        awaited.leave_user_code()
    if request is not None:
        request.leave_user_code()


def _caller_of(frame: FrameType | None) -> CodeType | None:
    """Return the code that called the user's code which runs in a frame; None if no user's code runs there."""
    while frame is not None:
        if frame.f_code in _CALLERS:
            return frame.f_code
        frame = frame.f_back
    return None
