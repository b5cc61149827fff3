"""Turns samples into medians, ratios, verdicts and the printed table; pure, so that tests need no peer."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.machine import Machine
from benchmarks.measures import BARS, Bar, Measure, row_key

__all__ = ["Cell", "Sample", "Verdict", "judge", "render", "summarise", "to_json"]

MISSING = "–"
OURS = "ours"
REFERENCE = "monarch"

PEER_NOTES: dict[str, str] = {
    "ours": "actors; a cell is `ProcMesh.run` on a rank's namespace.",
    "monarch": "actors; a cell is an endpoint that compiles and runs the code.",
    "ray": "actors; `ray.init` counts in the start, not in the second mesh; a cell is a method that runs the code.",
    "dask": "an actor in each worker for calls to one rank, `Client.run` for calls and cells on all ranks, which is fastest.",
    "ipyparallel": "`apply` of a function, on a view of one engine or of all; a cell is `DirectView.execute`.",
}


@dataclass(frozen=True)
class Sample:
    """The result of one run of one peer in one row: a figure, or the reason why there is none."""

    peer: str
    row: str
    value: float | None
    reason: str = ""


@dataclass(frozen=True)
class Cell:
    """The figures of one peer in one row, over all repetitions."""

    values: tuple[float, ...]
    reasons: tuple[str, ...]
    """Each distinct reason for a missing figure, in order of appearance."""
    missed: int
    """The number of runs without a figure."""

    @property
    def median(self) -> float | None:
        """The median of the figures, or None without any."""
        return statistics.median(self.values) if self.values else None


@dataclass(frozen=True)
class Verdict:
    """The result of a bar."""

    bar: Bar
    figure: float | None
    """The figure that the bar limits: our ratio to monarch, or our own figure; None if it is missing."""
    met: bool | None


Table = dict[str, dict[str, Cell]]
"""Cells by row, then by peer."""


def summarise(samples: Iterable[Sample]) -> Table:
    """Gather samples into cells."""
    grouped: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        grouped.setdefault((sample.row, sample.peer), []).append(sample)
    table: Table = {}
    for (row, peer), taken in grouped.items():
        table.setdefault(row, {})[peer] = Cell(
            values=tuple(sample.value for sample in taken if sample.value is not None),
            reasons=tuple(dict.fromkeys(sample.reason for sample in taken if sample.value is None)),
            missed=sum(sample.value is None for sample in taken),
        )
    return table


def median_of(table: Table, row: str, peer: str) -> float | None:
    """Return a peer's median in a row, or None."""
    cell = table.get(row, {}).get(peer)
    return cell.median if cell else None


def ratio_of(table: Table, row: str, peer: str = REFERENCE, than: str = "") -> float | None:
    """Return our median divided by a peer's, of the same row or another; None if either is missing, or the divisor is zero."""
    ours, reference = median_of(table, row, OURS), median_of(table, than or row, peer)
    return ours / reference if ours is not None and reference else None


