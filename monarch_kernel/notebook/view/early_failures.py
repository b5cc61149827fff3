"""Describes, in one line, the ranks of a running cell that have failed or died while others go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch_kernel.base.steady_text import steady_message
from monarch_kernel.base.text import plain
from monarch_kernel.errors import Failure, Frame, format_ranks
from monarch_kernel.runtime.diagnostics.source_names import short_cell

__all__ = ["brief_headline", "early_failure_text"]

_MAX_CAUSES = 4
_MAX_CAUSE = 200


def early_failure_text(
    failures: Mapping[int, Failure],
    going_on: Sequence[int],
    number: int,
    way_out: str,
    places: Mapping[int, Frame] | None = None,
) -> str:
    """Describe failures that have not ended a cell: ``[1] died (exit code 5); [0] goes on; Kernel > Interrupt ends it``.

    Args:
        failures: flat rank -> how it failed.
        going_on: the ranks that still run the cell.
        number: number of the cell.
        way_out: what the user can do to end the cell.
        places: flat rank -> the user's code that it runs, of ranks that go on, where that is known.
    """
    goes = "goes" if len(going_on) == 1 else "go"
    it = "it" if len(going_on) == 1 else "them"
    causes: dict[str, str] = {}
    ranks_of: dict[str, list[int]] = {}
    known = places or {}
    torn = _consequences(failures)
    for rank, failure in sorted(failures.items()):
        if rank not in torn:
            text = _cause(failure, number)
            key = steady_message(text, rank, failure.pid)
            causes.setdefault(key, text)
            ranks_of.setdefault(key, []).append(rank)
    shown = [f"{format_ranks(ranks)} {causes[key]}" for key, ranks in list(ranks_of.items())[:_MAX_CAUSES]]
    if hidden := list(ranks_of.values())[_MAX_CAUSES:]:
        shown.append(f"{format_ranks(rank for ranks in hidden for rank in ranks)} failed in other ways")
    if torn:
        shown.append(f"{format_ranks(torn)} failed in a collective as a consequence")
    at = {_place(frame, number) + _function(frame) for rank in going_on if (frame := known.get(rank)) is not None}
    where = f" ({', '.join(at)})" if len(at) == 1 and set(going_on) <= set(known) else ""
    return f"{', '.join(shown)}; {format_ranks(going_on)} {goes} on{where}; {way_out} ends {it}"


def _consequences(failures: Mapping[int, Failure]) -> list[int]:
    """Return the ranks whose connection to a rank that has failed by itself broke."""
    broken = [rank for rank, failure in sorted(failures.items()) if failure.is_broken_connection]
    return broken if len(broken) < len(failures) else []


def _function(frame: Frame) -> str:
    return "" if frame.function in ("", "<module>") else f", in {frame.function}"


def _cause(failure: Failure, number: int) -> str:
    if failure.kind in ("lost", "stopped"):
        verb = "died" if failure.kind == "lost" else "was ended"
        return (
            f"{verb} (exit code {failure.exit_code})" if failure.exit_code is not None else f"{verb}: {_end(failure)}"
        )
    headline = brief_headline(failure)
    where = failure.user_frame
    return f"failed with {headline}" + (f" ({_place(where, number)})" if where is not None else "")


def brief_headline(failure: Failure) -> str:
    """The error of a rank as part of a sentence: its first line, and the error of a child process that it quotes."""
    first, *more = [line for line in plain(failure.headline()).strip().split("\n") if line.strip()]
    quotes = any(line.lstrip().startswith("Traceback (most recent call last)") for line in more)
    last = (
        f" {more[-1].strip()}" if more and (quotes or first.rstrip().endswith(":")) else ""
    )  # the error of a child process
    return _narrow(f"{first.rstrip()} …{last}" if more else first)


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
