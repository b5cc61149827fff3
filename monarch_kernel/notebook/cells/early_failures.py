"""Tells in a running cell that ranks have failed or died while others go on; the cell itself ends only with the last rank.

Theory of operation
===================

The first failure opens a window of `FOLD_S`, in which further failures join it. Most cells end in this window, and their error
says everything. Otherwise one line goes to the output of the cell. If all other ranks wait in a collective, they will soon be
released (``runtime/rpc/requests.py``), and the cell ends with its error, so the line waits for `RELEASED_S` at most. Later
failures get further lines, which fold for longer and longer.

Nothing here waits: the code that waits for the cell calls `EarlyFailures.note` and `EarlyFailures.tell`. While no
rank has failed, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.errors import Failure, Frame
from monarch_kernel.notebook.cells.cell_names import located, with_cell_names
from monarch_kernel.notebook.view.early_failures import early_failure_text
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future

__all__ = ["EarlyFailures"]

FOLD_S = 0.3
ANSWER_S = 0.3
RELEASED_S = 3.5
_MAX_FOLD_S = 60.0
_CAUSES = ("exception", "lost", "stopped")


class EarlyFailures:
    """The failures of one run of a cell.

    Args:
        mesh: where the cell runs.
        number: number of the cell.
        say: writes a line to the output of the cell.

    Attributes:
        failures: flat rank -> its failure, of the ranks that have failed by themselves.
    """

    def __init__(self, mesh: ProcMesh, number: int, say: Callable[[str], None]) -> None:
        self.failures: dict[int, Failure] = {}
        self._mesh = mesh
        self._number = number
        self._say = say
        self._told: set[int] = set()
        self._going_on: list[int] = []
        self._due_at: float | None = None
        self._give_up_at = 0.0
        self._fold_s = FOLD_S
        self._inspection: Future[dict[int, Doing | Failure]] | None = None

    def note(self, answers: Sequence[Answer | None], now: float) -> None:
        """Note which ranks have failed.

        Args:
            answers: the answers of the ranks so far; None where there is none.
            now: the time.
        """
        if all(answer is None for answer in answers):
            return
        for rank, answer in zip(self._mesh.ranks, answers, strict=False):
            if isinstance(answer, Failure) and answer.kind in _CAUSES:
                self.failures.setdefault(rank, answer)
        self._going_on = [rank for rank, answer in zip(self._mesh.ranks, answers, strict=False) if answer is None]
        if self._due_at is None and len(self.failures) > len(self._told):
            self._due_at = now + self._fold_s
            self._give_up_at = now + RELEASED_S

    def is_due(self, now: float) -> bool:
        """Whether ranks have failed, others go on, and those that fail for the same reason have had the time to do so."""
        return self._due_at is not None and now >= self._due_at and bool(self._going_on)

    def tell(self, way_out: str, now: float) -> None:
        """Tell the user what is due.

        Args:
            way_out: what the user can do to end the cell, such as ``Kernel > Interrupt``.
            now: the time.
        """
        if not self.is_due(now) or self._are_released(now):
            return
        news = {rank: with_cell_names(each) for rank, each in self.failures.items() if rank not in self._told}
        self._say(early_failure_text(news, self._going_on, self._number, way_out, self._places()))
        self._told.update(news)
        self._due_at = None
        self._fold_s = min(4 * self._fold_s, _MAX_FOLD_S)

    def _places(self) -> dict[int, Frame]:
        """Return the lines of the ranks that go on, as far as they have said what they do."""
        doing = self._inspection.get() if self._inspection is not None and self._inspection.done() else {}
        found: dict[int, Frame] = {}
        for rank in self._going_on:
            each = doing.get(rank)
            cell = (
                next((a for a in located(each).activities if a.executor == "main"), None)
                if isinstance(each, Doing)
                else None
            )
            if cell is not None and cell.user_frame is not None:
                found[rank] = cell.user_frame
        return found

    def _are_released(self, now: float) -> bool:
        """Whether all other ranks wait in a collective, or whether that is not known yet."""
        if self._told or now >= self._give_up_at:
            return False
        assert self._due_at is not None
        if self._inspection is None:
            self._inspection = self._mesh.doing()
        if not self._inspection.done() and now < self._due_at + ANSWER_S:
            return True
        if not self._inspection.done():  # native code holds the GIL of a rank
            self._inspection.cancel()
            return False
        doing = self._inspection.get()
        return all(isinstance(each := doing.get(rank), Doing) and each.collectives for rank in self._going_on)
