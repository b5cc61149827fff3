"""Describes waits in collectives: which ranks wait since when, in which call and line, and what the missing ranks do instead.

A wait is one collective of one group, or one send or receive, that has not completed. All ranks that wait in it are one
`Stall`, which keeps its `Stall.key` until it ends, so that repeated looks at the ranks can be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from monarch_kernel.base.events import MeshView
from monarch_kernel.base.text import format_seconds, plain
from monarch_kernel.errors import Failure, format_ranks
from monarch_kernel.runtime.diagnostics.source_names import describe_line, short_cell
from monarch_kernel.runtime.diagnostics.stacks import Activity, Collective, Doing

__all__ = ["Stall", "collective_text", "differs", "no_answer", "stalls"]

_MAX_PLACES = 4
_SAME_SHAPES = ("all_reduce", "broadcast", "reduce")  # inputs of other collectives may differ between ranks
_VERBS = {
    "does": ("does", "do", "did"),
    "has": ("has", "have", "had"),
    "is": ("is", "are", "was"),
    "waits": ("waits", "wait", "waited"),
}
"""Verbs for one rank, for several, and in the past."""


@dataclass(frozen=True, slots=True)
class Stall:
    """One wait.

    Attributes:
        key: identifies the wait.
        call: the collective, such as ``all_reduce #17 (shape 4)``.
        ranks: the ranks that wait in it, sorted.
        age_s: how long the first of them has waited, in seconds.
        text: one line that describes it.
    """

    key: tuple[object, ...]
    call: str
    ranks: tuple[int, ...]
    age_s: float
    text: str


@dataclass(slots=True)
class _Wait:
    """The calls of one wait, by rank."""

    calls: dict[int, Collective] = field(default_factory=dict)

    @property
    def first(self) -> Collective:
        return max(self.calls.values(), key=lambda each: each.age_s)


def stalls(
    view: MeshView | None,
    answers: Mapping[int, Doing | Failure],
    finished: Collection[int],
    min_age_s: float,
    *,
    what: str = "the cell",
    is_over: bool = False,
) -> list[Stall]:
    """Find the waits of a mesh that last, the oldest first.

    Args:
        view: the mesh; None where only the ranks of a call are known.
        answers: what its ranks do, from `ProcMesh.doing`.
        finished: the ranks that have finished the cell.
        min_age_s: the least age of a wait, in seconds.
        what: what these ranks have finished.
        is_over: whether to describe the waits in the past tense.
    """
    waits: dict[tuple[object, ...], _Wait] = {}
    for rank, answer in sorted(answers.items()):
        for call in answer.collectives if isinstance(answer, Doing) else ():
            waits.setdefault(_key(rank, call, answers), _Wait()).calls.setdefault(rank, call)
    found = []
    for key, wait in waits.items():
        if wait.first.age_s >= min_age_s:
            text = _Describer(view, answers, finished, what, is_over).text(wait)
            ranks = tuple(sorted(wait.calls))
            found.append(Stall(key, collective_text(wait.first, with_group=True), ranks, wait.first.age_s, text))
    return sorted(found, key=lambda stall: -stall.age_s)


def _key(rank: int, call: Collective, answers: Mapping[int, Doing | Failure]) -> tuple[object, ...]:
    """Identify a wait by its number in the group, or by the ranks of a message; two that wait for each other are one."""
    if call.number:
        return (call.group, call.members, call.number)
    if call.peer is None:
        return (call.group, call.members, call.operation)
    peer = answers.get(call.peer)
    if any(
        each.peer == rank and each.group == call.group for each in (peer.collectives if isinstance(peer, Doing) else ())
    ):
        return (call.group, *sorted((rank, call.peer)))
    return (call.group, call.operation, rank, call.peer)


@dataclass(frozen=True, slots=True)
class _Describer:
    """Describes waits of a mesh."""

    view: MeshView | None
    answers: Mapping[int, Doing | Failure]
    finished: Collection[int]
    what: str
    is_over: bool

    def text(self, wait: _Wait) -> str:
        """Describe a wait in one line."""
        first = wait.first
        places: dict[tuple[str, str], list[int]] = {}
        for rank, call in sorted(wait.calls.items(), key=lambda item: not _is_same(item[1], first)):
            same = _is_same(call, first)
            text = collective_text(first if same else call, with_group=same)
            places.setdefault((text, self._place(rank, call)), []).append(rank)
        shown = list(places.items())[:_MAX_PLACES]
        (call_text, place), ranks = shown[0]
        where = f"in {call_text}{place and f', {place}'}"
        parts = [self._sentence(ranks, "waits", f"for {format_seconds(first.age_s)} {where}")]
        for (other, place), ranks in shown[1:]:
            call = wait.calls[ranks[0]]
            instead = (
                "" if {first.operation, call.operation} == {"send", "recv"} and first.tag == call.tag else " instead"
            )
            where = (
                f"in {other}{place and f', {place}'}{instead}"
                if other != call_text
                else f"at {place or 'another line'}"
            )
            parts.append(f"{format_ranks(ranks)} {where}")
        if hidden := list(places.values())[_MAX_PLACES:]:
            parts.append(f"{format_ranks(rank for ranks in hidden for rank in ranks)} at other lines")
        missing = self._missing(wait)
        parts += [self._sentence(ranks, *why) for why, ranks in list(missing.items())[:_MAX_PLACES]]
        if hidden := list(missing.values())[_MAX_PLACES:]:
            parts.append(f"{format_ranks(rank for ranks in hidden for rank in ranks)} elsewhere")
        if len(parts) == 1 and first.members and len(wait.calls) == len(first.members) and first.peer is None:
            parts.append("all ranks of the group have started it")
        return plain("; ".join(parts))

    def _sentence(self, ranks: Sequence[int], verb: str, rest: str) -> str:
        return f"{format_ranks(ranks)} {_VERBS[verb][2 if self.is_over else len(ranks) > 1]} {rest}".rstrip()

    def _missing(self, wait: _Wait) -> dict[tuple[str, str], list[int]]:
        """Describe the ranks that a wait needs and that are elsewhere, by what they do: a verb, and the rest."""
        first = wait.first
        missing: dict[tuple[str, str], list[int]] = {}
        members = first.members if first.peer is None else (first.peer,)
        for rank in members:
            if rank not in wait.calls and self._is_behind(rank, first):
                missing.setdefault(self._instead(rank, first), []).append(rank)
        return missing

    def _is_behind(self, rank: int, call: Collective) -> bool:
        """Whether a rank has not started a collective yet, or may not have."""
        answer = self.answers.get(rank)
        if not call.number or not isinstance(answer, Doing) or answer.unknown:
            return True
        return answer.reached.get(call.group, 0) < call.number

    def _instead(self, rank: int, call: Collective) -> tuple[str, str]:
        """Describe what a rank does that others wait for."""
        state = "" if self.view is None else self.view.ranks[rank].state
        answer = self.answers.get(rank)
        if state in ("dead", "stopped"):
            return "is", "dead"
        if rank in self.finished:
            return "has", f"finished {self.what}{self._after_steps(answer)}"
        if state == "starting":
            return "is", "not up"
        if self.view is None and answer is None:
            return "is", f"not in {self.what}"
        if no_answer(answer):
            return "does", "not answer: native code that holds the GIL, or a stopped process"
        if not isinstance(answer, Doing):
            return "has", "not started it"
        if answer.collectives:
            other = answer.collectives[0]
            place = self._place(rank, other)
            return "waits", f"in {collective_text(other, with_group=True)}{place and f', {place}'} instead"
        at = _busiest(answer)
        if at is None:
            return "has", f"not started it: no code of {self.what} runs there"
        return ("has", f"not started it: {_full_place(at)}") if call.number else ("is", f"at {_full_place(at)}")

    def _place(self, rank: int, call: Collective) -> str:
        """Name the line of the user's code that waits; empty if it is not known."""
        answer = self.answers.get(rank)
        if not isinstance(answer, Doing):
            return ""
        of_thread = [each for each in answer.activities if each.thread == call.thread and each.user_frame is not None]
        some = of_thread or [each for each in answer.activities if each.user_frame is not None]
        if not some:
            return ""
        frame = some[-1].user_frame
        assert frame is not None
        actor = "" if some[-1].executor == "main" else f"{some[-1].executor}: "
        loop = next((each for each in answer.loops if each.request == some[-1].request and not each.is_over), None)
        step = f", in step {loop.steps}" if loop is not None else ""
        return f"{actor}{short_cell(frame.file)}, line {frame.line}{step}"

    def _after_steps(self, answer: Doing | Failure | None) -> str:
        """Say after how many steps a rank has ended a live loop in which others still are."""
        loops = answer.loops if isinstance(answer, Doing) else ()
        running = {
            each.request
            for other in self.answers.values()
            for each in (other.loops if isinstance(other, Doing) else ())
            if not each.is_over
        }
        ended = next((each for each in loops if each.is_over and each.request in running), None)
        return "" if ended is None else f" after {ended.steps} step{'s' * (ended.steps != 1)}"


