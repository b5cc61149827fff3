"""Executors: a mailbox and the one thread that empties it. Interrupts reach the user's code there, and no other code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn, Protocol

from monarch_kernel.errors import Failure
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.net.transport.thread_interrupts import ACTOR_THREAD, ActorThread
from monarch_kernel.net.wire.codec import Frame
from monarch_kernel.net.wire.messages import Call, Message, PostMortem
from monarch_kernel.runtime.diagnostics.failures import describe
from monarch_kernel.runtime.diagnostics.thread_frames import frames_of
from monarch_kernel.runtime.worker.imports import defers_interrupts
from monarch_kernel.runtime.worker.timers import later

__all__ = ["CALLED", "Debugger", "Driving", "Executor", "Handler", "Kept", "OnLoop", "working"]

Handler = Callable[[Any, Sequence[Frame]], None]

BROADCAST = -1
"""Marks a request without a number as the one that is interrupted."""

_AFTER_IMPORT_S = 0.05
"""How often to look whether an import has ended, in seconds."""

_MAX_DEPTH = 500


class _Called:
    """Marks a call of `Executor.look` in a mailbox."""

    id = 0


CALLED = _Called()


class Kept(NamedTuple):
    """A failed request, and the exception with its frames."""

    request: int
    failure: Failure
    error: BaseException


class Debugger(Protocol):
    """The interface of the debugger, which stops the user's code for a person to look at it."""

    def interrupt(self, id: int) -> bool:
        """Raise KeyboardInterrupt in the code of a request, if it waits at a prompt; returns whether it does."""
        ...

    def post_mortem(self, executor: Executor, kept: Kept) -> None:
        """Let a person look at a failed request, until they leave."""
        ...

    def end(self) -> None:
        """Stop tracing this thread, which leaves the user's code."""
        ...


class Driving(Protocol):
    """The part of the transport's driver that an executor uses."""

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of that process."""
        ...

    def serve(self, waiter: Waiter) -> None:
        """Set a thread's waiter ready, and pass the I/O lock to that thread."""
        ...

    def wait(self, waiter: Waiter, timeout_s: float | None = None, *, patient: bool = False) -> bool:
        """Wait until ``waiter`` is ready, driving the transport meanwhile."""
        ...


class ExecutorOwner(Protocol):
    """The part of its process that an executor uses."""

    driving: Driving
    debugger: Debugger | None

    def reply(
        self,
        id: int,
        value: Any = None,
        bundle: dict[str, Any] | None = None,
        *,
        output: bool = False,
        name: str = "result",
    ) -> None:
        """Answer a request with a value, to which an error refers by ``name``."""
        ...

    def fail(self, executor: Executor, id: int, error: BaseException | Failure) -> None:
        """Answer a request with a failure."""
        ...


class OnLoop(Protocol):
    """A call that runs on the event loop of an executor.

    Attributes:
        message: The message that it handles.
        task: The task that runs it.
        overlaps: Whether the executor takes the next message meanwhile.
        work: The coroutine, whose frames say where it is.
    """

    message: Call
    task: asyncio.Task[Any]
    overlaps: bool
    work: Any

    def interrupt(self) -> None:
        """Interrupt the call; from any thread."""
        ...


