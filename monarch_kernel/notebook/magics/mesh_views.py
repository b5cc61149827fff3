"""Shows a `MeshView`, which ``mesh.view()`` returns, as the table of the mesh; without that, the notebook shows its fields."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.base.events import MeshView
from monarch_kernel.notebook.view.text import mesh_html, mesh_text

__all__ = ["MeshViewFormats"]


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
        self._html.for_type(MeshView, mesh_html)

    def remove(self) -> None:
        """Show views as other objects."""
        for formatter in (self._plain, self._html):
            formatter.pop(MeshView, None)
