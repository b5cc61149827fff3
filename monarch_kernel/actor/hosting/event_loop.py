"""The event loop of an async actor: on the actor's own thread, fed by whoever drives the socket.

Endpoints run one after the other, each as a task of its own, so that an interrupt can cancel it. Concurrent ones are not
waited for: each begins before the next message is taken, and then they overlap.
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
            pass  # the loop has ended, and with it the actor


class AsyncCall:
    """What runs on an actor's loop for a request.

    Attributes:
        id: of the request; 0 for a broadcast.
        message: the request.
        task: where it runs.
        takes_port: whether it answers through a port.
        overlaps: whether the next message is taken meanwhile.
        work: the coroutine that says where it is.
        was_interrupted: whether it was asked to stop.
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

    def strike(self) -> None:
        """Interrupt it; from any thread."""
        self.was_interrupted = True
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.task.cancel)


async def outcome(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call an endpoint and wait for it; for asyncio a SystemExit would be the end of its loop."""
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
    """Awaits a coroutine, and calls one function before each of its steps and another one after."""

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
    """Run an actor's life on a loop of its own.

    Args:
        main: the life.
        on_error: what remains to be done if it raises, or any task raises what ends a loop (SystemExit).
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
