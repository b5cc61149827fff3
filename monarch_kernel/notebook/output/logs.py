"""The logs of ranks as lines: the last of each rank, with the cells they belong to, equal ones once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from monarch_kernel.notebook.output.folding import OutputFolder
from monarch_kernel.notebook.output.rate_limit import FoldedLine, Stream
from monarch_kernel.notebook.output.text import last_update
from monarch_kernel.runtime.host.logs import LogRecord

__all__ = ["CellMark", "log_lines"]

MAX_NBYTES = 1 << 20


class CellMark(NamedTuple):
    """When a cell began, in seconds since 1970, and on which ranks."""

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
    """The last lines of each rank, in the order in which it wrote them.

    Args:
        logs: rank -> what is kept of its output.
        marks: cells, in the order in which they began; a line says where the output of each begins.
        n_lines: of each rank, at most.
        stderr: whether to show only what was written there.
        raw: whether to show every line of every rank for itself.
    """
    folder = OutputFolder(list(logs), raw=raw, burst_lines=10**9, burst_nbytes=10**12)
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
    """The end of some records that holds their last lines: of megabytes mostly a few lines are asked for."""
    first, n_ends = len(records), 0
    while first and n_ends <= n_lines:
        first -= 1
        n_ends += records[first].text.count("\n")
    # The first line of each stream that ends there may have begun long before.
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
    """Yield the lines that a rank wrote, of both streams, each with the cell in which it ended."""
    mine = [mark for mark in marks if rank in mark.ranks]
    n_begun = 0
    partial = {"stdout": "", "stderr": ""}
    for record in records:
        while n_begun < len(mine) and mine[n_begun].at <= record.at:
            n_begun += 1
        mark = mine[n_begun - 1] if n_begun else None
        *lines, partial[record.stream] = (partial[record.stream] + record.text).split("\n")
        for line in lines:
            yield _Line(mark, record.stream, last_update(line)[0])
    mark = mine[n_begun - 1] if n_begun else None
    for stream in ("stdout", "stderr"):
        if partial[stream]:
            yield _Line(mark, "stdout" if stream == "stdout" else "stderr", last_update(partial[stream])[0])


def _bounded(lines: list[FoldedLine]) -> list[FoldedLine]:
    """Leave out what is too much for a notebook, from the front."""
    room = MAX_NBYTES
    for i in range(len(lines) - 1, -1, -1):
        room -= len(lines[i].text.encode("utf-8", "replace")) + 20
        if room < 0:
            text = f"… {i + 1:,} earlier lines left out here; ask for one rank, or for fewer --lines"
            return [FoldedLine((), "stdout", text, note=True), *lines[i + 1 :]]
    return lines
