"""Shows the output of one cell, folded, in order and bounded, in the notebook cell that it belongs to."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.events import OutputEvent
from monarch_kernel.base.frontend import shows_all_output
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.output.bars import BarBlock
from monarch_kernel.notebook.output.folding import FoldedItem, FoldedLine, OutputFolder, render
from monarch_kernel.notebook.output.mime import nbytes
from monarch_kernel.notebook.output.rate_limit import UNLIMITED
from monarch_kernel.notebook.output.rich import OUR_METADATA, Bundle, Clear, RichFolder, RichOutput, RichSlots, compose
from monarch_kernel.runtime.controller.effects import RichEvent

__all__ = ["CellOutput"]

_QUIET_S = 0.2
_MAX_WAITING_NBYTES = 64 << 20
"""Size of the displays of a cell that wait to be looked at; above it the oldest are left out."""

_LEFT_OUT = "… a display left out here: displays arrive faster than they can be shown"


class _Waiting:
    """An event that waits to be looked at."""

    __slots__ = ("event", "nbytes")

    def __init__(self, event: OutputEvent | RichEvent) -> None:
        self.event = event
        self.nbytes = 0

    def leave_out(self) -> None:
        """Keep of a display only that there was one, and to which display it belongs."""
        assert isinstance(self.event, RichEvent)
        about = self.event.metadata.get(OUR_METADATA)
        is_shown = bool(self.event.data)  # else it clears the output
        self.event = self.event._replace(
            data={"text/plain": _LEFT_OUT} if is_shown else {}, metadata={} if about is None else {OUR_METADATA: about}
        )


class CellOutput:
    """Folds the output of one cell and writes it to a sink, including output that arrives after the cell has ended.

    Args:
        mesh: the mesh whose ranks write.
        sink: shows the output.
        slots: the mesh's displays that can be updated.
        raw: whether each rank's lines are shown separately.
        stream: whether output is shown as it arrives; else all of it is shown at the end.
    """

    def __init__(self, mesh: ProcMesh, sink: Sink, slots: RichSlots, *, raw: bool, stream: bool = True) -> None:
        self.sink = sink
        self._stream = stream
        self._held: list[FoldedLine | FoldedItem] = []
        self._events: deque[_Waiting] = deque()
        self._displays: deque[_Waiting] = deque()  # those of the events that are displays
        self._waiting_nbytes = 0
        self._lock = threading.Lock()  # for the three attributes above
        limits: dict[str, Any] = {"burst_lines": UNLIMITED, "burst_nbytes": UNLIMITED} if shows_all_output() else {}
        self._folder = OutputFolder(mesh.ranks, raw=raw, more=f"%mesh logs {mesh.name}", **limits)
        self._id = uuid.uuid4().hex
        self._rich = RichFolder(mesh.ranks, slots, self._id)
        self._blocks: dict[int, str] = {}  # number of a shown group of progress bars -> its text
        self._received_at = 0.0
        self._is_open = False
        self._polling = threading.Lock()
        self._on_late: Callable[[], None] | None = None

    def handle(self, event: OutputEvent | RichEvent) -> None:
        """Queue an event; called on the thread that leads the runtime's loop."""
        with self._lock:
            waiting = _Waiting(event)
            self._events.append(waiting)
            if isinstance(event, RichEvent):
                waiting.nbytes = nbytes(event.data) + nbytes(event.metadata)
                self._displays.append(waiting)
                self._waiting_nbytes += waiting.nbytes
                while self._waiting_nbytes > _MAX_WAITING_NBYTES and len(self._displays) > 1:
                    oldest = self._displays.popleft()
                    self._waiting_nbytes -= oldest.nbytes
                    oldest.leave_out()
        if self._on_late is not None:
            self._on_late()

    def leave(self, on_late: Callable[[], None]) -> None:
        """Show further output in the launching cell, as its driver no longer calls `poll`.

        Args:
            on_late: called when output has arrived, on the thread that leads the runtime's loop.
        """
        self.sink.pin()
        self._on_late = on_late
        if self.is_open:
            on_late()

    @property
    def is_open(self) -> bool:
        """Whether there is output that has not been shown yet."""
        return self._is_open or bool(self._events)

    def poll(self, now: float, *, waits: bool = True) -> None:
        """Show the output that is due; without ``waits``, also lines that wait for other ranks to write the same."""
        with self._polling:
            self._take(now)
            shown = self._folder.drain(now, waits=waits)
            if not self._stream:
                self._held += shown  # folding bounds its size
                return
            self._write(shown, now)
            self._show(self._rich.release(now))
            self._show_bars(self._folder.bars(now))

    def finish(self, now: float, *, goes_on: bool = False) -> None:
        """Show all remaining output; with ``goes_on``, progress bars stay live."""
        with self._polling:
            self._take(now)
            self._stream = True
            held, self._held = self._held, []
            self._write([*held, *self._folder.finish(now, goes_on=goes_on)], now)
            self._show(self._rich.release(now, everything=True))
            self._show_bars(self._folder.bars(now, last=True), last=True)
            self._is_open = False

    def show_values(self, bundles: Mapping[int, Bundle]) -> None:
        """Show the values of the last expression, by rank."""
        with self._polling:
            self._show(compose({rank: (bundle, {}) for rank, bundle in bundles.items()}))

    def poll_late(self, now: float) -> None:
        """Show output that arrived after the end; a line without an end is shown after `_QUIET_S` without further output."""
        self.poll(now)
        if now - self._received_at > _QUIET_S:
            self.finish(now, goes_on=True)

    def _take(self, now: float) -> None:
        with self._lock:
            events = [waiting.event for waiting in self._events]
            self._events.clear()
            self._displays.clear()
            self._waiting_nbytes = 0
        if events:
            self._received_at, self._is_open = now, True
        for event in sorted(events, key=lambda event: event.rank):  # output of one turn is shown in the order of ranks
            if isinstance(event, OutputEvent):
                self._folder.feed(event.rank, event.stream, event.text, now, event.dropped_lines)
            else:
                self._folder.feed_item(event.rank, self._rich.feed(event.rank, event.data, event.metadata), now)

    def _write(self, shown: Iterable[FoldedLine | FoldedItem], now: float) -> None:
        lines: list[FoldedLine] = []
        for each in shown:
            if isinstance(each, FoldedLine):
                lines.append(each)
                self._rich.lines_shown(each.ranks)
            else:
                self._write_lines(lines)
                lines = []
                self._show(self._rich.take(each, now))
        self._write_lines(lines)

    def _write_lines(self, lines: Sequence[FoldedLine]) -> None:
        for stream, text in render(lines):
            self.sink.write(stream, text)

    def _show(self, outputs: Iterable[RichOutput | Clear]) -> None:
        for output in outputs:
            if isinstance(output, Clear):
                self.sink.clear(output.wait)
                self._folder.cleared()
            else:
                self.sink.display(output.data, output.metadata, output.display_id, output.update)

    def _show_bars(self, blocks: Iterable[BarBlock], *, last: bool = False) -> None:
        for block in blocks:
            is_new = block.number not in self._blocks
            self._blocks[block.number] = block.text
            if self.sink.can_update:
                self.sink.display({"text/plain": block.text}, None, f"{self._id}-bars-{block.number}", not is_new)
        if self._blocks and not self.sink.can_update:
            self.sink.live("" if last else self._blocks[max(self._blocks)])
            if last:
                self.sink.write("stdout", "".join(f"{text}\n" for text in self._blocks.values() if text))
                self._blocks.clear()
