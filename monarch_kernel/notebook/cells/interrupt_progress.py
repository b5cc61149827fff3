"""Tracks an interrupt until the ranks stop; reports where the others are, and returns control within a bounded time.

Theory of operation
===================

===========  ===================================================================================================
0 s          the controller asks the ranks what they do, for a report of the waits in collectives that the interrupt ends;
             `Interrupt` to the ranks; most stop within milliseconds, those in a collective after 0.3 s
`INSPECT_S`  the controller asks the ranks what they do
`GRACE_S`    control returns to the user; work that has not stopped is still tracked, and its result is kept
again        a second interrupt also aborts the process groups of ranks that still run; control returns after `AGAIN_S`
once more    control returns immediately
===========  ===================================================================================================

Nothing here waits: the code that waits for the work calls `InterruptProgress.poll`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.events import MeshView
from monarch_kernel.errors import Failure, MeshDownError, format_ranks
from monarch_kernel.notebook.cells.cell_names import located
from monarch_kernel.notebook.view.early_failures import brief_headline
from monarch_kernel.notebook.view.interrupts import InterruptOutcome, interrupt_text
from monarch_kernel.notebook.view.stacks import doing_lines, works
from monarch_kernel.runtime.diagnostics.source_names import describe_line
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.diagnostics.waits import LEAST_WAIT_S, no_answer, stalls
from monarch_kernel.runtime.rpc.answers import Answer
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.runtime.worker.actor_server import NOT_STARTED

__all__ = ["GRACE_S", "InterruptProgress", "MeshInterruptProgress", "describe_interrupt", "inspect_ranks"]

INSPECT_S = 0.8
GRACE_S = 1.8
AGAIN_S = 0.6
BURST_S = 0.25
ANSWER_S = 0.4
STACKS_S = 0.15
"""How long agents may take to find out what ranks do that do not answer."""

_MAX_WAITS = 4
ABORTED_S = 0.25
"""After how many seconds ranks have aborted their process groups."""


class InterruptProgress:
    """The progress of an interrupt of ranks' work, until the work has ended or the user stops waiting for it.

    Args:
        mesh: the whole mesh.
        why: how the report about the interrupt begins.
        interrupt: interrupts the work; its argument says whether to also abort process groups.
        now: the time.
        abort: whether the first interrupt aborts process groups, too.
        is_sent: whether the first interrupt has been sent already.
        ended: the ranks on which the work had ended before the interrupt.

    Attributes:
        ended: as given.
    """

    def __init__(
        self,
        mesh: ProcMesh,
        why: str,
        interrupt: Callable[[bool], object],
        now: float,
        *,
        abort: bool = False,
        is_sent: bool = False,
        ended: Collection[int] = (),
    ) -> None:
        self.mesh = mesh
        self.ended = frozenset(ended)
        self.why = why
        self.aborts = abort
        self._interrupt = interrupt
        self._started = self._last = now
        self._give_up_at = now + GRACE_S
        self._inspect_at = now + INSPECT_S
        self._has_inspected = False
        self._inspection: Future[dict[int, Doing | Failure]] | None = None
        self._before = None if is_sent else _ask(mesh)
        if not is_sent:
            interrupt(abort)

    def again(self, now: float) -> None:
        """Handle another interrupt by the user. Interrupts within `BURST_S` count as one, as impatient users press twice."""
        if now - self._last < BURST_S:
            return
        self._last = now
        if self.aborts:
            self._give_up_at = now
            return
        self.aborts = True
        self._interrupt(True)
        self._inspection, self._has_inspected = None, False  # what they do after the abort
        self._inspect_at = now + ABORTED_S
        self._give_up_at = now + AGAIN_S

    def poll(self, now: float) -> None:
        """Ask the ranks what they do when it is time; does not wait."""
        if self._inspection is None and not self._has_inspected and now >= self._inspect_at:
            self._has_inspected = True
            self._inspection = self.mesh.doing()

    def is_given_up(self, now: float) -> bool:
        """Whether the user has waited long enough."""
        return now >= self._give_up_at

    def waited_s(self) -> float:
        """Return the seconds since the interrupt."""
        return time.monotonic() - self._started

    def waits(self, ranks: Collection[int], finished: Collection[int]) -> list[str]:
        """Describe the waits of some ranks in collectives that the interrupt has ended, as lines.

        Args:
            ranks: the interrupted ranks.
            finished: the ranks that had finished.
        """
        before, self._before = self._before, None
        if before is None:
            return []
        answers = _read(before, ANSWER_S - self.waited_s(), None)
        found = stalls(self.mesh.view(), answers, finished, LEAST_WAIT_S, is_over=True)
        return [stall.text for stall in found if not set(ranks).isdisjoint(stall.ranks)][:_MAX_WAITS]

    def describe(self, outcome: InterruptOutcome, ranks: Sequence[int]) -> None:
        """Add what some ranks of the mesh do now, and whether they have aborted their process groups, to an outcome."""
        if not ranks:
            return
        inspection, self._inspection = self._inspection or self.mesh.doing(), None
        since_s = max(0.0, time.monotonic() - self._inspect_at)
        answers = _read(inspection, ANSWER_S - since_s, self.mesh)
        outcome.doing = doing_lines(self.mesh.view(), answers, ranks)
        reports = {
            rank: answer for rank in ranks if isinstance(answer := answers.get(rank), Doing) and not answer.is_silent
        }
        outcome.aborted = [rank for rank, report in reports.items() if report.aborted]
        outcome.silent = [rank for rank in ranks if rank not in reports]
        outcome.halted = [rank for rank in ranks if isinstance(answer := answers.get(rank), Doing) and answer.halted]


class MeshInterruptProgress(InterruptProgress):
    """An interrupt of everything that the ranks of a mesh run and have queued at this moment.

    Args:
        whole: the whole mesh.
        mesh: the same mesh, or a slice of it.
        abort: whether to also abort process groups.
    """

    def __init__(self, whole: ProcMesh, mesh: ProcMesh, *, abort: bool) -> None:
        self._part = mesh
        self._pending = dict(zip(mesh.ranks, mesh.runtime.queries.pending(mesh.procs), strict=True))
        super().__init__(whole, "interrupted", lambda abort: mesh.interrupt(abort=abort), time.monotonic(), abort=abort)

    def stuck(self) -> list[int]:
        """Return the ranks that have not ended all of this work."""
        now = dict(zip(self._part.ranks, self._part.runtime.queries.pending(self._part.procs), strict=True))
        return [rank for rank, before in self._pending.items() if not set(before).isdisjoint(now[rank])]

    def is_over(self) -> bool:
        """Whether all work has ended, or the user has waited long enough."""
        return not self.stuck() or self.is_given_up(time.monotonic())

    def text(self, before: MeshView, waited: Sequence[int]) -> str:
        """Describe the effect of the interrupt.

        Args:
            before: the view of the mesh before the interrupt.
            waited: numbers of cells that waited for these ranks and were dropped.
        """
        name = self.mesh.name
        busy = [rank for rank, pending in self._pending.items() if pending]
        if not busy and not waited:
            return self._nothing()
        stuck = self.stuck()
        what = ", ".join(dict.fromkeys(before.ranks[rank].activity for rank in busy if before.ranks[rank].activity))
        outcome = InterruptOutcome(
            name,
            f"{name}: interrupted {what}".rstrip(),
            stopped=[rank for rank in busy if rank not in stuck],
            stuck=stuck,
            asks_abort=self.aborts,
            n_ranks=len(self.mesh),
            axes=len(self.mesh.extent),
            waited_s=self.waited_s(),
            waits=self.waits(busy, ()),
        )
        self.describe(outcome, stuck)
        lines = [interrupt_text(outcome)] if busy else []
        for number in waited:
            lines.append(f"{name}: cell [{number}], which waited for its turn, will not be sent")
        return "\n".join(lines)

    def _nothing(self) -> str:
        """Describe an interrupt that found no request; actors may still do work that the notebook does not wait for."""
        name, answers = self.mesh.name, inspect_ranks(self.mesh)
        view = self.mesh.view()
        working = [rank for rank in self._pending if works(view.ranks[rank], answers.get(rank))]
        if not working:
            return f"{name}: nothing runs on {format_ranks(self._pending)}"
        them = "it" if len(working) == 1 else "them"
        head = (
            f"{name}: nothing was interrupted, because the notebook waits for nothing there; actors work for other callers, or "
            f"after a broadcast, on {format_ranks(working)} (%mesh restart {name} replaces {them})"
        )
        return "\n".join([head, *(f"    {line}" for line in doing_lines(view, answers, working))])


def inspect_ranks(mesh: ProcMesh) -> dict[int, Doing | Failure]:
    """Return what the ranks of a mesh do now, by rank; ranks that do not answer within `ANSWER_S` are left out."""
    return _read(mesh.doing(), ANSWER_S, mesh)


def _read(
    inspection: Future[dict[int, Doing | Failure]], timeout_s: float, mesh: ProcMesh | None
) -> dict[int, Doing | Failure]:
    """Wait for what ranks say they do; with a mesh, also find out what those do that do not answer."""
    if not inspection.wait(max(0.0, timeout_s)):
        inspection.cancel()
    answers = inspection.get()
    if mesh is not None:
        silent = [rank for rank, answer in answers.items() if no_answer(answer)]
        answers = {**answers, **(mesh.silent_stacks(silent, STACKS_S) if silent else {})}
    return {rank: answer if isinstance(answer, Failure) else located(answer) for rank, answer in answers.items()}


def _ask(mesh: ProcMesh) -> Future[dict[int, Doing | Failure]] | None:
    """Ask the ranks what they do; None if the session is over."""
    try:
        return mesh.doing()
    except MeshDownError:
        return None


def describe_interrupt(progress: InterruptProgress, ranks: Sequence[int], answers: Sequence[Answer | None]) -> str:
    """Describe the effect of an interrupt on some work.

    Args:
        progress: the interrupt.
        ranks: the ranks that did the work.
        answers: the answers of these ranks; None for a rank that has not answered.
    """
    mesh = progress.mesh
    outcome = InterruptOutcome(
        mesh.name,
        progress.why,
        asks_abort=progress.aborts,
        n_ranks=len(mesh),
        axes=len(mesh.extent),
        waited_s=progress.waited_s(),
    )
    for rank, answer in zip(ranks, answers, strict=True):
        if answer is None:
            outcome.stuck.append(rank)
        elif not isinstance(answer, Failure):
            (outcome.finished if rank in progress.ended else outcome.completed).append(rank)
        elif answer.message == NOT_STARTED:
            outcome.dropped.append(rank)
        elif answer.kind == "released" and rank in progress.ended:
            outcome.released.append(rank)
        elif answer.kind in ("interrupted", "released"):
            outcome.stopped.append(rank)
        else:
            is_raised = answer.kind == "exception"
            what = f"failed: {brief_headline(answer)}" if is_raised else f"{answer.kind}: {answer.headline()}"
            at = f" ({describe_line(answer.user_frame)})" if answer.user_frame is not None else ""
            outcome.failed.setdefault(f"{what}{at}", []).append(rank)
    outcome.waits = progress.waits([*outcome.stopped, *outcome.stuck], outcome.finished)
    progress.describe(outcome, sorted({*outcome.stuck, *outcome.dropped}))
    return interrupt_text(outcome)
