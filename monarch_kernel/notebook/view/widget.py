"""The view of a mesh in the output of a cell: an anywidget, drawn by ``static/view.js``."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

__all__ = ["MeshWidget"]

_STATIC = Path(__file__).parent / "static"


class MeshWidget(anywidget.AnyWidget):
    """One mesh, drawn from frames (`notebook.view.frames`) that are sent as custom messages.

    Attributes:
        mesh: its name.
    """

    _esm = _STATIC / "view.js"
    _css = _STATIC / "view.css"

    mesh = traitlets.Unicode().tag(sync=True)
