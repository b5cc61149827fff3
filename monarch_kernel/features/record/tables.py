"""The tables of a record, as SQLite has them and as they are read."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

from monarch_kernel.base.text import one_line, plural

__all__ = [
    "FILE",
    "FIRST_COMPARABLE",
    "SCHEMA",
    "VERSION",
    "Cell",
    "Check",
    "DataSource",
    "Event",
    "Knob",
    "Loop",
    "Metric",
    "RowT",
    "Table",
]

FILE = "record.sqlite"
VERSION = 3
"""The version of the schema. A record of a later version is not read. Version 1 has no blocks and no data files."""
FIRST_COMPARABLE = 3
"""Records of earlier versions have other digests, which differ for equal batches and parameters."""

SCHEMA = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE cell (
    id INTEGER PRIMARY KEY, number INTEGER, mesh TEXT, ranks TEXT, code TEXT, hash TEXT, started REAL, ended REAL,
    outcome TEXT, error TEXT, output TEXT, output_hash TEXT, output_nbytes INTEGER, names TEXT, unreplayable TEXT
);
CREATE TABLE request (request INTEGER PRIMARY KEY, cell INTEGER);
CREATE TABLE loop (
    id INTEGER PRIMARY KEY, request INTEGER, number INTEGER, mesh TEXT, steps INTEGER, reached INTEGER, started REAL, ended REAL
);
CREATE TABLE knob (
    loop INTEGER, step INTEGER, name TEXT, value TEXT, is_default INTEGER, PRIMARY KEY (loop, step, name, is_default)
) WITHOUT ROWID;
CREATE TABLE seed (cell INTEGER, rank INTEGER, library TEXT, digest BLOB, PRIMARY KEY (cell, rank, library)) WITHOUT ROWID;
CREATE TABLE state (digest BLOB PRIMARY KEY, data BLOB) WITHOUT ROWID;
CREATE TABLE data (loop INTEGER, step INTEGER, digests BLOB, PRIMARY KEY (loop, step)) WITHOUT ROWID;
CREATE TABLE source (loop INTEGER, text TEXT, PRIMARY KEY (loop, text)) WITHOUT ROWID;
CREATE TABLE data_file (
    loop INTEGER, path TEXT, nbytes INTEGER, changed_at REAL, hash TEXT, PRIMARY KEY (loop, path, hash)
) WITHOUT ROWID;
CREATE TABLE name (id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE metric (
    loop INTEGER, name INTEGER, step INTEGER, mean REAL, least REAL, most REAL, ranks INTEGER, size INTEGER,
    PRIMARY KEY (loop, step, name)
) WITHOUT ROWID;
CREATE TABLE block (id INTEGER PRIMARY KEY, loop INTEGER, name INTEGER, first INTEGER, until INTEGER, data BLOB);
CREATE TABLE event (id INTEGER PRIMARY KEY, at REAL, kind TEXT, mesh TEXT, rank INTEGER, loop INTEGER, step INTEGER, text TEXT);
CREATE TABLE "check" (
    loop INTEGER, step INTEGER, kind TEXT, digests BLOB, PRIMARY KEY (loop, step, kind)
) WITHOUT ROWID;
CREATE TABLE file (path TEXT, hash TEXT, text TEXT, PRIMARY KEY (path, hash)) WITHOUT ROWID;
"""


class Cell(NamedTuple):
    """A cell that ran.

    Attributes:
        id: counts the cells of the record, in the order in which they started.
        number: the number that the notebook shows.
        mesh: the mesh that ran it; empty for the kernel.
        ranks: its ranks, such as ``0-3``.
        code: the code.
        hash: of the code.
        started: when, in seconds since 1970.
        ended: when; None if the record ends before.
        outcome: ``ok``, ``failed``, ``interrupted``, or empty if the record ends before.
        error: the text of the error.
        output: what it showed, with equal lines of ranks folded; the middle of a long output is left out.
        output_hash: of all of it.
        output_nbytes: the size of all of it.
        names: the names that it assigns.
        unreplayable: why a replay may differ or leaves the cell out; empty if nothing is known.
    """

    id: int
    number: int
    mesh: str
    ranks: str
    code: str
    hash: str
    started: float
    ended: float | None
    outcome: str
    error: str
    output: str
    output_hash: str
    output_nbytes: int
    names: str
    unreplayable: str


class Loop(NamedTuple):
    """A live loop: the cell that ran it, its number in that cell, and how many steps it has done."""

    id: int
    cell: int
    number: int
    mesh: str
    steps: int | None
    reached: int


class Knob(NamedTuple):
    """A knob has this value from a step on; ``is_default`` marks the value in the code."""

    loop: int
    step: int
    name: str
    value: Any
    is_default: bool


class Metric(NamedTuple):
    """What ranks logged under a name in a step.

    Attributes:
        loop: the loop.
        name: the name.
        step: the last step.
        mean: of the finite values of all ranks; nan if there is none.
        min: the least.
        max: the greatest.
        ranks: how many ranks logged it.
        size: how many steps are one value.
    """

    loop: int
    name: str
    step: int
    mean: float
    min: float
    max: float
    ranks: int
    size: int


class Event(NamedTuple):
    """Something that happened.

    ``kind`` is ``death``, ``heal``, ``recovery``, ``rollback``, ``interrupt``, ``stop``, ``checkpoint``, ``loaded``,
    ``snapshot`` or ``restored``.
    """

    at: float
    kind: str
    mesh: str
    rank: int | None
    loop: int | None
    step: int | None
    text: str


class DataSource(NamedTuple):
    """A file that a data set of a loop has read: when it was changed last, and a hash of its first and its last MiB."""

    loop: int
    path: str
    nbytes: int
    changed_at: float
    hash: str


class Check(NamedTuple):
    """A digest for each rank: of its ``parameters`` or ``generators`` before a step, or of the ``batch`` that it read in it."""

    loop: int
    step: int
    kind: str
    digests: tuple[bytes, ...]


RowT = TypeVar("RowT", bound=tuple[Any, ...])


class Table(Sequence[RowT], Generic[RowT]):
    """Rows of a record.

    Args:
        kind: the class of a row.
        rows: the rows.
    """

    def __init__(self, kind: type[RowT], rows: Sequence[RowT]) -> None:
        self.kind = kind
        self.columns: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
        self._rows = list(rows)

    @overload
    def __getitem__(self, index: int) -> RowT: ...

    @overload
    def __getitem__(self, index: slice) -> list[RowT]: ...

    def __getitem__(self, index: int | slice) -> RowT | list[RowT]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RowT]:
        return iter(self._rows)

    def __repr__(self) -> str:
        most = 20
        lines = ["  ".join(self.columns)]
        lines += ["  ".join(_brief(value) for value in row) for row in self._rows[:most]]
        if len(self) > most:
            lines.append(f"… {plural(len(self) - most, 'more row')}")
        return "\n".join(lines)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as dicts."""
        return [dict(zip(self.columns, row)) for row in self._rows]

    def to_pandas(self) -> Any:
        """Return the rows as a data frame of pandas.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        pandas: Any = importlib.import_module("pandas")
        return pandas.DataFrame(self._rows, columns=list(self.columns))


def _brief(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else " ".join(one_line(str(value)).split())
    return text if len(text) <= 40 else f"{text[:39]}…"
