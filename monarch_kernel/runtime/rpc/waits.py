"""Waits for futures that last long, and that the owner of the future must know of.

A short wait costs nothing extra. A wait that lasts longer than `PATIENCE_S` is a `Wait`: it is reported to its owner
(`FutureOwner.on_slow_wait`), which may end it with an error.

An async endpoint does not report what it waits for: `futures_needed_by` reads it off its task. A task that waits for a future
of ours, for another task, or for all of several (``asyncio.gather``), needs them. If it waits for anything else (a sleep, an
event, the first of several, anything with a timeout around it, or a gather that includes one of these), we do not know what
ends the wait.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["MAY_GO_ON", "PATIENCE_S", "WARN_AFTER_S", "Awaited", "PendingFuture", "Wait", "futures_needed_by"]

PATIENCE_S = 0.2
"""The owner gets a report of a wait that lasts longer, in seconds."""

WARN_AFTER_S = 60.0
"""After a longer wait, in seconds, the processes that have not answered are shown."""

MAY_GO_ON = "the wait was interrupted; what it waited for may go on"

T = TypeVar("T")


class PendingFuture(Protocol):
    """The attributes of a future that matter here."""

    id: int
    description: str
    procs: Sequence[int]
    rank: int | None

    def done(self) -> bool:
        """Whether all answers have arrived."""
        ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call a function when all answers have arrived."""
        ...


class Wait:
    """A wait for a future that lasts long.

    Args:
        future: The future.
        wake: Makes the thread or loop that waits look at ``error`` and ``news``.
        ends_by_itself: Whether it has a timeout.
        is_awaited: Whether an event loop goes on meanwhile; else a thread is blocked.
        warn_after_s: After how many seconds to show the processes that have not answered; None for never, and once it is done.
        had_error: Whether an earlier wait for the same future ended with an error; its owner sets it to False once it knows.

    Attributes:
        has_looked: Whether the processes were asked whether they wait in collectives.
        lasts_s: For how long it had lasted at the last report to its owner, in seconds.
        error: The error that ends it; None until there is one.
        news: The text to show where it waits.
        over: Whether it has ended.
        number: Its number for other processes; 0 if they do not need to know of it.
    """

    __slots__ = (
        "__weakref__",
        "ends_by_itself",
        "error",
        "future",
        "had_error",
        "has_looked",
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
        future: PendingFuture,
        wake: Callable[[], object],
        *,
        ends_by_itself: bool = False,
        is_awaited: bool = False,
        warn_after_s: float | None = None,
        had_error: bool = False,
    ) -> None:
        self.future = future
        self.wake = wake
        self.ends_by_itself = ends_by_itself
        self.is_awaited = is_awaited
        self.warn_after_s = warn_after_s
        self.had_error = had_error
        self.has_looked = False
        self.lasts_s = 0.0
        self.error: BaseException | None = None
        self.news = ""
        self.over = False
        self.number = 0

    def fail(self, error: BaseException) -> None:
        """End the wait with an error, which is raised where it waits; the future stays as it is. For any thread."""
        self.error = error
        self.wake()

    def tell(self, text: str) -> None:
        """Show a text where it waits. For any thread."""
        self.news = text
        self.wake()

    def show_news(self) -> None:
        """Print the text; for the thread or loop that waits."""
        news, self.news = self.news, ""
        if news and not self.over:
            print(news, file=sys.stderr, flush=True)


class Awaited(asyncio.Future[T]):
    """The asyncio future that an event loop waits for in place of a future of ours."""

    def __init__(self, future: PendingFuture, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.of = future


def futures_needed_by(task: asyncio.Task[Any]) -> set[PendingFuture]:
    """The futures without which a task can't go on. May run on another thread than the task's loop, which goes on meanwhile."""
    return _needed_by(task, {})


def _needed_by(one: asyncio.Future[Any], known: dict[asyncio.Task[Any], set[PendingFuture]]) -> set[PendingFuture]:
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
    found: set[PendingFuture] = set()
    for child in getattr(one, "_children", ()):  # of asyncio.gather
        if not child.done():
            needed = _needed_by(child, known)
            if not needed:
                return set()  # it may raise, and then gather does not wait for the others
            found |= needed
    return found


def _has_timeout(task: asyncio.Task[Any]) -> bool:
    if sys.version_info < (3, 11):
        return False  # there a timeout has a separate task
    timers: Any = getattr(task.get_loop(), "_scheduled", ())
    for timer in list(timers):
        owner = getattr(timer._callback, "__self__", None)  # asyncio has no public way to ask
        if isinstance(owner, asyncio.Timeout) and not timer.cancelled() and getattr(owner, "_task", None) is task:
            return True
    return False
