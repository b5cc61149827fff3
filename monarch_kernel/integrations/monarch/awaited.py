"""Futures of coroutines that run beside the program."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

from monarch_kernel.actor import Future
from monarch_kernel.actor.channels import client_here
from monarch_kernel.net.transport.driver import Waiter
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.waits import Wait

__all__ = ["future_of", "returns_future"]

P = ParamSpec("P")
R = TypeVar("R")


def returns_future(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Future[R]]:
    """Make a coroutine function return a `Future`, whose ``get()`` works outside of event loops, too.

    Raises:
        TypeError: it is no coroutine function.
    """
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"returns_future takes an async function, not {function!r}")

    @functools.wraps(function)
    def start(*args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return future_of(function(*args, **kwargs))

    return start


def future_of(work: Coroutine[Any, Any, R]) -> Future[R]:
    """Run a coroutine on a thread with an event loop, in the context of the caller, and return the future of its result."""
    client = client_here()
    outcome: list[R] = []

    def finish(answers: Sequence[Answer]) -> R:
        return outcome[0]

    owner = _Thread(client)
    future: Future[R] = Future(owner, 0, finish, description="a coroutine")

    async def cancellable() -> R:
        owner.loop, owner.task = asyncio.get_running_loop(), asyncio.current_task()
        return await work

    def run() -> None:
        try:
            outcome.append(asyncio.run(cancellable()))
        except BaseException as error:  # it is the outcome
            future.abandon(error)
        else:
            future.resolve((), True)
        client.submit(lambda: None)  # wakes the thread that waits for the future

    threading.Thread(target=contextvars.copy_context().run, args=(run,), name="monarch-coroutine", daemon=True).start()
    return future


class _Thread:
    """Owner of the future of a coroutine; an interrupt cancels the coroutine."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.loop: asyncio.AbstractEventLoop | None = None
        self.task: asyncio.Task[Any] | None = None

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        return bool(self.client.wait(waiter, timeout_s))

    def interrupt(self, id: int, *, abort: bool = False) -> None:
        if self.loop is not None and self.task is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.task.cancel)

    def cancel(self, id: int) -> None:
        self.interrupt(id)

    def attend(self, future: Future[Any]) -> None:
        self.client.attend(future)

    def on_slow_wait(self, wait: Wait) -> float | None:
        return None
