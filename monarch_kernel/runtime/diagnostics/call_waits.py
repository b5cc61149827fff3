"""Describes waits of code on ranks for calls of other actors: since when, where, and what the called ranks do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from monarch_kernel.base.events import MeshView
from monarch_kernel.base.text import format_seconds, one_line
from monarch_kernel.errors import Failure, format_ranks
from monarch_kernel.runtime.diagnostics.stacks import AwaitedCall, Doing
from monarch_kernel.runtime.diagnostics.waits import NOT_ANSWERED, Stall, full_place, no_answer, place_of_thread

__all__ = ["call_waits"]

_MAX_PLACES = 4

Places = Callable[[Sequence[int]], Sequence[tuple[str, int]]]


def call_waits(view: MeshView, answers: Mapping[int, Doing | Failure], places: Places, min_age_s: float) -> list[Stall]:
    """Find the calls that code on ranks of a mesh waits for, the oldest first.

    Args:
        view: the mesh.
        answers: what its ranks do, from `ProcMesh.doing`.
        places: returns the mesh and the flat rank of processes; an empty name for the program itself.
        min_age_s: the least age of a wait, in seconds.
    """
    same: dict[tuple[str, tuple[int, ...], str], dict[int, AwaitedCall]] = {}
    for rank, answer in sorted(answers.items()):
        for call in answer.calls if isinstance(answer, Doing) else ():
            if isinstance(answer, Doing) and call.age_s >= min_age_s:
                key = call.description, call.procs, place_of_thread(answer, call.thread)
                same.setdefault(key, {}).setdefault(rank, call)
    found = []
    for (description, procs, place), calls in same.items():
        age_s = max(call.age_s for call in calls.values())
        called: dict[str, list[int]] = {}
        for mesh, rank in places(procs):
            called.setdefault(mesh, []).append(rank)
        missing = tuple(sorted(called.get(view.name, ())))
        targets = ", ".join(_target(mesh, ranks, view.name) for mesh, ranks in called.items())
        waits = "waits" if len(calls) == 1 else "wait"
        where = f", {place}" if place else ""
        head = f"{format_ranks(calls)} {waits} for {format_seconds(age_s)} for {description} of {targets}{where}"
        text = one_line("; ".join([head, *_instead(description, missing, view, answers)]))
        found.append(Stall(("call", description, procs, place), description, tuple(calls), age_s, text, missing))
    return sorted(found, key=lambda stall: -stall.age_s)


def _target(mesh: str, ranks: Sequence[int], own: str) -> str:
    """Name the processes of a call: ``[0-1]``, ``generators[0]``, ``the program``."""
    if not mesh:
        return "the program"
    return ("" if mesh == own else mesh) + format_ranks(sorted(ranks))


def _instead(
    description: str, missing: Sequence[int], view: MeshView, answers: Mapping[int, Doing | Failure]
) -> list[str]:
    """Describe what the called ranks do."""
    same: dict[tuple[str, str], list[int]] = {}
    for rank in missing if "." in description else ():  # no code of a rank runs for a transfer with a buffer
        same.setdefault(_does(description, rank, view, answers.get(rank)), []).append(rank)
    parts = [
        f"{format_ranks(ranks)} {_VERBS[verb] if len(ranks) > 1 else verb} {rest}"
        for (verb, rest), ranks in list(same.items())[:_MAX_PLACES]
    ]
    if hidden := list(same.values())[_MAX_PLACES:]:
        parts.append(f"{format_ranks(rank for ranks in hidden for rank in ranks)} elsewhere")
    return parts


_VERBS = {"is": "are", "runs": "run", "has": "have"}


def _does(description: str, rank: int, view: MeshView, answer: Doing | Failure | None) -> tuple[str, str]:
    """Return a verb, and the rest of what a rank does that is called."""
    if rank < len(view.ranks) and view.ranks[rank].state in ("dead", "stopped", "starting"):
        return "is", {"starting": "not up"}.get(view.ranks[rank].state, "dead")
    if no_answer(answer):
        return "has", NOT_ANSWERED
    if isinstance(answer, Doing) and answer.halted:
        return "is", answer.halted
    actor = f"actor {description.rpartition('.')[0]}"
    activities = answer.activities if isinstance(answer, Doing) else ()
    at = next((each for each in activities if each.executor == actor and each.user_frame is not None), None)
    return ("is", f"at {full_place(at)}") if at is not None else ("runs", "no code of it")
