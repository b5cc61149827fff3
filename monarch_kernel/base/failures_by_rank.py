"""The failures of several ranks as text: equal ones together, each with its place, its causes and the last lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from monarch_kernel.base.failure_reports import ORDER, Cause, Failure, Frame
from monarch_kernel.base.steady_text import steady_message, without_gloo_place
from monarch_kernel.base.text import format_ranks

__all__ = ["causes_by_rank", "continued", "details", "grouped", "last_lines", "python_note"]

_MAX_TEXTS = 4
"""Number of causes that differ by rank to show; for further ones only the ranks are shown."""


def grouped(reports: Mapping[int, Failure], *, exact: bool = False) -> list[tuple[Failure, tuple[int, ...]]]:
    """Distinct failures with their ranks, causes first, then by lowest rank."""
    groups: dict[tuple[object, ...], tuple[Failure, list[int]]] = {}
    for rank, failure in sorted(reports.items()):
        groups.setdefault(failure.fingerprint, (failure, []))[1].append(rank)
    if not exact and len(groups) > 1:
        equal, groups = groups, {}
        for failure, ranks in equal.values():
            # A number of a rank that several ranks name is not each one's own.
            key = failure.steady_fingerprint(ranks[0] if len(ranks) == 1 else None)
            groups.setdefault(key, (failure, []))[1].extend(ranks)
    found = [(failure, tuple(sorted(ranks))) for failure, ranks in groups.values()]
    return sorted(found, key=lambda group: (ORDER[group[0].kind], group[1]))


def details(reports: Mapping[int, Failure]) -> list[str]:
    """Where something failed, why, and the last lines written there, for ranks that have the same error."""
    failure = next(iter(reports.values()))
    lines = []
    where = failure.user_frame
    if where is not None:
        lines.append(f"    {where.file}, line {where.line}, in {where.function}")
        if where.source:
            lines.append(f"    > {where.source[where.line - where.first_line].strip()}")
    lines += [f"    {note}" for note in failure.added_notes]
    lines += [f"    {line}" for line in causes_by_rank(reports)]
    lines += [f"    {note}" for note in failure.notes]
    if failure.host:
        lines.append(f"    on host {failure.host}, pid {failure.pid}{python_note(failure)}")
    return continued(lines) + last_lines(reports)


def continued(lines: Iterable[str]) -> list[str]:
    """Indent what follows a line end within a line, so that no name or text from a rank looks like a line of the report."""
    return [line.replace("\n", "\n        ") for line in lines]


def causes_by_rank(reports: Mapping[int, Failure], *, whole: bool = False) -> list[str]:
    """A line for each exception to which an error is chained, the nearest first, with ranks where the texts differ.

    Args:
        reports: rank -> report, of ranks whose fingerprints are equal.
        whole: whether to give each error of a broken connection its lines; otherwise they are one line together, as they only
            follow from what happened to another rank, or to the process group.
    """
    lines: list[str] = []
    broken: list[Cause] = []
    at = 0
    for causes in _causes_of(reports):
        cause = next(iter(causes.values()))
        if not whole and all(each.is_broken_connection for each in causes.values()):
            at = at if broken else len(lines)
            broken.append(cause)
            continue
        is_same = (
            len({(_steady_headline(rank, each), each.more_lines, each.notes) for rank, each in causes.items()}) == 1
        )
        lines.append(f"{cause.link}{_texts_by_rank(causes)}")
        if is_same:
            lines += [f"    {line}" for line in (*cause.more_lines, *cause.notes)]
        if cause.frame is not None:
            function = "" if cause.frame.function in ("", "<module>") else f", in {cause.frame.function}"
            lines.append(f"    {cause.frame.file}, line {cause.frame.line}{function}{_code(cause.frame)}")
    if broken:
        first, times = broken[0], f", {len(broken)} times" if len(broken) > 1 else ""
        lines.insert(at, f"{first.link} {first.etype}: {without_gloo_place(first.headline.partition(': ')[2])}{times}")
    return lines


def last_lines(reports: Mapping[int, Failure]) -> list[str]:
    """The last lines of the lowest rank; with its number, if other ranks wrote something else."""
    rank, failure = next(iter(reports.items()))
    whose = f"{format_ranks([rank])} " if len({each.last_lines for each in reports.values()}) > 1 else ""
    return [f"    {whose}| {line}" for line in failure.last_lines[-5:]]


def _steady_headline(rank: int, cause: Cause) -> str:
    return steady_message(cause.headline, rank)


def _code(frame: Frame) -> str:
    index = frame.line - frame.first_line
    return f": {frame.source[index].strip()}" if 0 <= index < len(frame.source) else ""


def _causes_of(reports: Mapping[int, Failure]) -> list[dict[int, Cause]]:
    """The causes of ranks whose fingerprints are equal, as rank -> cause, the nearest first."""
    chains = {rank: report.chain for rank, report in reports.items()}
    return [dict(zip(chains, causes, strict=True)) for causes in zip(*chains.values(), strict=True)]


def _texts_by_rank(causes: Mapping[int, Cause]) -> str:
    """`` OSError: no shard``, or ``, on [0] OSError: no shard-0; on [1] OSError: no shard-1``."""
    ranks: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, cause in causes.items():
        ranks.setdefault((_steady_headline(rank, cause), cause.notes), []).append(rank)
    if len(ranks) == 1:
        return f" {next(iter(causes.values())).headline}"
    shown = []
    for (_, notes), theirs in list(ranks.items())[:_MAX_TEXTS]:
        shown.append(
            f"on {format_ranks(theirs)} {causes[theirs[0]].headline}" + (f" ({'; '.join(notes)})" if notes else "")
        )
    if hidden := [rank for theirs in list(ranks.values())[_MAX_TEXTS:] for rank in theirs]:
        shown.append(f"{len(ranks) - _MAX_TEXTS:,} more on {format_ranks(hidden)}")
    return f", {'; '.join(shown)}"


def python_note(failure: Failure) -> str:
    """The interpreter of the rank, for a failed import; else empty."""
    return f", python {failure.python}" if failure.python else ""
