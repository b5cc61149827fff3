"""Waits for futures, as far as somebody else has to know of them: those that last.

A wait that is over soon costs nothing more than it would without this. One that lasts longer than `PATIENCE_S` is a `Wait`: its
owner is told (`Owner.linger`), and may end it with an error.

What an async endpoint waits for is not told by anybody: it is read off its task. A task that waits for a future of ours, for
another task or for all of several (``asyncio.gather``) needs them; of anything else (a sleep, an event, the first of several,
what has a timeout around it, or is gathered with any of these) we do not know what ends it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["PATIENCE_S", "WARN_AFTER_S", "Awaited", "Pending", "Wait", "futures_needed_by"]

PATIENCE_S = 0.2
"""A wait that lasts longer is looked at."""

WARN_AFTER_S = 60.0
"""After a longer wait it is shown who has not answered."""

T = TypeVar("T")


class Pending(Protocol):
    """A future of ours, as far as it matters here."""

    id: int
    note: str
    procs: Sequence[int]
    rank: int | None

    def done(self) -> bool:
        """Whether the answers are in."""
        ...


class Wait:
    """A wait for a future that lasts.

    Args:
        future: what is waited for.
        wake: has the thread or loop that waits look at ``error`` and ``news``.
        ends_by_itself: whether it was given a timeout.
        is_awaited: whether an event loop goes on meanwhile; else a thread stands still.
        warn_after_s: after how many seconds it is to be shown who has not answered; None for never, and once it is done.
        is_anew: whether an earlier wait for the same future was ended with an error; False once its owner has seen to it.

    Attributes:
        lasts_s: for how long, in seconds, when its owner was told last.
        error: what ends it; None until something does.
        news: what is to be shown where it waits.
        over: whether it has ended.
        number: by which others know it; 0 for those that nobody needs to know.
    """

    __slots__ = (
        "ends_by_itself",
        "error",
        "future",
        "is_anew",
        "is_awaited",
        "lasts_s",
        "news",
        "number",
        "over",
        "wake",
        "warn_after_s",
    )

    def __init__(
        self,
        future: Pending,
        wake: Callable[[], object],
        *,
        ends_by_itself: bool = False,
        is_awaited: bool = False,
        warn_after_s: float | None = None,
        is_anew: bool = False,
    ) -> None:
        self.future = future
        self.wake = wake
        self.ends_by_itself = ends_by_itself
        self.is_awaited = is_awaited
        self.warn_after_s = warn_after_s
        self.is_anew = is_anew
        self.lasts_s = 0.0
        self.error: BaseException | None = None
        self.news = ""
        self.over = False
        self.number = 0

    def fail(self, error: BaseException) -> None:
        """End it with an error, which is raised where it waits; the future stays as it is. For any thread."""
        self.error = error
        self.wake()

    def tell(self, text: str) -> None:
        """Have something shown where it waits. For any thread."""
        self.news = text
        self.wake()

    def show_news(self) -> None:
        """Show it; for the thread or loop that waits."""
        news, self.news = self.news, ""
        if news and not self.over:
            print(news, file=sys.stderr, flush=True)


class Awaited(asyncio.Future[T]):
    """What an event loop waits for in place of a future of ours."""

    def __init__(self, future: Pending, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.of = future


def futures_needed_by(task: asyncio.Task[Any]) -> set[Pending]:
    """The futures without which a task can't go on; also for another thread than that of its loop, which goes on meanwhile."""
    return _needed_by(task, {})


def _needed_by(one: asyncio.Future[Any], known: dict[asyncio.Task[Any], set[Pending]]) -> set[Pending]:
    if one.done():
        return set()
    if isinstance(one, Awaited):
        return {one.of}
    if isinstance(one, asyncio.Task):
        if one not in known:
            known[one] = set()
            waiter = getattr(one, "_fut_waiter", None)
            if waiter is not None and not _has_timeout(one):
                known[one] = _needed_by(waiter, known)
        return known[one]
    found: set[Pending] = set()
    for child in getattr(one, "_children", ()):  # of asyncio.gather
        if not child.done():
            needed = _needed_by(child, known)
            if not needed:
                return set()  # it may raise, and then the others are not waited for
            found |= needed
    return found


def _has_timeout(task: asyncio.Task[Any]) -> bool:
    if sys.version_info < (3, 11):
        return False  # there a timeout has a task of its own
    timers: Any = getattr(task.get_loop(), "_scheduled", ())
    for timer in list(timers):
        owner = getattr(timer._callback, "__self__", None)  # asyncio has no other way to ask
        if isinstance(owner, asyncio.Timeout) and not timer.cancelled() and getattr(owner, "_task", None) is task:
            return True
    return False