def judge(table: Table, bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """Compare the figures with the bars of the rows in the table."""
    verdicts = []
    for bar in bars:
        if bar.row not in table:
            continue
        kind, _, peer = bar.kind.partition(" x ")
        figure = ratio_of(table, bar.row, peer, bar.than) if peer else median_of(table, bar.row, OURS)
        met = None
        if figure is not None:
            met = figure >= bar.limit if kind == "at least" else figure <= bar.limit
        verdicts.append(Verdict(bar, figure, met))
    return verdicts


def number(value: float) -> str:
    """Write a figure with three significant digits, or with all digits before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def cell_text(cell: Cell | None) -> str:
    """Write a cell as median, with the smallest and the largest figure when there are several."""
    if cell is None or cell.median is None:
        return MISSING
    if len(cell.values) == 1:
        return number(cell.median)
    return f"{number(cell.median)} ({number(min(cell.values))}-{number(max(cell.values))})"


def bar_text(verdict: Verdict) -> str:
    """Write a bar, the figure that it limits if the table does not show it elsewhere, and whether the bar is met."""
    kind, _, peer = verdict.bar.kind.partition(" x ")
    text = f"{'>=' if kind == 'at least' else '<='} {verdict.bar.limit:,g}{' x' if peer else ''}"
    if verdict.bar.than or peer not in ("", REFERENCE):
        text += f" {verdict.bar.than or peer}"
        text += f", {verdict.figure:.2f}" if verdict.figure is not None else ""
    return text + {True: " met", False: " MISSED", None: " ?"}[verdict.met]


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows as a Markdown table: the first row is the head; all columns but the first are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        numbers = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        return "| " + " | ".join([row[0].ljust(widths[0]), *numbers]) + " |"

    rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""])
    return [line(rows[0]), rule, *map(line, rows[1:])]


def header(machine: Machine) -> list[str]:
    """Write the header above the table."""
    versions = ", ".join(f"{peer} {version}" for peer, version in machine.peers.items())
    busy = machine.load > machine.cores / 2
    return [
        f"machine: {machine.processor}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.system}, "
        f"load {machine.load:g} before the run" + (": BUSY, compare no figures with other runs" if busy else ""),
        f"Python {machine.python}, torch {machine.torch}" + (f"; {versions}" if versions else ""),
        f"commit {machine.commit}; {machine.date}",
    ]


def missing_lines(table: Table, peers: Sequence[str], rows: Sequence[str]) -> list[str]:
    """List the reasons for missing figures, each reason of a peer once, with the rows that it concerns."""
    lines = []
    for peer in peers:
        concerned: dict[str, list[str]] = {}
        for row in rows:
            cell = table.get(row, {}).get(peer)
            for reason in cell.reasons if cell else ():
                total = cell.missed + len(cell.values) if cell else 0
                part = f" in {cell.missed} of {total} runs" if cell and cell.values else ""
                concerned.setdefault(reason, []).append(row + part)
        for reason, affected in concerned.items():
            where = "everything" if len(affected) == len(rows) and affected == list(rows) else ", ".join(affected)
            lines.append(f"{MISSING} {peer}, {where}: {reason}")
    return lines


def render(
    machine: Machine,
    peers: Sequence[str],
    measures: Sequence[Measure],
    samples: Iterable[Sample],
    bars: Sequence[Bar] = BARS,
    notes: Mapping[str, str] = PEER_NOTES,
) -> str:
    """Write the whole report: machine, table, missing figures, notes."""
    table = summarise(samples)
    verdicts = judge(table, bars)
    rows = [["measure", "unit", *peers, f"{OURS} / {REFERENCE}", "bar"]]
    for measure in measures:
        for ranks in measure.ranks:
            row = row_key(measure.key, ranks)
            ratio = ratio_of(table, row)
            title = measure.title.format(ranks=ranks) + (" (higher is better)" if measure.higher_is_better else "")
            cells = [cell_text(table.get(row, {}).get(peer)) for peer in peers]
            ratio_text = MISSING if ratio is None else f"{ratio:.2f}"
            bars = "; ".join(bar_text(verdict) for verdict in verdicts if verdict.bar.row == row)
            rows.append([title, measure.unit, *cells, ratio_text, bars])
    lines = [*header(machine), "", *align(rows), ""]
    missing = missing_lines(table, peers, [row_key(m.key, ranks) for m in measures for ranks in m.ranks])
    if missing:
        lines += ["Missing:", *missing, ""]
    lines.append(
        "Medians over the repetitions (smallest-largest); OMP_NUM_THREADS=1; a fresh process for each run of a peer."
    )
    lines += [
        f"- {m.title.format(ranks=m.ranks[0] if len(m.ranks) == 1 else 'N')}: "
        f"{m.note.format(ranks=m.ranks[0] if len(m.ranks) == 1 else 'N')}"
        for m in measures
    ]
    lines += [f"- {peer}: {notes[peer]}" for peer in peers if peer in notes]
    return "\n".join(lines)


def to_json(
    machine: Machine,
    settings: dict[str, object],
    measures: Sequence[Measure],
    samples: Iterable[Sample],
    bars: Sequence[Bar] = BARS,
) -> dict[str, object]:
    """Return the report as plain data: every figure, the medians, the ratios and the verdicts."""
    table = summarise(samples)
    units = {row_key(m.key, ranks): m.unit for m in measures for ranks in m.ranks}
    results = {
        row: {
            "unit": units.get(row, ""),
            "ratio_to_monarch": ratio_of(table, row),
            "peers": {
                peer: {
                    "median": cell.median,
                    "min": min(cell.values, default=None),
                    "max": max(cell.values, default=None),
                    "values": list(cell.values),
                    "missing": list(cell.reasons),
                }
                for peer, cell in cells.items()
            },
        }
        for row, cells in table.items()
    }
    return {
        "machine": asdict(machine),
        "settings": settings,
        "results": results,
        "bars": [asdict(verdict) for verdict in judge(table, bars)],
    }
