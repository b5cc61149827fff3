"""Records the cells of the notebook as they were typed, while a record runs."""

from __future__ import annotations

from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.features.record.recorder import Recorder

__all__ = ["KernelCells"]

_LEFT_OUT = "runs in the kernel, so a replay leaves it out"


class KernelCells:
    """Follows the cells of a shell. A cell that ranks run is recorded twice: as it was typed, and as they run it.

    Args:
        shell: the shell of the notebook.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._recorder: Recorder | None = None
        self._cell = 0

    @property
    def is_on(self) -> bool:
        """Whether it follows cells."""
        return self._recorder is not None

    def begin(self, recorder: Recorder) -> None:
        """Record the cells that start from now on."""
        self.end()
        self._recorder = recorder
        self._shell.events.register("pre_run_cell", self._started)
        self._shell.events.register("post_run_cell", self._ended)

    def end(self) -> None:
        """Record no more cells."""
        if self._recorder is not None:
            if self._cell:  # the cell that ends the record
                self._recorder.cell_ended(self._cell, "ok")
            self._recorder, self._cell = None, 0
            self._shell.events.unregister("pre_run_cell", self._started)
            self._shell.events.unregister("post_run_cell", self._ended)

    def _started(self, info: Any) -> None:
        self._cell = 0
        if self._recorder is not None and self._recorder.is_closed:  # with its session
            self.end()
        if self._recorder is None or not getattr(info, "store_history", True):
            return
        code = str(info.raw_cell)
        lines = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        is_ours = not lines or lines[0].startswith("%%remote") or all(line.startswith("%mesh") for line in lines)
        history = self._shell.history_manager
        # The cell is stored after this event; whether ``execution_count`` counts it already depends on the version of IPython.
        number = self._shell.execution_count if history is None else max(1, len(history.input_hist_parsed))
        self._cell = self._recorder.cell_started(code, number, why="" if is_ours else _LEFT_OUT)

    def _ended(self, result: Any) -> None:
        cell, self._cell = self._cell, 0
        if self._recorder is None or not cell:
            return
        error = result.error_before_exec or result.error_in_exec
        outcome = "ok" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._recorder.cell_ended(cell, outcome, "" if error is None else f"{type(error).__name__}: {error}")
