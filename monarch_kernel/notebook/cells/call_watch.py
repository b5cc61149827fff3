"""Shows in the view which ranks wait in calls of actors, for which ranks, and where these are.

Theory of operation
===================

What holds for cells (`notebook.cells.wait_watch`) holds for endpoints, too, but no cell has a place for their lines: the view
has. A call that ends within the limit (``--warn-after``) costs nothing. While one lasts longer, the ranks are asked every few
seconds what they do, and once a second while a line is shown. Lines are about endpoints that wait in a collective, and about
code that waits for the call of another actor. Ranks that run a cell are left to the watch of that cell.

Nothing here waits: the thread that drives the views calls `CallWatch.poll`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from monarch_kernel.base.events import RankView, WaitView
from monarch_kernel.errors import Failure, MeshDownError
from monarch_kernel.notebook.cells.cell_names import located
from monarch_kernel.notebook.cells.inspection import Inspection
from monarch_kernel.notebook.cells.wait_watch import WatchedMesh
from monarch_kernel.runtime.diagnostics.call_waits import call_waits
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.diagnostics.waits import stalls

__all__ = ["CallWatch"]

_LOOK_S = 2.5
_LOOK_AGAIN_S = 1.0
_LEAST_S = 0.2
_PER_RANK_S = 0.01  # the answers of a large mesh take the kernel a while to read
_MAX_SHOWN = 4


class CallWatch:
    """Watches the calls of one mesh.

    Args:
        after_s: the age from which a wait is shown, in seconds; 0 for never.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._look_at = 0.0 if after_s else float("inf")
        self._inspection: Inspection | None = None
        self._shown: tuple[WaitView, ...] = ()

    def poll(self, mesh: WatchedMesh, now: float) -> None:
        """Look at the ranks, and show their waits, when that is due."""
        try:
            self._poll(mesh, now)
        except MeshDownError:
            self._look_at = float("inf")

    def _poll(self, mesh: WatchedMesh, now: float) -> None:
        if self._inspection is None:
            if now < self._look_at:
                return
            if not any(self._is_long(rank) for rank in mesh.view().ranks):
                self._show(mesh, ())
                self._look_at = now + self._pause_s
                return
            self._inspection = Inspection(mesh, now)
        if (answers := self._inspection.poll(now)) is None:
            return
        self._inspection = None
        self._show(mesh, self._waits(mesh, answers))
        self._look_at = now + max(self._pause_s, len(answers) * _PER_RANK_S)

    @property
    def _pause_s(self) -> float:
        return _LOOK_AGAIN_S if self._shown else min(_LOOK_S, max(self._after_s, _LEAST_S))

    def _is_long(self, rank: RankView) -> bool:
        return rank.state == "running" and rank.running_s >= self._after_s and not _is_cell(rank)

    def _waits(self, mesh: WatchedMesh, answers: Mapping[int, Doing | Failure]) -> list[WaitView]:
        view = mesh.view()
        doing = {rank: each if isinstance(each, Failure) else located(each) for rank, each in answers.items()}
        of_cells = {rank.rank for rank in view.ranks if _is_cell(rank)}
        known = {(wait.ranks, wait.missing) for wait in view.waits if wait not in self._shown}
        found = [
            *stalls(view, doing, (), self._after_s, what="the call"),
            *call_waits(view, doing, mesh.places, self._after_s),
        ]
        shown = [stall.as_view() for stall in found if of_cells.isdisjoint(stall.ranks)]
        return [wait for wait in shown if (wait.ranks, wait.missing) not in known]

    def _show(self, mesh: WatchedMesh, waits: Collection[WaitView]) -> None:
        if waits or self._shown:
            self._shown = tuple(waits)[:_MAX_SHOWN]
            mesh.show_waits(self, self._shown)


def _is_cell(rank: RankView) -> bool:
    """Whether a rank runs a cell of the notebook."""
    return rank.activity.startswith("cell [")