def _is_same(call: Collective, other: Collective) -> bool:
    return not differs(call, other)


def _busiest(answer: Doing) -> Activity | None:
    """Return the activity to show: the cell's before those of actors."""
    activities = [each for each in answer.activities if each.user_frame is not None]
    return next((each for each in activities if each.executor == "main"), activities[0] if activities else None)


def _full_place(activity: Activity) -> str:
    frame = activity.user_frame
    assert frame is not None
    actor = "" if activity.executor == "main" else f"{activity.executor}: "
    return f"{actor}{describe_line(frame)}"


def no_answer(answer: Doing | Failure | None) -> bool:
    """Whether a live rank did not report what it does."""
    return answer is None or (isinstance(answer, Failure) and answer.etype == "CancelledError")


def differs(call: Collective, other: Collective) -> bool:
    """Whether two calls with the same number in a group can't complete each other."""
    return call.operation != other.operation or (call.operation in _SAME_SHAPES and call.shapes != other.shapes)


def collective_text(wait: Collective, *, with_group: bool = False) -> str:
    """Format a collective: ``all_reduce #17 (shape 16x8)``; ``recv from [1]``; ``all_gather_object: all_gather #3``."""
    number = f" #{wait.number}" if wait.number else ""
    if wait.peer is not None:
        number = f" {'to' if wait.operation == 'send' else 'from'} {format_ranks([wait.peer])}"
        number += f" with tag {wait.tag}" if wait.tag else ""
    group = f" of group {wait.group} {format_ranks(wait.members)}" if with_group and wait.group else ""
    notes = ", ".join(filter(None, (wait.shapes and f"shape {wait.shapes}", wait.purpose)))
    caller = f"{wait.caller}: " if wait.caller else ""
    return f"{caller}{wait.operation}{number}{group}" + (f" ({notes})" if notes else "")
