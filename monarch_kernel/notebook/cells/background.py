"""Work that continues while the notebook does something else: background cells, late output, live tables."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
import uuid
from collections.abc import Callable, Generator
from typing import Any

from monarch_kernel.base.text import format_seconds
from monarch_kernel.errors import format_ranks
from monarch_kernel.notebook.cells.cell import POLL_S, RemoteCell
from monarch_kernel.notebook.cells.output import CellOutput

__all__ = ["Background", "BackgroundCell"]

_VIEWS_EVERY_S = 0.2
_UPDATE_EVERY_S = 1.0

_log = logging.getLogger(__name__)


class Background:
    """A thread that polls work that no foreground cell waits for; it lives as long as there are meshes.

    Args:
        draw: updates the live tables; called five times a second.
    """

    def __init__(self, draw: Callable[[float], None]) -> None:
        self._draw = draw
        self._polls: dict[object, Callable[[float], bool]] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it does not run yet."""
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="monarch-view", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop the thread and poll its work one last time."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._poll_all(time.monotonic())

    def drive(self, key: object, poll: Callable[[float], bool]) -> None:
        """Call ``poll`` with the time about 20 times a second until it returns False; no effect if ``key`` is driven already.

        May be called from any thread; returns immediately.
        """
        with self._lock:
            self._polls.setdefault(key, poll)
        self._wake.set()

    def _run(self) -> None:
        draw_at = 0.0
        while not self._is_closed:
            self._wake.wait(POLL_S if self._polls else _VIEWS_EVERY_S)
            self._wake.clear()
            now = time.monotonic()
            polls = self._poll_all(now)
            if now >= draw_at:
                draw_at = now + _VIEWS_EVERY_S
                self._guard(self._draw, now)
            if polls and not self._is_closed:
                time.sleep(POLL_S / 5)  # output arrives as many small events, each of which wakes this thread

    def _poll_all(self, now: float) -> bool:
        with self._lock:
            polls, self._polls = self._polls, {}
        for key, poll in polls.items():
            if self._guard(poll, now):
                self.drive(key, poll)  # no effect if another thread has queued the key meanwhile
        return bool(polls)

    @staticmethod
    def _guard(function: Callable[[float], Any], now: float) -> bool:
        try:
            return bool(function(now))
        except Exception:  # one view that fails must not end the others
            _log.exception("%r failed", function)
            return False

    def follow(self, output: CellOutput) -> None:
        """Show output that arrives after a cell has ended, below that cell."""

        def poll(now: float) -> bool:
            output.poll_late(now)
            return output.is_open

        output.leave(lambda: self.drive(output, poll))


class BackgroundCell:
    """A cell that runs in the background; ``%%remote --background`` returns it.

    Awaitable: ``await cell`` returns the same as `result`.

    Args:
        cell: the cell to run.
        background: polls the cell.
        values: converts the ranks' results into the result of the cell.
        on_end: called once with the cell when it has ended, to show its values or its error.
        born: when it was sent, if it runs already.
    """

    def __init__(
        self,
        cell: RemoteCell,
        background: Background,
        values: Callable[[Any], Any],
        on_end: Callable[[RemoteCell], None],
        born: float | None = None,
    ) -> None:
        self._cell = cell
        self._values = values
        self._on_end = on_end
        self._done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._display_id = uuid.uuid4().hex
        self._updated_at = time.monotonic()
        self._since = self._updated_at if born is None else born
        self._shown_text = ""
        self._state = "queued" if born is None else "running"
        self._where = f"cell [{cell.number}] on {cell.mesh.name}{format_ranks(cell.ranks)}"
        self._showing = threading.Lock()
        cell.output.sink.pin()
        cell.way_out = f"%mesh interrupt {cell.mesh.name}"
        if self._poll(self._updated_at):  # sends the cell now if no earlier cell is in the way
            background.drive(self, self._poll)

    @property
    def state(self) -> str:
        """``queued``, ``running``, ``done``, ``failed``, or ``cancelled`` (or interrupted in another way)."""
        return self._state

    def done(self) -> bool:
        """Whether the cell has ended, with a result or an error."""
        return self._done.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the cell to end.

        Args:
            timeout: in seconds; the cell continues to run after a timeout.

        Returns:
            With ``--out``, a `ValueMesh` of the values of the last expression; else None.

        Raises:
            TimeoutError: the cell has not ended yet.
            RemoteError: the cell failed on some ranks.
            SupervisionError: a rank died.
            RemoteInterrupt: the cell was cancelled or interrupted.
        """
        try:
            return self._done.result(timeout)
        except concurrent.futures.TimeoutError:
            if self._done.done():
                raise
            raise TimeoutError(f"{self._where} did not end within {timeout:g} s; it continues to run") from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the cell to end and return its error; None if it succeeded."""
        try:
            self.result(timeout)
        except TimeoutError:
            if not self._done.done():
                raise
        except BaseException:  # returned below
            if not self._done.done():  # KeyboardInterrupt while we waited
                raise
        return self._done.exception(0)

    def cancel(self) -> None:
        """Interrupt the cell on its ranks, which keep their state; a cell that still waits for its turn is dropped."""
        self._cell.stop("cancelled")

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio

        return asyncio.wrap_future(self._done).__await__()

    def __repr__(self) -> str:
        goes_on = self._state in ("queued", "running")
        seconds = format_seconds((time.monotonic() if goes_on else self._updated_at) - self._since)
        return f"{self._where}: {self._state} {'for' if goes_on else 'after'} {seconds}"

    def _ipython_display_(self) -> None:
        """Show the cell as a line that is updated in place; several outputs may show it."""
        from IPython.display import publish_display_data

        with self._showing:
            self._shown_text = repr(self)
            publish_display_data({"text/plain": self._shown_text}, transient={"display_id": self._display_id})

    def _update_display(self, now: float) -> None:
        """Update the lines that show the cell."""
        from IPython.core.getipython import get_ipython
        from IPython.display import publish_display_data

        with self._showing:
            text = repr(self)
            if self._shown_text and text != self._shown_text and getattr(get_ipython(), "kernel", None) is not None:
                self._shown_text = text
                publish_display_data({"text/plain": text}, transient={"display_id": self._display_id}, update=True)

    def _poll(self, now: float) -> bool:
        cell, state = self._cell, self._state
        if cell.stage != "over":
            cell.poll(now)
        if cell.sent_at is not None and self._state == "queued":  # it may be over already
            self._state, self._since = "running", cell.sent_at
        if cell.stage == "over":
            self._end(now)
        if self._state != state or now >= self._updated_at + _UPDATE_EVERY_S:
            self._updated_at = now
            self._update_display(now)
        return cell.stage != "over"

    def _end(self, now: float) -> None:
        self._updated_at = now
        result, error = None, None
        try:
            result = self._values(self._cell.result())
        except BaseException as failure:  # also RemoteInterrupt, a KeyboardInterrupt: `result` raises it
            error = failure
            self._state = "cancelled" if isinstance(error, KeyboardInterrupt) else "failed"
        else:
            self._state = "done"
        try:
            self._on_end(self._cell)
        finally:  # threads that wait for the result must not wait forever
            if error is not None:
                self._done.set_exception(error)
            else:
                self._done.set_result(result)
