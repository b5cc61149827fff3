"""Records a cell on ranks, if a record runs (`features.record`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.errors import format_ranks
from monarch_kernel.features.record.controller import RecordControl
from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.notebook.cells.output import CellOutput

__all__ = ["CellRecording"]


class CellRecording:
    """The record of one cell; has no effect while no record runs.

    Args:
        mesh: where the cell runs.
        code: its code, or the function that the ranks call.
        number: its number.
        output: shows what it writes.
    """

    def __init__(self, mesh: ProcMesh, code: str | Callable[[], Any], number: int, output: CellOutput) -> None:
        self._mesh = mesh
        self._code = code
        self._number = number
        self._output = output
        self._recorder: Recorder | None = None
        self._id = 0

    def begin(self) -> None:
        """The cell is about to be sent; also when it is sent again."""
        if self._recorder is not None or self._mesh.runtime.closed:
            return
        control = RecordControl(self._mesh.runtime)
        recorder = control.recorder
        if recorder is None:
            return
        code, why = self._code, ""
        if not isinstance(code, str):
            code, why = f"# {getattr(code, '__qualname__', 'a function')}(), called on the ranks", "calls a function"
        ranks = format_ranks(self._mesh.ranks).strip("[]")
        self._id = recorder.cell_started(code, self._number, self._mesh.name, ranks, why)
        recorder.mesh_used(self._mesh.name, self._describe)
        self._recorder = recorder
        self._output.sink.copy = self._show
        control.before_cell(self._mesh.procs, self._id)

    def _describe(self) -> str:
        """Describe the mesh: its axes, where its ranks are, and their devices."""
        view = self._mesh.whole.view()
        devices = Counter(rank.device.partition(":")[0] for rank in view.ranks)
        axes = " ".join(f"{axis}={size}" for axis, size in view.axes)
        return f"{axes}; {view.where}; {', '.join(f'{count} {device}' for device, count in devices.items())}"

    def _show(self, text: str) -> None:
        if self._recorder is not None:
            self._recorder.cell_output(self._id, text)

    def sent(self, request: int) -> None:
        """The cell was sent as a request."""
        if self._recorder is not None:
            self._recorder.cell_sent(self._id, request)

    def end(self, error: BaseException | None) -> None:
        """The cell is over."""
        recorder = self._recorder
        if recorder is None:
            return
        if isinstance(error, KeyboardInterrupt):
            recorder.cell_ended(self._id, "interrupted", str(error))
            recorder.event("interrupt", f"cell [{self._number}]: {error}", mesh=self._mesh.name)
        else:
            recorder.cell_ended(self._id, "ok" if error is None else "failed", "" if error is None else str(error))
