"""Calls functions that the controller sends, with the rank's namespace."""

from __future__ import annotations

import asyncio
import functools
import inspect
import linecache
from collections.abc import Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import Any

from monarch_kernel.net.wire.codec import Frame, load, load_bytes
from monarch_kernel.net.wire.messages import Payload

__all__ = ["APPLIED_IN", "Applier", "run_bootstrap"]

APPLIED_IN: ContextVar[dict[str, Any]] = ContextVar("monarch_kernel_applied_in")
"""The namespace of the rank, for functions of this package that an `Applier` calls."""


def run_bootstrap(data: bytes) -> None:
    """Call the function in a `RankSpec`, and wait for it if it is async.

    Raises:
        BaseException: Any exception of the function.
    """
    function, sources = load_bytes(data)
    for file, text in sources.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    result = function()
    if inspect.isawaitable(result):

        async def wait() -> None:
            await result

        asyncio.run(wait())


class Applier:
    """Calls functions; names that a function did not bring along are looked up in the namespace.

    Args:
        namespace: The names that cells see and define.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._sources: tuple[str, ...] = ()

    def call(self, payload: Payload, frames: Sequence[Frame]) -> Any:
        """Call the function in an `Apply`, and return its result.

        Raises:
            BaseException: Any exception of the function.
        """
        shared, args = load(payload, frames)
        function, sources = load(Payload(b"", len(shared)), shared)
        self._keep(sources)
        self._lend(function)
        token = APPLIED_IN.set(self._namespace)
        try:
            return function(*args)
        finally:
            APPLIED_IN.reset(token)

    def _keep(self, sources: dict[str, str]) -> None:
        """Let tracebacks show the lines of the function, until the next function is called."""
        for file in self._sources:
            linecache.cache.pop(file, None)
        self._sources = tuple(sources)
        for file, text in sources.items():
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)

    def _lend(self, function: Any) -> None:
        """Add the rank's variables to the function's globals, which take precedence."""
        while isinstance(function, functools.partial):
            function = function.func
        if isinstance(function, FunctionType) and function.__globals__.get("__name__") == "__main__":
            theirs = function.__globals__
            if theirs is not self._namespace:
                for name, value in self._namespace.items():
                    theirs.setdefault(name, value)
