"""How a notebook shows failures that no actor has handled: at once, where they can be seen, and without failing a cell."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace

from IPython.core.interactiveshell import InteractiveShell

import monarch_kernel.actor
from monarch_kernel.actor.fault_hook import FaultHook
from monarch_kernel.errors import Failure, MeshFailure
from monarch_kernel.notebook.cells.cell_names import placed
from monarch_kernel.notebook.cells.display import Sink
from monarch_kernel.notebook.magics.hints import heal_hint
from monarch_kernel.notebook.magics.meshes import Meshes
from monarch_kernel.notebook.view.failures import failure_block, failure_line
from monarch_kernel.runtime.controller.unhandled import show_fault

__all__ = ["Faults"]

_log = logging.getLogger(__name__)

_HOLD_S = 0.3
_KEEP = 256


class Faults:
    """What the notebook has in place of `unhandled_fault_hook`.

    A failure is held back for a moment: often a cell waits for the actor that has failed, and shows the error itself, and often
    other ranks of the mesh fail alike. Of the actors that a process has taken with it the first is shown with all that is
    known, each other in a line.
    """

    def __init__(self, shell: InteractiveShell, meshes: Meshes) -> None:
        self._shell = shell
        self._meshes = meshes
        self._held: list[tuple[float, MeshFailure]] = []
        self._is_showing = False
        self._told: deque[Failure] = deque(maxlen=_KEEP)
        self._shown: deque[Failure] = deque(maxlen=_KEEP)
        self._news = threading.Condition()
        self._hook: FaultHook = self.show

    def install(self) -> None:
        """From now on failures are shown here; a hook of the user's own stays."""
        if monarch_kernel.actor.unhandled_fault_hook is show_fault:
            monarch_kernel.actor.unhandled_fault_hook = self._hook

    def remove(self) -> None:
        """Leave them to the hook that was there."""
        if monarch_kernel.actor.unhandled_fault_hook is self._hook:
            monarch_kernel.actor.unhandled_fault_hook = show_fault

    def note_shown(self, failure: Failure) -> None:
        """The report of a rank is shown as part of an error that a cell raises."""
        with self._news:
            self._shown.append(failure)
            self._news.notify_all()

    def show(self, failure: MeshFailure) -> None:
        """Show a failure soon, in the cell that runs then, or else in the one that ran last; not one that a cell shows, too."""
        with self._news:
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
                except Exception:  # the next one is shown all the same
                    _log.exception("a failure could not be shown: %s", failure.headline())

    def _next(self) -> list[MeshFailure]:
        """Wait for the next failures that are to be shown, one for each mesh; none if there are no more."""
        with self._news:
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
        if not failure.causes and all(each.kind == "lost" and each in self._told for each in reports):
            self._write([failure_line(failure, color=color)])
            return
        self._told.extend(reports)
        lines = failure_block(_placed(failure), color=color)
        hint = heal_hint(failure.root_cause.reports.values(), self._meshes)
        self._write([*lines, hint] if hint else lines)

    def _write(self, lines: list[str]) -> None:
        sink = Sink(self._shell)
        sink.pin()  # what the cell captures is not seen
        sink.write("stderr", "\n".join(lines) + "\n")

    def _is_shown(self, failure: MeshFailure) -> bool:
        reports = failure.root_cause.reports.values()
        return all(any(_is_same(report, shown) for shown in self._shown) for report in reports)


def _placed(failure: MeshFailure) -> MeshFailure:
    """The failure with its places in the notebook's own cells named as the notebook numbers them."""
    reports = {rank: placed(report) for rank, report in failure.reports.items()}
    return replace(failure, reports=reports, causes={rank: _placed(cause) for rank, cause in failure.causes.items()})


def _is_same(report: Failure, shown: Failure) -> bool:
    """Whether an error that is shown has this report; callers of an actor are told what ended it with a few words more."""
    return _place(report) == _place(shown) and shown.message.startswith(report.message)


def _place(report: Failure) -> tuple[object, ...]:
    """Where a failure was raised; without the names of files, which the notebook changes in what it shows."""
    lines = tuple((frame.line, frame.function) for frame in report.frames)
    return (report.host, report.pid, report.etype, lines)
