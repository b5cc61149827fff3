"""Formats the logs of ranks: the last lines of each rank, with the cells they belong to, and equal lines once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from monarch_kernel.base.text import logs_command, plural
from monarch_kernel.notebook.output.folding import OutputFolder
from monarch_kernel.notebook.output.rate_limit import UNLIMITED, FoldedLine, Stream
from monarch_kernel.notebook.output.text import last_update
from monarch_kernel.runtime.host.logs import LogRecord

__all__ = ["CellMark", "log_lines"]

MAX_NBYTES = 1 << 20


class CellMark(NamedTuple):
    """When a cell started, in seconds since 1970, and on which ranks."""

    at: float
    number: int
    ranks: frozenset[int]


class _Line(NamedTuple):
    mark: CellMark | None
    stream: Stream
    text: str


def log_lines(
    logs: Mapping[int, Sequence[LogRecord]],
    marks: Sequence[CellMark],
    *,
    n_lines: int,
    stderr: bool = False,
    raw: bool = False,
    command: str = "",
) -> list[FoldedLine]:
    """Format the last lines of each rank, in the order in which it wrote them.

    Args:
        logs: rank -> its stored output.
        marks: cells in the order in which they started; a line marks the start of each cell's output.
        n_lines: largest number of lines of each rank.
        stderr: whether to show only ``stderr``.
        raw: whether to show every line of every rank separately.
        command: the ``%mesh logs`` command of the ranks, to be named in a first line if there are earlier lines.
    """
    folder = OutputFolder(list(logs), raw=raw, repeats=True, burst_lines=UNLIMITED, burst_nbytes=UNLIMITED)
    n_lines_of: list[int] = []
    for rank, records in logs.items():
        shown: CellMark | None = None
        wanted = [record for record in records if record.stream == "stderr" or not stderr]
        n_lines_of.append(sum(record.text.count("\n") for record in wanted) if command else 0)
        mine = [mark for mark in marks if rank in mark.ranks]
        lines = list(_lines(_tail(wanted, n_lines, mine), mine))
        for line in lines[-n_lines:]:
            if line.mark is not None and line.mark is not shown:
                shown = line.mark
                at = time.strftime("%H:%M:%S", time.localtime(shown.at))
                folder.feed(rank, "stdout", f"-- cell [{shown.number}], {at} --\n", 0.0)
            folder.feed(rank, line.stream, f"{line.text}\n", 0.0)
    found = [line for line in folder.finish(0.0) if isinstance(line, FoldedLine)]
    return [*_earlier(n_lines_of, n_lines, command), *_bounded(found)]


def _earlier(n_lines_of: Sequence[int], n_lines: int, command: str) -> list[FoldedLine]:
    """Say how many lines come before those that are shown, if there are any."""
    most = max(n_lines_of, default=0)
    if most <= n_lines:
        return []
    text = plural(most - n_lines, "earlier line")
    if len(n_lines_of) > 1:
        text = f"{text} of each rank" if min(n_lines_of) == most else f"up to {text} of a rank"
    return [FoldedLine((), "stdout", f"… {text} left out here; more: {logs_command(command, most)}", note=True)]


def _tail(records: Sequence[LogRecord], n_lines: int, marks: Sequence[CellMark]) -> Sequence[LogRecord]:
    """Return the end of the records with their last lines: callers usually want a few lines of megabytes."""
    first, n_ends = len(records), 0
    while first and n_ends <= n_lines:
        first -= 1
        n_ends += records[first].text.count("\n")
    if not first:
        return records
    # The first line of each stream in these records may have started long before, in the same cell.
    since = max((mark.at for mark in marks if mark.at <= records[first].at), default=0.0)
    begins = []
    for stream in ("stdout", "stderr"):
        text = ""
        for record in reversed(records[:first]):
            if record.at < since:
                break
            if record.stream == stream:
                _, newline, last = record.text.rpartition("\n")
                text = last + text
                if newline:
                    break
        if text:
            begins.append(LogRecord(records[first].at, stream, text))
    return [*begins, *records[first:]]


def _lines(records: Sequence[LogRecord], marks: Sequence[CellMark]) -> Iterator[_Line]:
    """Yield the lines of both streams of a rank, each with its cell; the end of a cell ends lines, too."""
    n_started = 0
    mark: CellMark | None = None
    partial: dict[Stream, str] = {"stdout": "", "stderr": ""}

    def rests() -> Iterator[_Line]:
        for stream, text in partial.items():
            if text:
                yield _Line(mark, stream, last_update(text)[0])
                partial[stream] = ""

    for record in records:
        if n_started < len(marks) and marks[n_started].at <= record.at:
            yield from rests()
            while n_started < len(marks) and marks[n_started].at <= record.at:
                n_started += 1
            mark = marks[n_started - 1]
        *lines, partial[record.stream] = (partial[record.stream] + record.text).split("\n")
        for line in lines:
            yield _Line(mark, record.stream, last_update(line)[0])
    yield from rests()


def _bounded(lines: list[FoldedLine]) -> list[FoldedLine]:
    """Bound the size of the lines for a notebook: leave out the first ones."""
    room = MAX_NBYTES
    for i in range(len(lines) - 1, -1, -1):
        room -= len(lines[i].text.encode("utf-8", "replace")) + 20
        if room < 0:
            text = f"… {plural(i + 1, 'earlier line')} left out here; select one rank, or fewer --lines"
            return [FoldedLine((), "stdout", text, note=True), *lines[i + 1 :]]
    return lines
