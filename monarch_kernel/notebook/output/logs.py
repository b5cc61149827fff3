"""Formats the logs of ranks: the last lines of each rank, with the cells they belong to, and equal lines once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from monarch_kernel.base.text import plural
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
) -> list[FoldedLine]:
    """Format the last lines of each rank, in the order in which it wrote them.

    Args:
        logs: rank -> its stored output.
        marks: cells in the order in which they started; a line marks the start of each cell's output.
        n_lines: largest number of lines of each rank.
        stderr: whether to show only ``stderr``.
        raw: whether to show every line of every rank separately.
    """
    folder = OutputFolder(list(logs), raw=raw, repeats=True, burst_lines=UNLIMITED, burst_nbytes=UNLIMITED)
    for rank, records in logs.items():
        shown: CellMark | None = None
        wanted = [record for record in records if record.stream == "stderr" or not stderr]
        lines = list(_lines(rank, _tail(wanted, n_lines), marks))
        for line in lines[-n_lines:]:
            if line.mark is not None and line.mark is not shown:
                shown = line.mark
                at = time.strftime("%H:%M:%S", time.localtime(shown.at))
                folder.feed(rank, "stdout", f"-- cell [{shown.number}], {at} --\n", 0.0)
            folder.feed(rank, line.stream, f"{line.text}\n", 0.0)
    return _bounded([line for line in folder.finish(0.0) if isinstance(line, FoldedLine)])


def _tail(records: Sequence[LogRecord], n_lines: int) -> Sequence[LogRecord]:
    """Return the end of the records with their last lines: callers usually want a few lines of megabytes."""
    first, n_ends = len(records), 0
    while first and n_ends <= n_lines:
        first -= 1
        n_ends += records[first].text.count("\n")
    # The first line of each stream in these records may have started long before.
    begins = []
    for stream in ("stdout", "stderr"):
        text = ""
        for record in reversed(records[:first]):
            if record.stream == stream:
                _, newline, last = record.text.rpartition("\n")
                text = last + text
                if newline:
                    break
        if text:
            begins.append(LogRecord(records[first].at, stream, text))
    return [*begins, *records[first:]]


def _lines(rank: int, records: Sequence[LogRecord], marks: Sequence[CellMark]) -> Iterator[_Line]:
    """Yield the lines of both streams of a rank, each with the cell in which the line ended."""
    mine = [mark for mark in marks if rank in mark.ranks]
    n_started = 0
    partial = {"stdout": "", "stderr": ""}
    for record in records:
        while n_started < len(mine) and mine[n_started].at <= record.at:
            n_started += 1
        mark = mine[n_started - 1] if n_started else None
        *lines, partial[record.stream] = (partial[record.stream] + record.text).split("\n")
        for line in lines:
            yield _Line(mark, record.stream, last_update(line)[0])
    mark = mine[n_started - 1] if n_started else None
    for stream in ("stdout", "stderr"):
        if partial[stream]:
            yield _Line(mark, "stdout" if stream == "stdout" else "stderr", last_update(partial[stream])[0])


def _bounded(lines: list[FoldedLine]) -> list[FoldedLine]:
    """Bound the size of the lines for a notebook: leave out the first ones."""
    room = MAX_NBYTES
    for i in range(len(lines) - 1, -1, -1):
        room -= len(lines[i].text.encode("utf-8", "replace")) + 20
        if room < 0:
            text = f"… {plural(i + 1, 'earlier line')} left out here; select one rank, or fewer --lines"
            return [FoldedLine((), "stdout", text, note=True), *lines[i + 1 :]]
    return lines
