"""The catalogue of measures: each with its numbers of ranks and its unit, and the bars, which our figures must meet.

A *row* is a measure on a number of ranks, written `call/4`; it is one line of the report. This file is pure: it imports no peer
and starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["BARS", "BULK", "MEASURES", "Bar", "Measure", "row_key", "rows_by_ranks", "select_measures"]


@dataclass(frozen=True)
class Measure:
    """One kind of work, done in the same way by every peer."""

    key: str
    title: str
    """The text of its line in the report; `{ranks}` stands for the number of ranks."""
    unit: str
    ranks: tuple[int, ...]
    note: str
    """Exact definition of the time, for the notes below the table."""
    higher_is_better: bool = False


@dataclass(frozen=True)
class Bar:
    """A limit for our own figure: against another figure of the same run, or in the unit of the measure.

    The other figure is a peer's in the same row, or our own in the row ``than``.
    """

    row: str
    limit: float
    kind: Literal[
        "at most",
        "at least",
        "at most x monarch",
        "at least x monarch",
        "at most x ours",
        "at least x ours",
        "at most x plain",
        "at most x spmd",
    ]
    than: str = ""


# Operations with many bytes, each with several sizes.
BULK = (
    (
        "copy",
        "copy of {mib} MiB within a rank",
        "one memcpy of {mib} MiB of float32 by a rank, into memory that was used before: what the machine can do",
    ),
    (
        "read",
        "{mib} MiB from rank to rank",
        "one rank copies {mib} MiB of another's memory into its own memory, which was used before: through a buffer if the "
        "library has buffers, otherwise as the value of a call, which it copies there",
    ),
    (
        "fresh",
        "{mib} MiB from rank to rank, into fresh memory",
        "the same, into newly allocated memory",
    ),
    (
        "send",
        "{mib} MiB from controller to rank",
        "a call with {mib} MiB of float32, of which the rank reads the two ends, until the answer",
    ),
    (
        "give",
        "{mib} MiB from rank to controller",
        "a call that returns {mib} MiB of float32, of which the controller reads the two ends",
    ),
)

# Within one process the measures run in this order: memory is measured before any load, and measures that fill queues come
# last.
MEASURES: tuple[Measure, ...] = (
    Measure(
        "start",
        "start of {ranks} ranks",
        "s",
        (2, 4, 8),
        "from the first call into the library to the answer of every rank, torch imported in each; a fresh process for "
        "each figure, the library already imported, files in the page cache",
    ),
    Measure(
        "script",
        "a whole script up to {ranks} ranks",
        "s",
        (4,),
        "the same, but from the start of the controller's Python, including the import of the library",
    ),
    Measure(
        "memory",
        "memory per idle rank",
        "MiB",
        (4,),
        "mean PSS of the {ranks} rank processes with torch imported, before any load",
    ),
    Measure(
        "memory_all",
        "memory of all helpers and ranks, per rank",
        "MiB",
        (4,),
        "PSS of every process below the controller (ranks, agents, schedulers, stores), divided by the ranks",
    ),
    Measure(
        "call_one",
        "call to one rank",
        "us",
        (4,),
        "median round trip of one call with an int, which the rank returns, to one rank of 4",
    ),
    Measure(
        "call",
        "call on {ranks} ranks",
        "us",
        (2, 4, 8, 16),
        "median round trip of the same call to every rank at once, all values gathered",
    ),
    Measure(
        "cell",
        "`pass` as a cell on {ranks} ranks",
        "us",
        (2, 4, 8),
        "median round trip of the code `pass` run on every rank, without Jupyter",
    ),
    Measure(
        "between",
        "call from one rank to another",
        "us",
        (4,),
        "median round trip of one call with an int, from one rank to another, which returns it; timed by the caller",
    ),
    Measure(
        "outstanding",
        "outstanding calls to one rank",
        "1/s",
        (4,),
        "calls to one rank of 4, all sent before the first answer is read, then all gathered, each value checked",
        higher_is_better=True,
    ),
    Measure(
        "empty",
        "call without arguments",
        "us",
        (4,),
        "median round trip of a call to one rank of 4 without arguments and without a result",
    ),
    Measure(
        "one_kib",
        "call with bytes of 1 KiB",
        "us",
        (4,),
        "the same with 1 KiB of bytes as argument",
    ),
    Measure(
        "small_tensor",
        "call with a tensor of 1 KiB",
        "us",
        (4,),
        "the same with 1 KiB of float32 as argument: a torch tensor or a NumPy array",
    ),
    *(
        Measure(
            f"{what}_{mib}",
            title.format(mib=mib),
            "GB/s",
            (2,),
            note.format(mib=mib),
            higher_is_better=True,
        )
        for mib in (64, 512)
        for what, title, note in BULK
    ),
    Measure(
        "to_one_64",
        "64 MiB to one rank of {ranks}",
        "ms",
        (8,),
        "a call to one rank with 64 MiB of float32, of which it reads the two ends",
    ),
    Measure(
        "to_all_64",
        "64 MiB to all of {ranks} ranks",
        "ms",
        (8,),
        "the same call to every rank at once",
    ),
    Measure(
        "start_again",
        "second mesh of {ranks} ranks",
        "s",
        (4, 8),
        "the same as the start, again in the same controller while the first ranks are idle",
    ),
)

BARS: tuple[Bar, ...] = (
    Bar("start/4", 0.5, "at most x monarch"),
    Bar("start/8", 0.3, "at most x monarch"),
    Bar("memory/4", 90.0, "at most"),
    Bar("call_one/4", 0.3, "at most x monarch"),
    Bar("call/4", 0.35, "at most x monarch"),
    Bar("call/16", 0.25, "at most x monarch"),
    Bar("cell/4", 0.5, "at most x monarch"),
    Bar("outstanding/4", 60_000.0, "at least"),
    Bar("one_kib/4", 1.2, "at most x ours", "empty/4"),
    *(
        Bar(f"{what}_{mib}/2", limit, "at least x ours", f"copy_{mib}/2")
        for mib in (64, 512)
        for what, limit in (("read", 0.8), ("fresh", 0.4), ("send", 0.5), ("give", 0.5))
    ),
    Bar("read_64/2", 8.0, "at least x monarch"),
    Bar("read_512/2", 8.0, "at least x monarch"),
    Bar("to_all_64/8", 3.0, "at most x ours", "to_one_64/8"),
)


def row_key(measure: str, ranks: int) -> str:
    """Name the row of a measure on a number of ranks."""
    return f"{measure}/{ranks}"


def select_measures(names: Iterable[str], of: Sequence[Measure] = MEASURES) -> tuple[Measure, ...]:
    """Select measures of a catalogue by name (`call`) or by row (`call/4`), in the order of the catalogue; no names select all.

    Raises:
        ValueError: a name is in no row; the message lists the names that exist.
    """
    wanted = list(names)
    known = {measure.key for measure in of} | {row_key(m.key, ranks) for m in of for ranks in m.ranks}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        allowed = ", ".join(f"{m.key} ({', '.join(map(str, m.ranks))} ranks)" for m in of)
        raise ValueError(f"no measure is called {', '.join(map(repr, unknown))}; there are: {allowed}")
    chosen = []
    for measure in of:
        whole = not wanted or measure.key in wanted
        ranks = tuple(n for n in measure.ranks if whole or row_key(measure.key, n) in wanted)
        if ranks:
            chosen.append(
                Measure(measure.key, measure.title, measure.unit, ranks, measure.note, measure.higher_is_better)
            )
    return tuple(chosen)


def rows_by_ranks(measures: Iterable[Measure]) -> dict[int, list[str]]:
    """Group measures by their number of ranks, because one process takes all measures of one mesh."""
    groups: dict[int, list[str]] = {}
    for measure in measures:
        for ranks in measure.ranks:
            groups.setdefault(ranks, []).append(measure.key)
    return dict(sorted(groups.items()))