class Executor:
    """A mailbox and the thread that empties it, one message at a time.

    Attributes:
        calls: The calls on its event loop, if it has one.
        takes_port: Whether an endpoint is answered through a port, perhaps before it ends, perhaps by another actor.
        attend: Makes the actor look at failures of what it has spawned; on the I/O thread.
        look: Looks at them, on this thread: between two messages, or while the code of one waits for something.
        interrupted: The id of the request that was interrupted last; 0 if none.
        delivered: The id of the request in which the interrupt was raised; 0 if none.
        interrupters: Functions that interrupt requests that run not in this thread alone, but on its event loop.
        pool_work: Work of thread pools that its requests have started: the thread, and the id of the request.
        is_made: Whether the constructor of its actor has ended.
        retire: Makes the actor end, because its process does; on the I/O thread. Returns the thread, if that cleans up.
        on_dropped: Called when an interrupt has removed a request from the mailbox, with it and whether to abort process
            groups; on the I/O thread.
    """

    def __init__(self, rank: ExecutorOwner, name: str) -> None:
        self.name = name
        self.mailbox: deque[tuple[Any, Sequence[Frame]]] = deque()
        self.waiter = Waiter()
        self.handlers: dict[type[Message], Handler] = {PostMortem: self._post_mortem}
        self.current = 0
        self.began_at = 0.0
        self.interrupted = 0
        self.delivered = 0
        self.released = 0
        self.kept: Kept | None = None
        self.is_traced = False
        self.thread_id = 0
        self.over = False
        self.is_made = False
        self.taken: tuple[Any, Sequence[Frame]] = (None, ())
        self.calls: Collection[OnLoop] = ()
        self.takes_port: Callable[[str], bool] = lambda method: False
        self.interrupters: dict[int, Callable[[], object]] = {}
        self.pool_work: dict[int, int] = {}
        self.retire: Callable[[], threading.Thread | None] | None = None
        self.on_dropped: Callable[[Any, bool], object] = lambda message, abort: None
        self.attend: Callable[[], object] | None = None
        self.look: Callable[[], object] | None = None
        self._is_called = False
        self._is_looking = False
        self._waits_for: Waiter | None = None
        self._thread = ActorThread()
        self._interrupts_after_import: object = None  # the message for which it runs what imports a library
        self._interrupted_at: tuple[int, int] | None = None  # where the thread was when an exception was sent to it
        self._rank = rank

    @property
    def in_user_code(self) -> bool:
        """Whether an interrupt may reach this thread."""
        return self._thread.in_user_code

    @in_user_code.setter
    def in_user_code(self, is_in: bool) -> None:
        self._thread.in_user_code = is_in

    @property
    def is_busy(self) -> bool:
        """Whether it works on something, even if nothing waits for the result."""
        return self.taken[0] not in (None, CALLED) or bool(self.calls)

    def left_work(self) -> dict[int, int]:
        """Return the work of thread pools whose request has ended, or was interrupted and is about to end."""
        return {
            thread: request
            for thread, request in list(self.pool_work.items())
            if request == self.interrupted or (request != self.current and request not in self.interrupters)
        }

    def post(self, message: Message, frames: Sequence[Frame]) -> None:
        """Put a message into the mailbox; on the I/O thread."""
        self.mailbox.append((message, frames))
        if not self.current or not self.waiter.leads:
            self._rank.driving.serve(self.waiter)
        # else it works, and looks into the mailbox afterwards

    def run(self) -> None:
        """Empty the mailbox until the executor is over; drive the transport while the mailbox is empty."""
        self.thread_id = self._thread.ident = threading.get_ident()
        working.set(self)
        ACTOR_THREAD.set(self._thread)
        mailbox, waiter, wait = self.mailbox, self.waiter, self._rank.driving.wait
        while not self.over:
            while mailbox and not self.over:
                if not self.begin_next():
                    continue
                message, frames = self.taken
                try:
                    if message is CALLED:
                        self._is_called = True
                        self._look()
                    else:
                        self.handlers[type(message)](message, frames)
                except KeyboardInterrupt as error:  # it was raised between the user's code and our own handling of it
                    self._rank.fail(self, self.current, error)
                except Exception as error:
                    self._rank.fail(self, self.current, error)
                self.current = 0
                self.taken = message, frames = None, ()
            waiter.ready = False
            if not mailbox and not self.over:
                try:
                    wait(waiter, patient=True)
                except Exception as error:  # of a signal handler that user code has set, such as torch's for DataLoader
                    self.came_back(error)
                    traceback.print_exc()

    def call(self) -> None:
        """Make this thread call `look` as soon as possible, before the next message; on the I/O thread."""
        self._is_called = True
        self.mailbox.appendleft((CALLED, ()))
        if not self.current:
            self._rank.driving.serve(self.waiter)
        waits_for = self._waits_for
        if waits_for is not None:
            waits_for.set()

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        """Wait, in code that this thread runs; returns early if `call` was used meanwhile."""
        before, self._waits_for = self._waits_for, waiter
        try:
            self._look()  # `call` may have come before this wait was visible
            ready = self._rank.driving.wait(waiter, timeout_s)
            self._look()
            return ready or waiter.ready
        finally:
            self._waits_for = before

    def _look(self) -> None:
        if self._is_called and not self._is_looking and self.look is not None:
            self._is_called, self._is_looking = False, True
            try:
                self.look()
            finally:
                self._is_looking = False

    def begin_next(self) -> bool:
        """Take the next message, into ``taken``; False if an interrupt has just removed it.

        ``current`` is set before the message leaves the mailbox: an interrupt finds it in one place or the other.
        """
        try:
            self.current = getattr(self.mailbox[0][0], "id", 0)
            self.taken = self.mailbox.popleft()
        except IndexError:
            self.current = 0
            return False
        self.current = getattr(self.taken[0], "id", 0)
        self.began_at = time.perf_counter()
        return True

    @contextlib.contextmanager
    def user_code(self) -> Any:
        """Context in which an interrupt may reach this thread."""
        self.in_user_code = True
        try:
            yield
        finally:
            self.leave_user_code()

    @contextlib.contextmanager
    def own_code(self) -> Iterator[None]:
        """Context without interrupts, in the midst of the user's code; an interrupt that arrives is raised at its end."""
        self.in_user_code = False
        yield
        self.raise_if_interrupted()
        self.in_user_code = True

    def came_back(self, error: BaseException | None) -> None:
        """Handle the return of the user's code, or its exception: a process that it has forked ends here.

        Such a fork must not go on as a second copy of this process, which would answer in its name.
        """
        if self._rank.driving.is_forked:
            _end_fork(error)

    def leave_user_code(self) -> None:
        """Accept no more interrupts, not even one that is on its way to this thread."""
        self.in_user_code = False
        self.came_back(sys.exc_info()[1])
        if self.is_traced:
            self.end_tracing()
        if self.interrupted and self.interrupted == (self.current or BROADCAST):
            self._thread.take_back()

    def raise_if_interrupted(self) -> None:
        """Raise an interrupt that arrived while no user code ran.

        Raises:
            KeyboardInterrupt: There was one, for the request that runs now.
        """
        if self.interrupted and self.interrupted == (self.current or BROADCAST):
            raise KeyboardInterrupt

    def _post_mortem(self, message: PostMortem, _: Sequence[Frame]) -> None:
        debugger, kept = self._rank.debugger, self.kept
        if debugger is None or kept is None or kept.request != message.request:
            self._rank.fail(self, message.id, LookupError("the error is no longer kept: something else has run since"))
            return
        with self.user_code():
            debugger.post_mortem(self, kept)
        self._rank.reply(message.id, output=True)

    def end_tracing(self) -> None:
        """Make the debugger stop tracing this thread, which is about to leave the user's code."""
        self.is_traced = False
        if self._rank.debugger is not None:
            self._rank.debugger.end()

    def interrupt_all(self) -> None:
        """Raise KeyboardInterrupt in everything that it works on, or cancel it, even if nothing waits for the result."""
        calls = list(self.calls)
        for call in calls:
            call.interrupt()
        if not calls and self.is_busy:
            self.interrupted = self.current or BROADCAST
            self.interrupt_thread()

    def interrupt_thread(self, *, insist: bool = False) -> None:
        """Raise KeyboardInterrupt in this executor's thread, if it runs user code.

        Args:
            insist: whether to raise it also while a library is imported or a finalizer runs; otherwise it is raised after that,
                because a library that is imported in part fails from then on, and what leaves a finalizer is lost.
        """
        self._interrupts_after_import = None
        if insist or not defers_interrupts(frames_of(self.thread_id, _MAX_DEPTH)):
            self._interrupted_at = self._place()
            self._thread.interrupt()
            return
        self._interrupts_after_import = self.taken
        later(_AFTER_IMPORT_S, self._interrupt_after_import, self.taken)

    def _interrupt_after_import(self, taken: object) -> None:
        if self._interrupts_after_import is taken is self.taken and self.delivered != (self.current or BROADCAST):
            self.interrupt_thread()

    def was_raised(self, id: int) -> bool:
        """Whether KeyboardInterrupt was raised in a request. A thread that has moved on since it was sent one counts, too."""
        if self.delivered == id:
            return True
        if self._interrupts_after_import is self.taken:
            return False
        return self._interrupted_at not in (None, self._place())

    def _place(self) -> tuple[int, int]:
        """The innermost frame of the thread, and the instruction at which it is; these change before an exception is raised."""
        frame = sys._current_frames().get(self.thread_id)
        return (id(frame), -1 if frame is None else frame.f_lasti)


def _end_fork(error: BaseException | None) -> NoReturn:
    """End a forked process as Python ends a program that has returned, or raised this."""
    code: Any = 0
    with contextlib.suppress(Exception):
        if isinstance(error, SystemExit):
            code = error.code or 0
            if not isinstance(code, int):
                print(code, file=sys.stderr)
                code = 1
        elif error is not None:
            code = 1
            print(describe(error).traceback.rstrip(), file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    os._exit(code & 0xFF)


working: ContextVar[Executor | None] = ContextVar("monarch_kernel_working", default=None)
"""The executor of this thread; set by the thread itself."""
