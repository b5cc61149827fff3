"""Writes to the notebook: output lines, rich results, and tables that are updated in place."""

from __future__ import annotations

import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import clear_output, publish_display_data

from monarch_kernel.base.events import MeshView
from monarch_kernel.base.text import printable
from monarch_kernel.notebook.output.rich import Bundle
from monarch_kernel.notebook.view.text import mesh_html, mesh_line, mesh_text

__all__ = ["LiveView", "Sink"]

_UP_AND_ERASE = "\x1b[{n}A\r\x1b[J"  # moves up n lines, and erases them


class Sink:
    """Shows the output of one cell: in the notebook cell that is running, and after `pin` in the cell that created the sink.

    ``%%capture`` and the like capture the output of the running notebook cell. Later output goes to the launching cell by its
    message's header, from any thread. A terminal has no cells; there all output is printed.

    Args:
        shell: the shell of the notebook; None in a program that has none.

    Attributes:
        copy: also gets all text.
    """

    def __init__(self, shell: InteractiveShell | None) -> None:
        self._kernel: Any = getattr(shell, "kernel", None)
        self._parent: Any = shell.get_parent() if self._kernel is not None else None  # type: ignore[union-attr]
        self._is_pinned = False
        self.copy: Callable[[str], None] = lambda text: None
        self._live_lines = 0  # number of lines at the end of a terminal that can be rewritten

    @property
    def can_update(self) -> bool:
        """Whether displayed output can be updated in place."""
        return self._kernel is not None

    def pin(self) -> None:
        """Send output from now on to the cell that was running when this sink was created."""
        self._is_pinned = self._kernel is not None

    def write(self, stream: str, text: str) -> None:
        """Write text to ``stdout`` or ``stderr``, without terminal controls other than colours."""
        text = printable(text)
        self.copy(text)
        if self._is_pinned:
            self._send("stream", {"name": stream, "text": text})
            return
        self.live("")
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(text)
        target.flush()

    def live(self, text: str) -> None:
        """Rewrite the last lines of a terminal; no effect in a notebook, which uses displays instead."""
        if self._live_lines:
            sys.stdout.write(_UP_AND_ERASE.format(n=self._live_lines))
        self._live_lines = 0
        if text and not self.can_update and sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            lines = [line[:width] for line in text.split("\n")]
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            self._live_lines = len(lines)
        sys.stdout.flush()

    def display(self, data: Bundle, metadata: Bundle | None = None, display_id: str = "", update: bool = False) -> None:
        """Display a MIME bundle, or update the display with the same ``display_id``."""
        transient = {"display_id": display_id} if display_id else {}
        if not update and isinstance(text := data.get("text/plain"), str):
            self.copy(f"{text}\n")
        if self._is_pinned:
            kind = "update_display_data" if update else "display_data"
            self._send(kind, {"data": dict(data), "metadata": dict(metadata or {}), "transient": transient})
            return
        publish_display_data(dict(data), dict(metadata or {}), transient=transient, update=update)

    def clear(self, wait: bool) -> None:
        """Clear the output of the cell; with ``wait``, when the next output arrives."""
        if self._is_pinned:
            self._send("clear_output", {"wait": wait})
        elif self.can_update:
            clear_output(wait)

    def error(self, etype: str, message: str, lines: Sequence[str]) -> None:
        """Show an error without failing a cell."""
        lines = [printable(line) for line in lines]
        if self._is_pinned:
            self._send("error", {"ename": etype, "evalue": message, "traceback": list(lines)})
            return
        print("\n".join(lines), file=sys.stderr, flush=True)

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        kernel = self._kernel
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._parent, ident=kernel._topic(kind))


class LiveView:
    """A table of a mesh's ranks in a cell's output, updated in place at most every `EVERY_S`.

    A terminal, which can't update printed output, shows the table once, below the first line of text.

    Args:
        complete: adds to a view what only a table that is drawn needs, such as the points of curves.
        is_brief: whether a frontend without HTML, such as a terminal, at first shows a line instead of the table.
        on_text: called with each line of text that is shown in place of the table.
    """

    EVERY_S = 0.2

    def __init__(
        self,
        complete: Callable[[MeshView], MeshView] = lambda view: view,
        *,
        is_brief: bool = False,
        on_text: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.complete = complete
        self._on_text = on_text
        self._is_brief = is_brief
        self._id = uuid.uuid4().hex
        self._last: tuple[str, str] | None = None
        self._has_table = False
        self._at = 0.0
        self._states: Sequence[object] = ()
        self._lock = threading.Lock()
        self._is_live = getattr(get_ipython(), "kernel", None) is not None

    @property
    def is_new(self) -> bool:
        """Whether nothing has been shown yet."""
        return self._last is None

    def show(self, view: MeshView) -> None:
        """Show the table for the first time."""
        self._publish(view, update=False)

    def update(self, view: MeshView, now: float, *, force: bool = False, every_s: float = EVERY_S) -> None:
        """Update the table if it has changed and the last update is at least ``every_s`` ago."""
        with self._lock:
            if force or now >= self._at + every_s:
                self._at = now
                self._publish(view, update=True)

    def follow(self, view: MeshView, now: float, *, force: bool = False, every_s: float = EVERY_S) -> None:
        """Update the table if a rank runs or its state has changed; times alone do not redraw an idle mesh."""
        states = (
            *((rank.state, rank.activity, rank.last_error) for rank in view.ranks),
            *((loop.key, loop.state, loop.step) for loop in view.loops),
            *view.waits,
            *view.lost_hosts,
            view.trajectory_count,
        )
        if states != self._states or any(rank.state == "running" for rank in view.ranks):
            if force or now >= self._at + every_s:
                self._states = states
            self.update(view, now, force=force, every_s=every_s)

    def show_text(self, text: str, *, first: bool = False) -> None:
        """Show a line of text in place of the table."""
        self._on_text(text)
        if self._last != (text, text) and (first or self._is_live):
            self._last = (text, text)
            self._display({"text/plain": text}, update=not first)

    def _publish(self, view: MeshView, update: bool) -> None:
        if update and self._has_table and not self._is_live:
            return
        update = update and self._is_live and not self.is_new
        self._has_table = True
        text = mesh_text(view) if update or not self._is_brief else mesh_line(view)
        faces = (text, mesh_html(self.complete(view), time.time()))
        if faces != self._last or not update:
            self._last = faces
            self._display({"text/plain": faces[0], "text/html": faces[1]}, update)

    def _display(self, data: Bundle, update: bool) -> None:
        shell = get_ipython()
        if not update or shell is None:
            publish_display_data(dict(data), transient={"display_id": self._id}, update=update)
            return
        sink = Sink(shell)
        sink.pin()  # bypass %%capture of the running cell: the updated display is not its output
        sink.display(data, None, self._id, update)
