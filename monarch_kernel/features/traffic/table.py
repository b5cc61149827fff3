"""The traffic table: rows of bytes between processes to compute with, their display, and the difference of two tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from monarch_kernel.base.text import Column, aligned, format_nbytes, html_table, one_line, plural
from monarch_kernel.errors import format_ranks
from monarch_kernel.features.traffic.bandwidth import bus_factor
from monarch_kernel.runtime.host.link_speeds import links_text

__all__ = ["CollectiveRow", "End", "Traffic", "TrafficRow", "largest_first"]

PROGRAM = "program"
"""Name of the controller's process in tables."""

_MAX_ROWS = 24
"""If there are more rows, rows between the same meshes are combined."""

_MAX_BUSIEST = 8


class End(NamedTuple):
    """A process that bytes go to or come from.

    Attributes:
        mesh: name of its mesh; empty for the program itself.
        rank: flat rank there.
        proc: number of the process, unique in the session; 0 for the program. A process that replaces it has the same number.
        is_dead: whether the process has died or was stopped.
        incarnation: how many processes the rank had before this one.
    """

    mesh: str
    rank: int
    proc: int
    is_dead: bool = False
    incarnation: int = 0

    @property
    def process(self) -> tuple[int, int]:
        """Identifies the process, also among those that had the same rank."""
        return self.proc, self.incarnation

    def __str__(self) -> str:
        return (f"{self.mesh}[{self.rank}]" if self.proc else PROGRAM) + " (dead)" * self.is_dead


class TrafficRow(NamedTuple):
    """Bytes from one process to another on one data path.

    Attributes:
        source: the process that the bytes come from.
        target: the process that they go to.
        path: the data path, as in `Transfer.path`; "shared memory" and "socket" for tensors, arrays and the like in values.
        nbytes: number of bytes.
        operations: number of finished transfers, and of arrays.
        seconds: time during which transfers ran, concurrent ones counted once; 0 if unknown.
        is_last_known: whether a process that counts these bytes has died or has not answered, so that some may be missing.
    """

    source: End
    target: End
    path: str
    nbytes: int
    operations: int
    seconds: float
    is_last_known: bool = False

    @property
    def bytes_per_s(self) -> float:
        """Mean rate while transfers ran; 0 if unknown."""
        return self.nbytes / self.seconds if self.seconds else 0.0


class CollectiveRow(NamedTuple):
    """The collectives of one kind that a rank has run in one process group.

    Attributes:
        end: the rank.
        group: name of the group, as in `%mesh stacks`; empty for the default group.
        operation: name of the collective, such as ``all_reduce``.
        nbytes: bytes of the inputs or of the outputs on this rank, whichever is more.
        operations: number of collectives.
        seconds: time that Python spent in them; with ``async_op``, in the call and in ``wait()``.
        is_last_known: whether the rank has died or has not answered.
        path: the data path: the backend of the group, such as ``gloo``.
        ranks: number of ranks in the group.
        nbytes_in: bytes that the rank has received from others (`features.traffic.bandwidth.moved`).
        nbytes_out: bytes that it has sent to others.
        timed_nbytes: size of those collectives whose duration is known, as nccl-tests define it.
        timed_s: their duration.
    """

    end: End
    group: str
    operation: str
    nbytes: int
    operations: int
    seconds: float
    is_last_known: bool = False
    path: str = ""
    ranks: int = 0
    nbytes_in: int = 0
    nbytes_out: int = 0
    timed_nbytes: int = 0
    timed_s: float = 0.0

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Algorithm bandwidth, the ``algbw`` of nccl-tests; 0 if unknown."""
        return self.timed_nbytes / self.timed_s if self.timed_s > 0 else 0.0

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth, the ``busbw`` of nccl-tests; 0 if unknown."""
        return self.algorithm_bytes_per_s * bus_factor(self.operation, self.ranks)


