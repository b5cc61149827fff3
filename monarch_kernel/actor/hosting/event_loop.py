"""The event loop of an async actor, which runs on the actor's thread and gets messages from the I/O thread.

Endpoints run one after another, each as a separate task, so that an interrupt can cancel it. Calls of concurrent endpoints
overlap: each starts before the next message is handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.runtime.worker.executor import working

__all__ = ["AsyncCall", "LoopWaiter", "Stepped", "outcome", "run_loop"]

_CANCEL_S = 2.0


class LoopWaiter(Waiter):
    """Wakes an event loop instead of a thread."""

    __slots__ = ("_event", "_loop")
    leads = False

    def __init__(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        super().__init__()
        self._loop = loop
        self._event = event

    def set(self) -> None:
        self.ready = True
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            pass  # the loop has ended, and the actor with it


class AsyncCall:
    """A call that runs as a task on an actor's loop.

    Attributes:
        id: the id of the request; 0 for a broadcast.
        message: the request.
        task: the task that runs the call.
        takes_port: whether the call is answered through a port.
        overlaps: whether the next message is handled while the call runs.
        work: the coroutine whose stack shows where the call is.
        was_interrupted: whether the call was interrupted.
    """

    def __init__(
        self, message: Any, task: asyncio.Task[Any], takes_port: bool = False, *, overlaps: bool = False
    ) -> None:
        self.id: int = message.id
        self.message = message
        self.takes_port = takes_port
        self.task = task
        self.overlaps = overlaps
        self.work: Any = task.get_coro()
        self.was_interrupted = False
        self._loop = task.get_loop()

    def interrupt(self) -> None:
        """Interrupt the call. Can be called on any thread."""
        self.was_interrupted = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.task.cancel)


async def outcome(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call an endpoint, await it, and return (value, error). An error is not raised, because SystemExit would end the loop."""
    executor = working.get()
    try:
        value = work()
        value = await value if inspect.isawaitable(value) else value
    except BaseException as error:
        if executor is not None:
            executor.came_back(error)
        if isinstance(error, asyncio.CancelledError):
            raise
        return None, error
    if executor is not None:
        executor.came_back(None)
    return value, None


class Stepped:
    """Awaits a coroutine, and calls one function before each of its steps and another one after it."""

    def __init__(
        self, work: Coroutine[Any, Any, Any], enter: Callable[[], object], leave: Callable[[], object]
    ) -> None:
        self._work = work
        self._enter = enter
        self._leave = leave

    def __await__(self) -> Generator[Any, Any, Any]:
        work, step, given = self._work, self._work.send, None
        while True:
            self._enter()
            try:
                waits_for = step(given)
            except StopIteration as end:
                return end.value
            finally:
                self._leave()
            try:
                step, given = work.send, (yield waits_for)
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                step, given = work.throw, error


def run_loop(main: Coroutine[Any, Any, None], on_error: Callable[[BaseException], Coroutine[Any, Any, None]]) -> None:
    """Run the coroutine of an async actor on a new event loop.

    Args:
        main: the coroutine.
        on_error: called if the coroutine raises, or if a task raises an error that ends the loop (SystemExit).
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(main)
        except BaseException as error:
            loop.run_until_complete(on_error(error))
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=_CANCEL_S))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
