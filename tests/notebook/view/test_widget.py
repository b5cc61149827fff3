"""The live view as a widget: a notebook may make very many, and each is freed when it is closed."""

from __future__ import annotations

import gc
import weakref

from monarch_kernel.notebook.view.widget import MeshWidget


def test_a_widget_that_was_closed_is_freed() -> None:
    widget = MeshWidget(mesh="t")
    assert "export default" in widget._esm
    assert ".mk-" in widget._css
    known = weakref.ref(widget)
    widget.layout.close()
    widget.close()
    del widget
    gc.collect()
    assert known() is None
