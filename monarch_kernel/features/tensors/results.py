"""Results of actors that become distributed tensors: the thread of the actor hands them over to the main thread of its rank.

The program sends the call to the actor, and then an operation that waits for its result, in order with all others. Both have
the number of the result. If the call fails before the actor gets to it, the program sends `AbandonResult`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from monarch_kernel.errors import Failure
from monarch_kernel.features.tensors.messages import AbandonResult
from monarch_kernel.runtime.worker.extensions import register
from monarch_kernel.runtime.worker.rank import Rank

__all__ = ["hand_over", "receive"]


class _Results:
    """The results of this process that were handed over and not received, by number."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._found: dict[int, tuple[Any, BaseException | None]] = {}

    def put(self, number: int, value: Any, error: BaseException | None = None) -> None:
        with self._lock:
            self._found[number] = value, error
            self._changed.notify_all()

    def take(self, number: int) -> Any:
        with self._lock:
            self._changed.wait_for(lambda: number in self._found)
            value, error = self._found.pop(number)
        if error is not None:
            raise error
        return value


_results = _Results()


def hand_over(number: int, call: Callable[[], Any]) -> Any:
    """Call an endpoint of an actor, and hand its result, or its error, over to the main thread; on the actor's thread."""
    try:
        value = call()
    except Exception as error:
        _results.put(number, None, error)
        return None
    if inspect.isawaitable(value):
        return _hand_over_later(number, value)
    _results.put(number, value)
    return None


async def _hand_over_later(number: int, work: Any) -> None:
    try:
        value = await work
    except Exception as error:
        _results.put(number, None, error)
    else:
        _results.put(number, value)


def receive(number: int, *_: Any) -> Any:
    """Wait for a result, and return it; on the main thread.

    Raises:
        Exception: That of the endpoint.
    """
    return _results.take(number)


def _abandoned(message: AbandonResult, _: Any) -> None:
    failure: Failure = message.failure
    _results.put(message.number, None, RuntimeError(f"the call did not reach the actor: {failure.headline()}"))


@register
def install(rank: Rank) -> None:
    """Make a rank take the message about calls that have failed."""
    rank.extend({AbandonResult: _abandoned})