@dataclass(frozen=True)
class Traffic:
    """Traffic to and from the ranks of a mesh, or of a part of it, since they started; returned by `ProcMesh.traffic`.

    ``later - earlier`` is the traffic between the two.

    Attributes:
        name: name of the mesh, or of the part.
        rows: bytes between processes, the largest first.
        collectives: collectives of the ranks, the largest first.
        unread: number of collectives of all ranks that are in no row; torch counts these, but provides no details.
        links: rank -> the links of its machine and of its GPU with known speed: name, and bytes per second in each direction.
    """

    name: str
    rows: tuple[TrafficRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    unread: int = 0
    links: Mapping[int, tuple[tuple[str, float], ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows; not of collectives."""
        return sum(row.nbytes for row in self.rows)

    @property
    def operations(self) -> int:
        """Operations of all rows; not collectives."""
        return sum(row.operations for row in self.rows)

    def __sub__(self, earlier: Traffic) -> Traffic:
        """The traffic since an earlier table."""
        if not isinstance(earlier, Traffic):
            return NotImplemented
        carried = {_pair(row): row for row in earlier.rows}
        collected = {_kind(row): row for row in earlier.collectives}
        rows = [_less(row, carried.get(_pair(row))) for row in self.rows]
        collectives = [_less(row, collected.get(_kind(row))) for row in self.collectives]
        return replace(
            self,
            rows=largest_first(row for row in rows if row.nbytes or row.operations),
            collectives=largest_first(row for row in collectives if row.operations),
            unread=self.unread - earlier.unread,
        )

    def __str__(self) -> str:
        tables = [
            [caption, *(aligned(columns) if columns else ()), *below] for caption, columns, below in self._tables()
        ]
        return "\n\n".join("\n".join(map(one_line, lines)) for lines in tables)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return "".join(html_table(*table) for table in self._tables())

    def _tables(self) -> list[tuple[str, list[Column], list[str]]]:
        """The tables, each with its caption, its columns, and the lines below it."""
        tables = [(self._caption(), *_carried(self.rows))]
        if self.collectives or self.unread:
            tables.append((f"collectives of {self.name}", *_collected(self.collectives, self.unread)))
        tables[-1][2].extend(links_text(self.links))
        return tables

    def _caption(self) -> str:
        if not self.rows:
            return f"traffic of {self.name}: {'no values or buffers' if self.collectives or self.unread else 'nothing yet'}"
        pairs = len({(row.source.process, row.target.process) for row in self.rows})
        between = f" between {pairs:,} pairs" if pairs > 1 else ""
        return (
            f"traffic of {self.name}: {format_nbytes(self.nbytes)} in {_count(self.operations, 'operation')}{between}"
        )


RowT = TypeVar("RowT", TrafficRow, CollectiveRow)


def _pair(row: TrafficRow) -> Hashable:
    return row.source.process, row.target.process, row.path


def _kind(row: CollectiveRow) -> Hashable:
    return row.end.process, row.group, row.operation, row.path, row.ranks


def _less(row: RowT, other: RowT | None) -> RowT:
    if other is None:
        return row
    less = row._replace(
        nbytes=row.nbytes - other.nbytes,
        operations=row.operations - other.operations,
        seconds=max(0.0, row.seconds - other.seconds),
    )
    if not isinstance(less, CollectiveRow) or not isinstance(other, CollectiveRow):
        return less
    return less._replace(
        nbytes_in=less.nbytes_in - other.nbytes_in,
        nbytes_out=less.nbytes_out - other.nbytes_out,
        timed_nbytes=less.timed_nbytes - other.timed_nbytes,
        timed_s=max(0.0, less.timed_s - other.timed_s),
    )


def largest_first(rows: Iterable[RowT]) -> tuple[RowT, ...]:
    """Sort rows for display."""
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, -row.operations, row[:3])))


def _carried(rows: Sequence[TrafficRow]) -> tuple[list[Column], list[str]]:
    """The columns of the table of transfers, and the lines below it."""
    below = _notes(rows)
    if len(rows) <= _MAX_ROWS:
        return _columns(rows, [str(row.source) for row in rows], [str(row.target) for row in rows]), below
    groups = _together(rows, lambda row: (row.source.mesh, row.target.mesh, row.path))[:_MAX_ROWS]
    sums = [_sum(group) for group in groups]
    columns = _columns(
        sums,
        [_ends(row.source for row in group) for group in groups],
        [_ends(row.target for row in group) for group in groups],
    )
    columns.insert(3, ("pairs", [f"{len(group):,}" for group in groups], True))
    busiest = [
        f"{row.source} to {row.target} by {row.path}: {format_nbytes(row.nbytes)}" for row in rows[:_MAX_BUSIEST]
    ]
    return columns, ["most of it:", *busiest, *below]


def _columns(rows: Sequence[TrafficRow], sources: list[str], targets: list[str]) -> list[Column]:
    if not rows:
        return []
    return [
        ("from", sources, False),
        ("to", targets, False),
        ("path", [row.path for row in rows], False),
        ("bytes", [format_nbytes(row.nbytes) for row in rows], True),
        ("operations", [f"{row.operations:,}" for row in rows], True),
        ("busy", [_busy(row.seconds) for row in rows], True),
        ("mean rate", [f"{format_nbytes(row.bytes_per_s)}/s" if row.seconds else "" for row in rows], True),
    ]


def _collected(rows: Sequence[CollectiveRow], unread: int) -> tuple[list[Column], list[str]]:
    """The columns of the table of collectives, with a row for each kind, and one for dead ranks, and the lines below it."""
    groups = _together(rows, lambda row: (row.group, row.operation, row.path, row.ranks, row.end.is_dead))
    shown = groups[:_MAX_ROWS]
    columns: list[Column] = [
        ("collective", [group[0].operation for group in shown], False),
        ("group", [group[0].group for group in shown], False),
        ("path", [group[0].path for group in shown], False),
        ("ranks", [_ranks(row.end for row in group) for group in shown], False),
        ("bytes a rank", [_span(format_nbytes, [row.nbytes for row in group]) for group in shown], True),
        ("times", [_span("{:,}".format, [row.operations for row in group]) for group in shown], True),
        ("waited", [_span(_busy, [row.seconds for row in group if row.seconds] or [0.0]) for group in shown], True),
        ("algbw", [_bandwidth(group, 1.0) for group in shown], True),
        ("busbw", [_bandwidth(group, bus_factor(group[0].operation, group[0].ranks)) for group in shown], True),
    ]
    below = [f"and {plural(len(groups) - len(shown), 'more kind')}"] if len(groups) > len(shown) else []
    if unread:
        below.append(f"{_count(unread, 'collective')} more, which torch has counted: bytes unknown")
    columns = [column for column in columns if any(column[1])]
    return columns, [*below, *_notes(rows)]


def _notes(rows: Sequence[TrafficRow] | Sequence[CollectiveRow]) -> list[str]:
    return ["some counts are the last known ones of ranks that are dead or do not answer"] * any(
        row.is_last_known for row in rows
    )


def _together(rows: Sequence[RowT], key: Callable[[RowT], Hashable]) -> list[list[RowT]]:
    """Group rows by equal keys, the groups with the most bytes first."""
    groups: dict[Hashable, list[RowT]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.values(), key=lambda group: -sum(row.nbytes for row in group))


def _sum(rows: Sequence[TrafficRow]) -> TrafficRow:
    return rows[0]._replace(
        nbytes=sum(row.nbytes for row in rows),
        operations=sum(row.operations for row in rows),
        seconds=sum(row.seconds for row in rows),
    )


def _ends(ends: Iterable[End]) -> str:
    """Describe processes of one mesh, such as "t[0-3]"."""
    known = {end.process: end for end in ends}
    (first, *others) = known.values()
    return f"{first.mesh}{format_ranks(sorted({end.rank for end in known.values()}))}" if others else str(first)


def _ranks(ends: Iterable[End]) -> str:
    """Describe ranks that are all alive or all dead, such as "[0-3]" or "[2] (dead)"."""
    known = list(ends)
    return format_ranks(sorted({end.rank for end in known})) + " (dead)" * known[0].is_dead


def _bandwidth(rows: Sequence[CollectiveRow], factor: float) -> str:
    """The mean bandwidth of collectives of one kind, over all ranks; empty if unknown."""
    timed_s = sum(row.timed_s for row in rows)
    rate = factor * sum(row.timed_nbytes for row in rows) / timed_s if timed_s > 0 else 0.0
    return f"{format_nbytes(rate)}/s" if rate else ""


def _span(write: Callable[[float], str], figures: Sequence[float]) -> str:
    low, high = write(min(figures)), write(max(figures))
    return low if low == high else f"{low} to {high}"


def _busy(seconds: float) -> str:
    if not seconds:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.{1 if seconds < 10 * size else 0}f} {unit}"
    return f"{seconds * 1e6:.0f} us"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
