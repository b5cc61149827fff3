"""Events for listeners of requests and of the session; output without a listener is printed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from monarch_kernel.base.events import OutputEvent
from monarch_kernel.runtime.controller.effects import BacklogEvent, RichEvent
from monarch_kernel.runtime.controller.printer import OutputPrinter
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["Listener", "Listeners"]

_log = logging.getLogger(__name__)

Listener = Callable[["OutputEvent | RichEvent"], None]

MAX_LISTENERS = 64


class Listeners:
    """The listeners of a session; used on the I/O thread.

    Args:
        is_pending: Whether a request has not resolved.

    Attributes:
        backlog: What ranks wrote before this controller attached.
        events: The number of pieces of output and displays so far.
    """

    def __init__(self, is_pending: Callable[[int], bool]) -> None:
        self.backlog: list[BacklogEvent] = []
        self.events = 0
        self._is_pending = is_pending
        self._printer = OutputPrinter()
        self._by_request: dict[int, Listener] = {}
        self._missed: list[OutputEvent | RichEvent] = []
        self._watchers: list[Callable[[object], None]] = []

    def add(self, id: int, listen: Listener) -> None:
        """Add the listener of a request. Of requests that have resolved, the latest keep theirs, for late output."""
        for old in list(self._by_request)[: max(0, len(self._by_request) + 1 - MAX_LISTENERS)]:
            if not self._is_pending(old):
                self._by_request.pop(old, None)
        self._by_request[id] = listen

    def keep(self, id: int) -> None:
        """Keep the events of a request until it has a listener (`resume`)."""
        self._by_request[id] = lambda event: self._missed.append(event)

    def resume(self, id: int, listen: Listener) -> None:
        """Add the listener of a request, which gets the events that were kept."""
        self._by_request[id] = listen
        missed, self._missed = self._missed, []
        for event in missed:
            self._by_request.get(event.request, self._printer.take)(event)

    def watch(self, watcher: Callable[[object], None]) -> Callable[[], None]:
        """Call a quick function with each event; return a function that ends this."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher) if watcher in self._watchers else None

    def tell(self, event: object) -> None:
        """Hand an event to its listener, and to all that watch the session."""
        if isinstance(event, OutputEvent | RichEvent):
            self.events += 1
            self._by_request.get(event.request, self._printer.take)(event)
        elif isinstance(event, BacklogEvent):
            self.backlog.append(event)
        for watcher in list(self._watchers):
            try:
                watcher(event)
            except Exception:  # a view must not stop the loop
                _log.exception("a watcher failed")

    def finish(self, id: int) -> None:
        """Print the output of a request that is about to end, so that it is shown before that."""
        if self._printer.holds(id):
            self.flush(id)

    @property
    def is_empty(self) -> bool:
        """Whether all output was printed."""
        return self._printer.is_empty

    def wait_for(self, future: Future[None], quiet_s: float) -> None:
        """Wait for a future, until no output has arrived for ``quiet_s`` seconds; not on the I/O thread."""
        seen = -1
        while not future.wait(quiet_s) and seen != self.events:
            seen = self.events

    def flush(self, ended: int | None = None, *, everything: bool = False) -> None:
        """Print collected output, with incomplete lines of a request that ends, or with all incomplete lines."""
        try:
            self._printer.flush(ended, everything=everything)
        except (OSError, ValueError):  # stdout is closed
            _log.debug("output of ranks could not be printed", exc_info=True)
