"""The live view of a mesh in a cell's output: an anywidget, drawn by ``static/view.js``."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

__all__ = ["MeshWidget"]

_STATIC = Path(__file__).parent / "static"


class MeshWidget(anywidget.AnyWidget):
    """Shows one mesh, from frames (`notebook.view.frames`) that it receives as custom messages.

    Attributes:
        mesh: name of the mesh.
    """

    # As texts: for a path, anywidget keeps each widget that was ever made, to reload it when the file changes.
    _esm = (_STATIC / "view.js").read_text(encoding="utf-8")
    _css = (_STATIC / "view.css").read_text(encoding="utf-8")

    mesh = traitlets.Unicode().tag(sync=True)
