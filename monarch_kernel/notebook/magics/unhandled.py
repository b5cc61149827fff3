"""Shows failures that no actor handled: soon, in the output of a cell, and without failing that cell."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace

from IPython.core.interactiveshell import InteractiveShell

import monarch_kernel.actor
from monarch_kernel.actor.fault_hook import FaultHook, takes_groups
from monarch_kernel.errors import Failure, MeshFailure
from monarch_kernel.notebook.cells.cell_names import with_cell_names
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.magics.meshes import Meshes
from monarch_kernel.notebook.magics.name_hints import heal_hint
from monarch_kernel.notebook.view.failures import failure_block, failure_line
from monarch_kernel.runtime.controller.unhandled import show_failure

__all__ = ["UnhandledFailures"]

_log = logging.getLogger(__name__)

_HOLD_S = 0.3
_KEEP = 256


class UnhandledFailures:
    """Shows unhandled failures in the notebook; replaces the default `unhandled_fault_hook`.

    A failure is held back for a moment: often a cell waits for the failed actor and shows the error itself, and often other
    ranks of the mesh fail in the same way. If several actors die with a process, the first one is shown with all details, and
    each of the others in one line.
    """

    def __init__(self, shell: InteractiveShell, meshes: Meshes) -> None:
        self._shell = shell
        self._meshes = meshes
        self._held: list[tuple[float, MeshFailure]] = []
        self._is_showing = False
        self._reported: deque[Failure] = deque(maxlen=_KEEP)
        self._shown: deque[Failure] = deque(maxlen=_KEEP)
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._hook: FaultHook = self.show

    def install(self) -> None:
        """Install the hook, unless the user has set another one."""
        if monarch_kernel.actor.unhandled_fault_hook is show_failure:
            monarch_kernel.actor.unhandled_fault_hook = self._hook

    def remove(self) -> None:
        """Restore the default hook."""
        if monarch_kernel.actor.unhandled_fault_hook is self._hook:
            monarch_kernel.actor.unhandled_fault_hook = show_failure

    def note_shown(self, failure: Failure) -> None:
        """Note that an error of a cell shows this report of a rank."""
        with self._lock:
            self._shown.append(failure)
            self._news.notify_all()

    @takes_groups
    def show(self, failure: MeshFailure) -> None:
        """Show a failure soon, in the running cell or else in the last one, unless a cell's error shows it."""
        with self._lock:
            self._held.append((time.monotonic() + _HOLD_S, failure))
            if self._is_showing:
                return
            self._is_showing = True
        threading.Thread(target=self._show_held, name="monarch-faults-shown", daemon=True).start()

    def _show_held(self) -> None:
        while due := self._next():
            for failure in due:
                try:
                    self._show(failure)
                except Exception:  # still show the next one
                    _log.exception("a failure could not be shown: %s", failure.headline())

    def _next(self) -> list[MeshFailure]:
        """Wait for the next failures to show, one for each mesh; empty if there are no more."""
        with self._lock:
            while True:
                self._held = [item for item in self._held if not self._is_shown(item[1])]
                if not self._held:
                    self._is_showing = False
                    return []
                left = self._held[0][0] - time.monotonic()
                if left <= 0:
                    break
                self._news.wait(left)
            held, self._held = self._held, []
        by_mesh: dict[tuple[int, str], MeshFailure] = {}
        for _, failure in held:
            key = (failure.actor, failure.mesh_name)
            before = by_mesh.get(key, failure)
            reports, causes = {**before.reports, **failure.reports}, {**before.causes, **failure.causes}
            by_mesh[key] = replace(failure, reports=reports, causes=causes)
        return list(by_mesh.values())

    def _show(self, failure: MeshFailure) -> None:
        color = getattr(self._shell, "colors", "nocolor").lower() != "nocolor"
        reports = failure.reports.values()
        if not failure.causes and all(each.kind == "lost" and each in self._reported for each in reports):
            self._write([failure_line(failure, color=color)])
            return
        self._reported.extend(reports)
        lines = failure_block(_with_cell_names(failure), color=color)
        hint = heal_hint(failure.root_cause.reports.values(), self._meshes)
        self._write([*lines, hint] if hint else lines)

    def _write(self, lines: list[str]) -> None:
        sink = Sink(self._shell)
        sink.pin()  # bypass %%capture, which would hide it
        sink.write("stderr", "\n".join(lines) + "\n")

    def _is_shown(self, failure: MeshFailure) -> bool:
        reports = failure.root_cause.reports.values()
        return all(any(_is_same(report, shown) for shown in self._shown) for report in reports)


def _with_cell_names(failure: MeshFailure) -> MeshFailure:
    """Return the failure with frames that name the notebook's local cells by their numbers."""
    reports = {rank: with_cell_names(report) for rank, report in failure.reports.items()}
    return replace(
        failure, reports=reports, causes={rank: _with_cell_names(cause) for rank, cause in failure.causes.items()}
    )


def _is_same(report: Failure, shown: Failure) -> bool:
    """Whether a shown error includes this report; the error of an actor's caller has the same message with text appended."""
    return _place(report) == _place(shown) and shown.message.startswith(report.message)


def _place(report: Failure) -> tuple[object, ...]:
    """Return where a failure was raised, without file names, as the notebook changes these in what it shows."""
    lines = tuple((frame.line, frame.function) for frame in report.frames)
    return (report.host, report.pid, report.etype, lines)
