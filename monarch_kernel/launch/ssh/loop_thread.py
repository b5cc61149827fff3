"""A thread that runs an asyncio loop for the SSH launcher."""

from __future__ import annotations

import asyncio
import concurrent.futures
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
            rest = asyncio.all_tasks(self._loop)
            for task in rest:
                task.cancel()
            if rest:
                self._loop.run_until_complete(asyncio.wait(rest))
            # One that is closed still has bytes for a peer that takes none, such as a forwarded connection that has broken.
            for transport in list(getattr(self._loop, "_transports", {}).values()):
                transport.abort()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log exceptions of tasks that nothing awaits; asyncio's default prints them to the user's `sys.stderr`."""
    _log.error(context["message"], exc_info=context.get("exception"))
