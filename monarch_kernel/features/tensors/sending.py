"""Distributed tensors in the arguments of calls: they must stay on the ranks until the actors have taken them.

An actor takes its part of a tensor when it unpickles the call, and that is later than the operations of its rank that were
issued after the call. So the caller keeps the tensors that are in a call until the answer has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from monarch_kernel.net.wire.codec import Packed
from monarch_kernel.runtime.rpc.answers import Answer

__all__ = ["SENDING", "KeepingMessage", "keep_until_answered"]

T = TypeVar("T")


class _Sending(threading.local):
    """The call that this thread pickles.

    Attributes:
        parts: What the distributed tensors in it are kept by; None while no call is pickled.
    """

    def __init__(self) -> None:
        self.parts: list[Any] | None = None


SENDING = _Sending()


class KeepingMessage:
    """Makes the message of a call, and keeps the distributed tensors in it."""

    __slots__ = ("_make", "parts")

    def __init__(self, make: Callable[[int], Packed], parts: list[Any]) -> None:
        self._make = make
        self.parts = parts

    def __call__(self, id: int) -> Packed:
        return self._make(id)


class _Finish:
    """Makes the result of a call, and drops the tensors in it then."""

    def __init__(self, finish: Callable[[Sequence[Answer]], Any], parts: Sequence[Any]) -> None:
        self._finish = finish
        self._parts = parts

    def __call__(self, answers: Sequence[Answer]) -> Any:
        return self._finish(answers)


def keep_until_answered(
    make: Callable[[int], Any], finish: Callable[[Sequence[Answer]], T]
) -> Callable[[Sequence[Answer]], T]:
    """Return ``finish``, which a future keeps until its answers have come, with the tensors in the message of ``make``."""
    return _Finish(finish, make.parts) if type(make) is KeepingMessage else finish
