"""What goes on while the notebook does something else: cells in the background, late output, live tables."""

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
from monarch_kernel.notebook.cells.cell import TURN_S, RemoteCell
from monarch_kernel.notebook.cells.output import CellOutput

__all__ = ["Background", "BackgroundCell"]

_VIEWS_EVERY_S = 0.2
_SAY_EVERY_S = 1.0

_log = logging.getLogger(__name__)


class Background:
    """One thread that drives what nobody waits for; it is there while meshes are.

    Args:
        draw: brings the live tables up to date; called five times a second.
    """

    def __init__(self, draw: Callable[[float], None]) -> None:
        self._draw = draw
        self._turns: dict[object, Callable[[float], bool]] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if it has not."""
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="monarch-view", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread, when what it drives has had a last turn."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._turn_all(time.monotonic())

    def drive(self, key: object, turn: Callable[[float], bool]) -> None:
        """Call ``turn`` with the time, some 20 times a second, until it gives False; does nothing if ``key`` is driven already.

        May be called from any thread; it returns at once.
        """
        with self._lock:
            self._turns.setdefault(key, turn)
        self._wake.set()

    def _run(self) -> None:
        draw_at = 0.0
        while not self._is_closed:
            self._wake.wait(TURN_S if self._turns else _VIEWS_EVERY_S)
            self._wake.clear()
            now = time.monotonic()
            turns = self._turn_all(now)
            if now >= draw_at:
                draw_at = now + _VIEWS_EVERY_S
                self._guard(self._draw, now)
            if turns and not self._is_closed:
                time.sleep(TURN_S / 5)  # output comes in many small events, each of which wakes us

    def _turn_all(self, now: float) -> bool:
        with self._lock:
            turns, self._turns = self._turns, {}
        for key, turn in turns.items():
            if self._guard(turn, now):
                self.drive(key, turn)  # unless somebody has asked for it meanwhile
        return bool(turns)

    @staticmethod
    def _guard(function: Callable[[float], Any], now: float) -> bool:
        try:
            return bool(function(now))
        except Exception:  # one view that fails must not end the others
            _log.exception("%r failed", function)
            return False

    def follow(self, output: CellOutput) -> None:
        """Show what comes for a cell that is over, where that cell stands."""

        def turn(now: float) -> bool:
            output.turn_late(now)
            return output.is_open

        output.leave(lambda: self.drive(output, turn))


class BackgroundCell:
    """A cell that runs while the notebook goes on: what ``%%remote --background`` gives.

    Awaitable: ``await cell`` gives its result, as `result` does.

    Args:
        cell: what runs.
        background: drives it.
        values: makes the result of what the ranks gave.
        on_end: called once with the cell when it is over, to show its values or its error.
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
        self._said_at = time.monotonic()
        self._since = self._said_at if born is None else born
        self._said = ""
        self._state = "queued" if born is None else "running"
        self._where = f"cell [{cell.number}] on {cell.mesh.name}{format_ranks(cell.ranks)}"
        self._showing = threading.Lock()
        cell.output.sink.pin()
        if self._turn(self._said_at):  # sent at once, if it is its turn
            background.drive(self, self._turn)

    @property
    def state(self) -> str:
        """``queued``, ``running``, ``done``, ``failed``, or ``cancelled`` (or interrupted in another way)."""
        return self._state

    def done(self) -> bool:
        """Whether it is over, for better or worse."""
        return self._done.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for its end.

        Args:
            timeout: seconds; the cell goes on when they are over.

        Returns:
            With ``--out``, a `ValueMesh` of the values of the last expression; else None.

        Raises:
            TimeoutError: it is not over yet.
            RemoteError: it failed on some ranks.
            SupervisionError: a rank died.
            RemoteInterrupt: it was cancelled, or interrupted.
        """
        try:
            return self._done.result(timeout)
        except concurrent.futures.TimeoutError:
            if self._done.done():
                raise
            raise TimeoutError(f"{self._where} is not over within {timeout:g} s; it goes on") from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for its end, and give the error; None if it succeeded."""
        try:
            self.result(timeout)
        except TimeoutError:
            if not self._done.done():
                raise
        except BaseException:  # given below
            if not self._done.done():  # KeyboardInterrupt while we waited
                raise
        return self._done.exception(0)

    def cancel(self) -> None:
        """Interrupt it on the ranks, whose state is kept; a cell that waits for its turn is dropped."""
        self._cell.stop("cancelled")

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio

        return asyncio.wrap_future(self._done).__await__()

    def __repr__(self) -> str:
        goes_on = self._state in ("queued", "running")
        seconds = format_seconds((time.monotonic() if goes_on else self._said_at) - self._since)
        return f"{self._where}: {self._state} {'for' if goes_on else 'after'} {seconds}"

    def _ipython_display_(self) -> None:
        """Show it as a line that is kept up to date; more than one place may show it."""
        from IPython.display import publish_display_data

        with self._showing:
            self._said = repr(self)
            publish_display_data({"text/plain": self._said}, transient={"display_id": self._display_id})

    def _say(self, now: float) -> None:
        """Bring the lines that show it up to date."""
        from IPython.core.getipython import get_ipython
        from IPython.display import publish_display_data

        with self._showing:
            text = repr(self)
            if self._said and text != self._said and getattr(get_ipython(), "kernel", None) is not None:
                self._said = text
                publish_display_data({"text/plain": text}, transient={"display_id": self._display_id}, update=True)

    def _turn(self, now: float) -> bool:
        cell, state = self._cell, self._state
        if cell.stage != "over":
            cell.turn(now)
        if cell.stage == "running" and self._state == "queued":
            self._state = "running"
            self._since = now
        if cell.stage == "over":
            self._end(now)
        if self._state != state or now >= self._said_at + _SAY_EVERY_S:
            self._said_at = now
            self._say(now)
        return cell.stage != "over"

    def _end(self, now: float) -> None:
        self._said_at = now
        result, error = None, None
        try:
            result = self._values(self._cell.result())
        except BaseException as failure:  # also RemoteInterrupt, which is a KeyboardInterrupt: whoever asks gets it
            error = failure
            self._state = "cancelled" if isinstance(error, KeyboardInterrupt) else "failed"
        else:
            self._state = "done"
        try:
            self._on_end(self._cell)
        finally:  # whoever waits must not wait for ever
            if error is not None:
                self._done.set_exception(error)
            else:
                self._done.set_result(result)
