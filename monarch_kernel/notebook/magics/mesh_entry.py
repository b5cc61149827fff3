"""A named mesh of the notebook, with its cells, its hosts and what shows it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.events import MeshView
from monarch_kernel.notebook.cells.call_watch import CallWatch
from monarch_kernel.notebook.cells.cell import CellQueue
from monarch_kernel.notebook.cells.display import LiveView
from monarch_kernel.notebook.magics.bring_up_hosts import Allocation
from monarch_kernel.notebook.magics.viewers import LiveWidget
from monarch_kernel.notebook.syntax.up_arguments import UpOptions
from monarch_kernel.runtime.detached.session import DetachedSession

__all__ = ["MeshEntry"]


@dataclass
class MeshEntry:
    """A named mesh with its cells and the table that shows it."""

    mesh: ProcMesh
    options: UpOptions
    cell_queue: CellQueue
    view: LiveView = field(default_factory=LiveView)
    draw_at: float = 0.0  # when to draw the table next; later if drawing was slow
    widget: LiveWidget | None = None  # the live view, where the frontend can draw it
    kept: DetachedSession | None = None  # the session of a mesh that outlives the kernel
    allocation: Allocation | None = None  # its hosts, if they are not this machine
    replacing: threading.Lock = field(default_factory=threading.Lock)  # held while ranks are replaced
    calls: CallWatch = field(init=False)

    def __post_init__(self) -> None:
        self.calls = CallWatch(self.options.warn_after_s)
        self.view.complete = self._with_curves

    def new_view(self) -> None:
        """Show the table in the running cell; the previous table keeps the last state."""
        self.view = LiveView(self._with_curves)
        self.view.show(self.mesh.view())

    def draw(self) -> None:
        """Draw the table now."""
        self.view.update(self.mesh.view(), time.monotonic(), force=True)

    def catch_up(self) -> None:
        """Draw the table now, unless it shows the current state."""
        self.view.follow(self.mesh.view(), time.monotonic(), force=True)

    def watch_calls(self, now: float) -> None:
        """Show in the view which ranks have waited long in calls of actors, when it is time to look."""
        if not self.mesh.runtime.closed:
            self.calls.poll(self.mesh, now)

    def end_widget(self, note: str) -> None:
        """Replace the widget by a note, below the table with the last known state."""
        if self.widget is not None:
            self.draw()
            self.widget.close(note)
            self.widget = None

    def end_note(self) -> str:
        """Say what becomes of the mesh when the kernel ends."""
        if self.kept is not None:
            return f"The kernel has ended. {self.options.name} goes on: %mesh attach {self.options.name}"
        return f"{self.options.name} ended with the kernel. The table shows its last state."

    def _with_curves(self, view: MeshView) -> MeshView:
        keys = {loop.key for loop in view.loops}
        loops = []
        for loop in self.mesh.loops if keys else ():
            with suppress(LookupError):  # the loop may be gone by now
                if loop.key in keys:
                    loops.append(loop.view())
        return replace(view, loops=tuple(loops)) if loops else view
