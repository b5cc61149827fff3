"""Tells in a cell that runs for long which ranks wait in a collective, for which ranks, and where these are.

Theory of operation
===================

A cell that ends within the limit (``--warn-after``, 10 s by default) costs nothing. From then on the controller asks the ranks
every few seconds what they do (`ProcMesh.doing`), which takes a rank about a millisecond. These looks are brief, until a rank
waits: then all ranks say which collectives they have started, which takes them some more. A wait that is older than the limit
gets a line on stderr, and then, while it lasts, an updated line after 1 minute, 10 minutes, 1 hour, and so on. A line that
lacks what a rank does, because the rank has not answered, is updated when all ranks have. When the wait has ended, a last line
says so. While such a wait lasts, the ranks are asked once a second. The lines of waits that last are part of the view of the
mesh, too, and so are waits for calls of actors (`runtime.diagnostics.call_waits`).

Nothing here waits: the code that waits for the cell calls `WaitWatch.poll`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from monarch_kernel.base.events import MeshView, WaitView
from monarch_kernel.base.text import format_seconds, plural
from monarch_kernel.errors import Failure, format_ranks
from monarch_kernel.notebook.cells.cell_names import located
from monarch_kernel.notebook.cells.inspection import Inspectable, Inspection
from monarch_kernel.runtime.diagnostics.call_waits import call_waits
from monarch_kernel.runtime.diagnostics.stacks import Doing
from monarch_kernel.runtime.diagnostics.waits import Stall, stalls
from monarch_kernel.runtime.rpc.answers import Answer

__all__ = ["WaitWatch", "WatchedMesh"]

_LOOK_S = 2.5
_LOOK_AGAIN_S = 1.0
_PER_RANK_S = 0.01  # the answers of a large mesh take the kernel a while to read
_REPEATS_S = (60.0, 600.0, 3600.0)
_MAX_TOLD = 4


class WatchedMesh(Inspectable, Protocol):
    """The part of `ProcMesh` that watches of waits use."""

    def places(self, procs: Sequence[int]) -> list[tuple[str, int]]:
        """Return the mesh and the flat rank of processes."""
        ...

    def view(self) -> MeshView:
        """Return the state of the mesh."""
        ...

    def show_waits(self, source: object, waits: Sequence[WaitView]) -> None:
        """Show waits in the views of the mesh, in place of earlier ones from the same source."""
        ...


@dataclass(slots=True)
class _Told:
    """A wait that the user knows of.

    Attributes:
        stall: its last state.
        seen_at: when that was.
        next_s: the age at which it is reported again, in seconds.
        is_shown: whether it had a line, or only was one of many.
        is_partial: whether the last line about it says that a rank has not answered.
        said: the ranks that wait, according to that line.
    """

    stall: Stall
    seen_at: float
    next_s: float
    is_shown: bool
    is_partial: bool
    said: tuple[int, ...]


class WaitWatch:
    """Watches one run of a cell.

    Args:
        mesh: the whole mesh.
        ranks: the ranks of the cell.
        say: writes a line to the output of the cell.
        after_s: the age from which a wait is reported, in seconds; 0 for never.
        now: the time at which the cell was sent.
    """

    def __init__(
        self, mesh: WatchedMesh, ranks: Collection[int], say: Callable[[str], None], after_s: float, now: float
    ) -> None:
        self._mesh = mesh
        self._ranks = sorted(ranks)
        self._say = say
        self._after_s = after_s
        self._look_at = now + after_s if after_s else float("inf")
        self._inspection: Inspection | None = None
        self._told: dict[tuple[object, ...], _Told] = {}
        self._shows_waits = False
        self._calls: Sequence[Stall] = ()  # that ranks wait for, which say so on their stderr

    def poll(self, answers: Sequence[Answer | None], now: float) -> None:
        """Look at the ranks and tell the user, when that is due.

        Args:
            answers: the answers of the cell's ranks so far, in the order of the ranks; None where there is none.
            now: the time.
        """
        inspection = self._inspection
        if inspection is None:
            if now < self._look_at:
                return
            is_brief = not self._told and self._after_s >= 2 * _LOOK_S
            inspection = self._inspection = Inspection(self._mesh, now, brief=is_brief)
        if (answers_now := inspection.poll(now)) is None:
            return
        self._inspection = None
        if inspection.is_brief and any(isinstance(each, Doing) and each.collectives for each in answers_now.values()):
            self._inspection = Inspection(self._mesh, now)
            return
        doing = {rank: each if isinstance(each, Failure) else located(each) for rank, each in answers_now.items()}
        finished = [rank for rank, answer in zip(self._ranks, answers, strict=False) if answer is not None]
        found = [each for each in stalls(self._mesh.view(), doing, finished, 0.0) if self._concerns(each)]
        self._calls = call_waits(self._mesh.view(), doing, self._mesh.places, self._after_s)
        self._compare([each for each in found if each.age_s >= self._after_s], now)
        self._look_at = now + self._pause_s(found, len(doing))

    def end(self, now: float, *, succeeded: bool) -> None:
        """The cell has ended; after a failure, its error says what there is to say."""
        self._calls = ()
        if succeeded:
            self._compare((), now)
        elif self._shows_waits:
            self._mesh.show_waits(self, ())
        if self._inspection is not None:
            self._inspection.cancel()
            self._inspection = None

    def _concerns(self, stall: Stall) -> bool:
        return not set(self._ranks).isdisjoint(stall.ranks)

    def _compare(self, found: Sequence[Stall], now: float) -> None:
        """Tell what is new, what still lasts, and what has ended."""
        current = {stall.key: stall for stall in found}
        met = set()  # messages in which the peer waits now, too, so that their key is another one
        for key in [key for key in self._told if key not in current]:
            told = self._told.pop(key)
            others = (stall for stall in found if stall.key not in self._told and _is_same(stall, told))
            if (same := next(others, None)) is not None:
                self._told[same.key] = told
                met.add(same.key)
            elif told.is_shown:
                self._say(_end_text(told, now))
        due = [stall for stall in found if self._is_due(stall, stall.key in met)]
        for stall in due[:_MAX_TOLD]:
            self._say(stall.text)
        if hidden := due[_MAX_TOLD:]:
            count = plural(len(hidden), "more wait")
            self._say(f"and {count}, of {format_ranks(_all_ranks(hidden))} (%mesh stacks shows them)")
        for stall in found:
            known = self._told.get(stall.key)
            is_due, is_shown = stall in due, stall in due[:_MAX_TOLD]
            next_s = _next_s(stall.age_s) if is_due or known is None else known.next_s
            is_partial = bool(stall.silent) if is_shown or known is None else known.is_partial
            said = stall.ranks if is_shown or known is None else known.said
            was_shown = known is not None and known.is_shown
            self._told[stall.key] = _Told(stall, now, next_s, is_shown or was_shown, is_partial, said)
        shown = [*found, *filter(self._concerns, self._calls)]
        if shown or self._shows_waits:
            self._mesh.show_waits(self, [stall.as_view() for stall in shown[:_MAX_TOLD]])
        self._shows_waits = bool(shown)

    def _is_due(self, stall: Stall, met: bool) -> bool:
        known = self._told.get(stall.key)
        if known is None or stall.age_s >= known.next_s:
            return True
        is_news = known.is_partial or (met and not set(stall.ranks) <= set(known.said))
        return known.is_shown and is_news and not stall.silent

    def _pause_s(self, found: Sequence[Stall], n_ranks: int) -> float:
        """Return the time until the next look: just after a pending collective reaches the limit, if it still pends."""
        least = n_ranks * _PER_RANK_S
        if self._told:
            return max(_LOOK_AGAIN_S, least)
        left = [self._after_s - stall.age_s + 0.05 for stall in found]
        return max(least, min([_LOOK_S, *left]), 0.05)


def _is_same(stall: Stall, told: _Told) -> bool:
    """Whether a wait that is new is a known one under another key: the same call on the same rank, which began before."""
    is_old = stall.age_s >= told.stall.age_s
    return is_old and stall.call == told.stall.call and not set(stall.ranks).isdisjoint(told.stall.ranks)


def _next_s(age_s: float) -> float:
    """Return the age at which a wait of this age is reported again."""
    return next((each for each in _REPEATS_S if each > age_s), age_s + _REPEATS_S[-1])


def _end_text(told: _Told, now: float) -> str:
    stall = told.stall
    lasted = format_seconds(stall.age_s + now - told.seen_at)
    return f"{format_ranks(stall.ranks)}: the wait in {stall.call} has ended after {lasted}"


def _all_ranks(found: Iterable[Stall]) -> list[int]:
    return [rank for stall in found for rank in stall.ranks]
