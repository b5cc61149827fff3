"""A thread that runs an asyncio loop for the SSH launcher."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["LoopThread"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_AT_ONCE = 32
"""How many hosts may connect at the same time."""


class LoopThread:
    """A thread that runs an asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_log_exception)
        self.slots = asyncio.Semaphore(_AT_ONCE)
        self._thread = threading.Thread(target=self._run, name="monarch-ssh", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel all tasks, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._end_rest()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._end_rest()
        finally:
            self._loop.close()

    def _end_rest(self) -> None:
        """End all tasks and connections, and those that the loop accepts meanwhile."""
        while (tasks := asyncio.all_tasks(self._loop)) | (transports := self._open_transports()):
            # The task of a connection that was just accepted has not started: cancelled now, it would leave the socket open.
            started = {each for each in tasks if _has_started(each)}
            for task in started:
                task.cancel()
            # One that is closed still has bytes for a peer that takes none, such as a forwarded connection that has broken.
            for transport in transports:
                transport.abort()
            self._loop.run_until_complete(asyncio.wait(started) if started else asyncio.sleep(0))

    def _open_transports(self) -> set[Any]:
        """The transports of the loop whose sockets are open; asyncio has no public way to ask."""
        transports: Any = getattr(self._loop, "_transports", {})
        found = {each: each.get_extra_info("socket") for each in list(transports.values())}
        return {each for each, socket in found.items() if socket is not None and socket.fileno() >= 0}


def _has_started(task: asyncio.Task[Any]) -> bool:
    coroutine: Any = task.get_coro()
    return inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log exceptions of tasks that nothing awaits; asyncio's default prints them to the user's `sys.stderr`."""
    _log.error(context["message"], exc_info=context.get("exception"))
