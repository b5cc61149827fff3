"""Describes, in one line, the ranks of a running cell that have failed or died while others go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.base.text import plain
from monarch_kernel.errors import Failure, Frame, format_ranks
from monarch_kernel.runtime.diagnostics.source_names import short_cell

__all__ = ["early_failure_text"]

_MAX_CAUSES = 4
_MAX_CAUSE = 200


def early_failure_text(failures: Mapping[int, Failure], going_on: Sequence[int], number: int, way_out: str) -> str:
    """Describe failures that have not ended a cell: ``[1] died (exit code 5); [0] goes on; Kernel > Interrupt ends it``.

    Args:
        failures: flat rank -> how it failed.
        going_on: the ranks that still run the cell.
        number: number of the cell.
        way_out: what the user can do to end the cell.
    """
    goes = "goes" if len(going_on) == 1 else "go"
    it = "it" if len(going_on) == 1 else "them"
    ranks_of: dict[str, list[int]] = {}
    for rank, failure in sorted(failures.items()):
        ranks_of.setdefault(_cause(failure, number), []).append(rank)
    shown = [f"{format_ranks(ranks)} {cause}" for cause, ranks in list(ranks_of.items())[:_MAX_CAUSES]]
    if hidden := list(ranks_of.values())[_MAX_CAUSES:]:
        shown.append(f"{format_ranks(rank for ranks in hidden for rank in ranks)} failed in other ways")
    return f"{', '.join(shown)}; {format_ranks(going_on)} {goes} on; {way_out} ends {it}"


def _cause(failure: Failure, number: int) -> str:
    if failure.kind in ("lost", "stopped"):
        verb = "died" if failure.kind == "lost" else "was ended"
        return (
            f"{verb} (exit code {failure.exit_code})" if failure.exit_code is not None else f"{verb}: {_end(failure)}"
        )
    first, *more = plain(failure.headline()).strip().split("\n")
    headline = _narrow(f"{first} …" if more else first)
    where = failure.user_frame
    return f"failed with {headline}" + (f" ({_place(where, number)})" if where is not None else "")


def _end(failure: Failure) -> str:
    """Describe how a process ended; the rest of its report follows in the error of the cell."""
    first = plain(failure.message).partition("\n")[0]
    return _narrow(first.partition("; it was running ")[0].partition("; it held ")[0])


def _place(frame: Frame, number: int) -> str:
    """Name a line of the cell itself as ``line 3``, and others with their file."""
    is_here = frame.file == f"<remote cell [{number}]>"
    return f"line {frame.line}" if is_here else f"{short_cell(frame.file)}, line {frame.line}"


def _narrow(text: str) -> str:
    return text if len(text) <= _MAX_CAUSE else text[: _MAX_CAUSE - 1] + "…"
