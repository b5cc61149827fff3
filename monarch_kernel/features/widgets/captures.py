"""Output widgets on ranks: what the code in ``with output:`` prints and displays becomes the state of the widget.

In a kernel, an `Output` widget asks the page to capture the output of the running request. Output of a rank comes from a host
agent, and belongs to no request that the page knows. So the rank captures it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["EVERY_S", "Capture", "capture_in_this_process"]

EVERY_S = 0.1
"""Minimum interval between two updates of a widget while its code prints, in seconds."""

_MAX_TEXT = 1 << 20


class _Stream:
    """Stands for a standard stream: text that one thread writes goes to a capture, all other use to the stream."""

    def __init__(self, capture: Capture, name: str, stream: Any) -> None:
        self._capture = capture
        self._name = name
        self.stream = stream

    def write(self, text: str) -> int:
        if not self._capture.is_here:
            return int(self.stream.write(text))
        self._capture.write(self._name, text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Capture:
    """Captures the output of this thread into a widget, from `start` to `stop`.

    Args:
        widget: the Output widget; its trait ``outputs`` is set.
        shell: the shell of the rank, whose ``emit`` publishes displays; a rank without one displays nothing.
    """

    def __init__(self, widget: Any, shell: Any) -> None:
        self._widget = widget
        self._shell = shell if shell is not None else SimpleNamespace(emit=None)
        self._thread = 0
        self._outputs: list[dict[str, Any]] = []
        self._ids: list[str | None] = []  # of displays, in parallel
        self._clears_next = False
        self._updated_at = float("-inf")
        self._is_changed = False

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one whose output is captured."""
        return threading.get_ident() == self._thread

    def start(self) -> None:
        """Capture from now on, after what the widget shows already."""
        self._thread = threading.get_ident()
        self._outputs = [dict(output) for output in self._widget.outputs]
        self._ids = [None] * len(self._outputs)
        self._streams = _Stream(self, "stdout", sys.stdout), _Stream(self, "stderr", sys.stderr)
        sys.stdout, sys.stderr = self._streams
        self._emit = self._shell.emit
        self._shell.emit = self._publish

    def stop(self) -> None:
        """Capture no more."""
        sys.stdout, sys.stderr = (stream.stream for stream in self._streams)
        self._shell.emit = self._emit
        self._update()

    def write(self, name: str, text: str) -> None:
        """Add text of a stream."""
        self._clear_if_due()
        last = self._outputs[-1] if self._outputs else {}
        if last.get("output_type") == "stream" and last.get("name") == name:
            last["text"] = (last["text"] + text)[-_MAX_TEXT:]
        else:
            self._add({"output_type": "stream", "name": name, "text": text[-_MAX_TEXT:]})
        self._note_change()

    def fail(self, error: BaseException) -> None:
        """Show an error."""
        self._clear_if_due()
        lines = "".join(traceback.format_exception(error)).splitlines()
        self._add({"output_type": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": lines})
        self._is_changed = True

    def _publish(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        if not self.is_here:
            self._emit(data, metadata)
            return
        about = metadata.get("monarch_kernel", {})
        if "clear_output" in about:
            self._clears_next = bool(about["clear_output"])
            if not self._clears_next:
                self._clear()
            self._note_change()
            return
        self._clear_if_due()
        id = about.get("display_id")
        theirs = {name: value for name, value in metadata.items() if name != "monarch_kernel"}
        output = {"output_type": "display_data", "data": data, "metadata": theirs}
        if about.get("update"):
            self._outputs = [output if known == id else other for known, other in zip(self._ids, self._outputs)]
        else:
            self._add(output, id)
        self._note_change()

    def _add(self, output: dict[str, Any], id: str | None = None) -> None:
        self._outputs.append(output)
        self._ids.append(id)

    def _clear(self) -> None:
        self._outputs.clear()
        self._ids.clear()

    def _clear_if_due(self) -> None:
        if self._clears_next:
            self._clears_next = False
            self._clear()

    def _note_change(self) -> None:
        self._is_changed = True
        if time.monotonic() >= self._updated_at + EVERY_S:
            self._update()

    def _update(self) -> None:
        if self._is_changed:
            self._is_changed = False
            self._updated_at = time.monotonic()
            self._widget.outputs = tuple(dict(output) for output in self._outputs)


def capture_in_this_process(module: ModuleType) -> None:
    """Make Output widgets of this process capture its output.

    Args:
        module: ``ipywidgets.widgets.widget_output``, which has been imported.
    """
    captures: dict[int, list[Capture]] = {}  # by the id of the widget

    def enter(self: Any) -> Any:
        from monarch_kernel.runtime.worker.ipython_shell import current_shell  # light ranks do without IPython

        capture = Capture(self, current_shell())
        captures.setdefault(id(self), []).append(capture)
        capture.start()
        return self

    def leave(self: Any, kind: object, error: BaseException | None, where: object) -> bool:
        """Show an error in the widget, as in a kernel; the code after the block runs. Only an interrupt ends the cell."""
        stack = captures[id(self)]
        capture = stack.pop()
        if not stack:
            del captures[id(self)]
        is_shown = isinstance(error, Exception)
        if error is not None and is_shown:
            capture.fail(error)
        capture.stop()
        return is_shown

    output: Any = module.Output
    output.__enter__, output.__exit__ = enter, leave
