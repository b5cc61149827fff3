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

    _esm = _STATIC / "view.js"
    _css = _STATIC / "view.css"

    mesh = traitlets.Unicode().tag(sync=True)
