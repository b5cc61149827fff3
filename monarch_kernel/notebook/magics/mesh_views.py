"""Shows meshes as tables: a `MeshView`, which ``mesh.view()`` returns, and the state of meshes at the end of each cell."""

from __future__ import annotations

import time
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.base.events import MeshView
from monarch_kernel.notebook.magics.meshes import Meshes
from monarch_kernel.notebook.view.text import mesh_html, mesh_text

__all__ = ["MeshViewFormats", "TablesAtRest"]


class MeshViewFormats:
    """The representations of views in one shell.

    Args:
        shell: the shell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        formatters: Any = shell.display_formatter.formatters  # type: ignore[union-attr]
        self._plain, self._html = formatters["text/plain"], formatters["text/html"]

    def install(self) -> None:
        """Show views as tables from now on."""
        self._plain.for_type(MeshView, lambda view, printer, cycle: printer.text(mesh_text(view)))
        self._html.for_type(MeshView, lambda view: mesh_html(view, time.time()))

    def remove(self) -> None:
        """Show views as other objects."""
        for formatter in (self._plain, self._html):
            formatter.pop(MeshView, None)


class TablesAtRest:
    """Keeps the tables of meshes right in a notebook that is saved, or that ends, directly after a cell.

    While cells run, tables are drawn now and then, and a program that executes a notebook reads no output between cells.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
    """

    def __init__(self, shell: InteractiveShell, meshes: Meshes) -> None:
        self._events = shell.events
        self._meshes = meshes

    def install(self) -> None:
        """Draw tables that are out of date at the end of each cell from now on."""
        self._events.register("post_run_cell", self._catch_up)

    def remove(self) -> None:
        """Draw no tables at the end of cells."""
        self._events.unregister("post_run_cell", self._catch_up)

    def _catch_up(self, result: object) -> None:
        for entry in list(self._meshes):
            if not entry.mesh.runtime.closed:
                entry.catch_up()
