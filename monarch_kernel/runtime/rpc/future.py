"""Futures of requests, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from monarch_kernel.errors import MeshDownError, MonarchError, RemoteInterrupt
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.handles import opened_for
from monarch_kernel.runtime.rpc.waits import PATIENCE_S, WARN_AFTER_S, Awaited, Wait

__all__ = ["Future", "FutureOwner", "as_they_come"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


class FutureOwner(Protocol):
    """The interface of the runtime that resolves a future."""

    @property
    def client(self) -> Any:
        """The `Client` for handles in the answers: the one that carries the request; None for the default of this process."""
        ...

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        """Wait until ``waiter`` is ready; False if the time is up. It may become ready although no answer has arrived."""
        ...

    def interrupt(self, id: int, *, abort: bool = False) -> None: ...
    def cancel(self, id: int) -> None: ...
    def attend(self, future: Future[Any]) -> None: ...
    def on_slow_wait(self, wait: Wait) -> float | None: ...


class _Nobody:
    """Owner of a future that was resolved when it was made."""

    client = None

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        return True

    def interrupt(self, id: int, *, abort: bool = False) -> None:
        pass

    def cancel(self, id: int) -> None:
        pass

    def attend(self, future: Future[Any]) -> None:
        pass

    def on_slow_wait(self, wait: Wait) -> float | None:
        return None


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        pass  # the loop was closed, so nothing waits there any more


class Future(Generic[T]):
    """The answer to a request; can be read many times and from several threads.

    Args:
        owner: The runtime that resolves it.
        id: The number of the request.
        finish: Makes the result from the ranks' answers, or raises; called once, by the first reader.
        rank: The flat rank that answers, if it is one rank.
        description: What the ranks do meanwhile, in the user's words.
        procs: The processes that were asked.
    """

    __slots__ = (
        "_answers",
        "_callbacks",
        "_done",
        "_error",
        "_finish",
        "_had_error",
        "_is_halted",
        "_lock",
        "_owner",
        "_value",
        "_waiter",
        "description",
        "id",
        "in_step",
        "procs",
        "rank",
    )

    def __init__(
        self,
        owner: FutureOwner,
        id: int,
        finish: Callable[[Sequence[Answer]], T],
        rank: int | None = None,
        description: str = "",
        procs: Sequence[int] = (),
    ) -> None:
        self.id = id
        self.description = description
        self.procs = procs
        self.rank = rank
        self.in_step = True
        self._owner = owner
        self._finish: Callable[[Sequence[Answer]], T] | None = finish
        self._answers: Sequence[Answer] = ()
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] | None = None  # made when needed: there may be many futures
        self._lock = threading.Lock()
        self._is_halted = False
        self._had_error = False  # a wait got the error that no answers can come; the caller may wait again
        self._waiter: Waiter | None = None  # of the thread that would attend to ranks that stop in the debugger

    @classmethod
    def resolved(cls, value: T) -> Future[T]:
        """A future with a result."""

        def finish(answers: Sequence[Answer]) -> T:
            return value

        future = cls(_Nobody(), 0, finish)
        future._done = True
        return future

    def __repr__(self) -> str:
        return f"<Future {self.id} {'done' if self._done else 'pending'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Future stays where it was made; pass its result on")

    @property
    def owner(self) -> FutureOwner:
        """The runtime that resolves the future."""
        return self._owner

    @property
    def finish(self) -> Callable[[Sequence[Answer]], T]:
        """What makes the result; only for a future that was not read."""
        assert self._finish is not None
        return self._finish

    def read_with(self, finish: Callable[[Sequence[Answer]], Any]) -> Future[Any]:
        """Make the result in another way; only for a future that was not read."""
        self._finish = finish
        return self

    def done(self) -> bool:
        """Whether all answers have arrived."""
        return self._done

    def get(self, timeout: float | None = None, *, warn_after_s: float | None = WARN_AFTER_S) -> T:
        """Wait for the result; an interrupt of the wait also reaches the ranks.

        Args:
            timeout: Seconds; the future stays usable afterwards.
            warn_after_s: After so many seconds, show on stderr which ranks have not answered, and what they do; None for never.

        Raises:
            TimeoutError: No answer within ``timeout``.
            MonarchError: The error that the ranks answered instead of a result.
        """
        if not self._done:
            self._wait(timeout, warn_after_s)
        self._settle()
        error = self._error
        if error is None:
            return self._value  # type: ignore[return-value]
        try:
            if isinstance(error, MonarchError):
                raise error.with_traceback(None)  # where it was made here does not help the user
            raise error
        finally:
            del self, error  # else the error would keep itself alive through this frame, with its callers' objects

    result = get

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error that `get` would raise, or None."""
        if not self._done:
            try:
                self._wait(timeout)
            except MeshDownError as error:
                return error
        self._settle()
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all answers have arrived; False if the time is up. An interrupt ends only the wait; the ranks go on."""
        if self._done:
            return True
        waiter = Waiter()
        self.add_done_callback(waiter.set)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._done:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._owner.wait(waiter, left):
                    break
                waiter.ready = False  # it may have been woken for another reason
            return self._done
        finally:
            with suppress(ValueError):  # it was called, and removed
                (self._callbacks or []).remove(waiter.set)

    def interrupt(self, *, abort: bool = False) -> None:
        """Interrupt the ranks that have not answered; the future ends when they answer.

        Args:
            abort: Whether to abort the process groups of ranks that do not stop otherwise.
        """
        self._owner.interrupt(self.id, abort=abort)

    def cancel(self) -> None:
        """End the wait for all callers and interrupt the ranks; does nothing if all answers have arrived."""
        self._owner.cancel(self.id)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call a quick function when all answers have arrived, perhaps on another thread; at once if they have."""
        with self._lock:
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(callback)
        if self._done:
            self._call_back()

    def as_asyncio(self) -> asyncio.Future[T]:
        """A future of the running event loop; cancelling it, or a task that awaits it, interrupts the ranks."""
        loop = asyncio.get_running_loop()
        theirs: Awaited[T] = Awaited(self, loop)
        stop_watching = self._watch(theirs, loop)

        def copy() -> None:
            if not theirs.done():
                error = self.exception(0)
                if error is not None:
                    theirs.set_exception(error)
                else:
                    theirs.set_result(self.get(0))

        def pass_on(theirs: asyncio.Future[T]) -> None:
            stop_watching()
            if theirs.cancelled():
                self._owner.interrupt(self.id)

        theirs.add_done_callback(pass_on)
        self.add_done_callback(lambda: _call_soon(loop, copy))
        return theirs

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            loop = asyncio.get_running_loop()
            done: Awaited[None] = Awaited(self, loop)
            stop_watching = self._watch(done, loop)

            def wake() -> None:
                if not done.done():
                    done.set_result(None)

            self.add_done_callback(lambda: _call_soon(loop, wake))
            try:
                yield from done.__await__()
            except asyncio.CancelledError:
                self._owner.interrupt(self.id)
                raise
            except KeyboardInterrupt:
                raise RemoteInterrupt(self._interrupt_work()) from None
            finally:
                stop_watching()
        return self.get(0)

    def _watch(self, awaited: Awaited[Any], loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        """Report to the owner if an await lasts long; returns a function that stops this."""
        wait: Wait | None = None
        timer: asyncio.TimerHandle
        start = time.monotonic()

        def look() -> None:
            if wait is not None:
                wait.show_news()
                if wait.error is not None and not awaited.done():
                    self._had_error = True
                    awaited.set_exception(wait.error)

        def report() -> None:
            nonlocal wait, timer
            wait = wait or Wait(
                self,
                lambda: _call_soon(loop, look),
                is_awaited=True,
                warn_after_s=WARN_AFTER_S,
                had_error=self._had_error,
            )
            wait.lasts_s = time.monotonic() - start
            pause_s = self._owner.on_slow_wait(wait)
            if pause_s is not None:
                timer = loop.call_later(pause_s, report)

        def stop() -> None:
            timer.cancel()
            if wait is not None:
                wait.over = True

        timer = loop.call_later(0.0 if self._had_error else PATIENCE_S, report)
        return stop

    def resolve(self, answers: Sequence[Answer], in_step: bool) -> None:
        """For the runtime: all answers have arrived."""
        self._answers = answers
        self.in_step = in_step
        self._done = True
        self._call_back()

    def halt(self) -> None:
        """For the runtime: a rank has stopped in the debugger, and the thread that waits may attend to it."""
        self._is_halted = True
        waiter = self._waiter
        if waiter is not None:
            waiter.set()

    def abandon(self, error: BaseException) -> None:
        """For the runtime: there will be no answers."""
        self._error = error
        self._finish = None
        self._done = True
        self._call_back()

    def _call_back(self) -> None:
        """Call each callback once, even if another thread adds one at this moment: each is removed before its call."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread was quicker
                return
            try:
                callback()
            except Exception:  # it must not stop the I/O loop, which serves others
                _log.exception("a callback of %r failed", self)

    def _settle(self) -> None:
        """Make the result from the answers, once."""
        with self._lock:
            if self._finish is not None:
                try:
                    with opened_for(self._owner.client):
                        self._value = self._finish(self._answers)
                except Exception as error:
                    self._error = error
                self._finish, self._answers = None, ()

    def _wait(self, timeout: float | None, warn_after_s: float | None = WARN_AFTER_S) -> None:
        try:
            over = self._wait_and_attend(timeout, warn_after_s)
        except KeyboardInterrupt:
            raise RemoteInterrupt(self._interrupt_work()) from None
        if not over:
            if timeout is None:
                raise MeshDownError("the session was shut down before an answer came")
            raise TimeoutError(f"no answer within {timeout} s; the request goes on")

    def _interrupt_work(self) -> str:
        """Interrupt the ranks that have not answered, and describe the effect."""
        effect: str = self._owner.client.interrupt_work([self], self.interrupt)
        return effect

    def _wait_and_attend(self, timeout: float | None, warn_after_s: float | None) -> bool:
        """Wait for the answers; the clock stands still while the owner attends to ranks that have stopped."""
        waiter = self._waiter = Waiter()
        self.add_done_callback(waiter.set)
        wait: Wait | None = None
        patience: float | None = 0.0 if self._had_error else PATIENCE_S
        waited_s = 0.0
        try:
            while not self._done:
                start = time.monotonic()
                least = timeout if patience is None else patience if timeout is None else min(patience, timeout)
                timed_out = not self._is_halted and not self._owner.wait(waiter, least)
                passed_s = time.monotonic() - start
                waited_s += passed_s
                if timeout is not None:
                    timeout = max(0.0, timeout - passed_s)
                if patience is not None:
                    patience = max(0.0, patience - passed_s)
                is_halted, self._is_halted, waiter.ready = self._is_halted, False, False
                if self._done:  # perhaps just before the halt
                    break
                if is_halted:
                    if wait is not None:
                        wait.show_news()
                        if wait.error is not None:
                            self._had_error = True
                            raise wait.error
                    self._owner.attend(self)
                elif timed_out and (timeout == 0.0 or patience is None):
                    break
                elif timed_out and patience == 0.0:
                    wait = wait or Wait(
                        self,
                        self.halt,
                        ends_by_itself=timeout is not None,
                        warn_after_s=warn_after_s,
                        had_error=self._had_error,
                    )
                    wait.lasts_s = waited_s
                    patience = self._owner.on_slow_wait(wait)
            return self._done
        finally:
            self._waiter = None
            if wait is not None:
                wait.over = True
            with suppress(ValueError):  # it was called, and removed
                (self._callbacks or []).remove(waiter.set)


def as_they_come(futures: Sequence[Future[T]]) -> Iterator[Future[T]]:
    """Yield futures of one owner in the order in which they resolve; an interrupt of a wait reaches the ranks of all others.

    The wait for the last one is like a wait for a single future: if it lasts, the owner reports it.
    """
    left = dict.fromkeys(futures)
    arrived: deque[Future[T]] = deque()
    waiter = Waiter()

    def note(future: Future[T]) -> Callable[[], None]:
        def arrive() -> None:
            arrived.append(future)
            waiter.set()

        return arrive

    for future in futures:
        future._waiter = waiter
        future.add_done_callback(note(future))
    while left:
        try:
            while not arrived and len(left) > 1:
                waiter.ready = False
                halted = next((future for future in left if future._is_halted), None)
                if halted is not None:
                    halted._is_halted = False
                    halted._owner.attend(halted)
                elif not arrived:
                    next(iter(left))._owner.wait(waiter, None)
        except KeyboardInterrupt:
            raise RemoteInterrupt(_interrupt_all(list(left))) from None
        future = arrived.popleft() if arrived else next(iter(left))
        if not future._done:
            future._wait(None)
        del left[future]
        yield future


def _interrupt_all(futures: Sequence[Future[Any]]) -> str:
    def interrupt() -> None:
        for future in futures:
            future.interrupt()

    effect: str = futures[0].owner.client.interrupt_work(futures, interrupt)
    return effect
