"""Reads a record, also one that is being written, or that ends in the middle."""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from monarch_kernel.base.text import one_line, plural
from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.checking import MAX_RANKS, Unfit, fitting, foreign_part, state_of, value_of
from monarch_kernel.features.record.packing import BATCHES, Summary, unpack_digests, unpack_metrics
from monarch_kernel.features.record.redaction import Redaction
from monarch_kernel.features.record.tables import (
    FILE,
    VERSION,
    Cell,
    Check,
    DataSource,
    Event,
    Knob,
    Loop,
    Metric,
    RowT,
    Table,
)

__all__ = ["RecordReader", "ranks_of"]

StepT = TypeVar("StepT", bound=Sequence[Any])

_DIGEST = 8


class RecordReader:
    """What a record holds, as tables. Each table is read once; `reload` forgets them.

    Args:
        folder: the folder of the record, or its file.

    Attributes:
        path: the file.
        damage: what could not be read; empty if all is well.
        version: the version of its schema.

    Raises:
        RecordError: there is no record, it is no record, or a newer version has written it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder).expanduser().absolute()
        self.path = path if path.name == FILE else path / FILE
        self.damage: list[str] = []
        if not self.path.is_file():
            raise RecordError(f"{path} holds no record: there is no {FILE}")
        self._connection = self._open()
        try:
            (self.version,) = self._connection.execute("PRAGMA user_version").fetchone()
            tables = {
                name for (name,) in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            foreign = foreign_part(self._connection)
        except sqlite3.Error as error:
            raise RecordError(
                f"{self.path} can't be read: {error}; it is no record, or its first page is lost"
            ) from None
        if self.version > VERSION:
            raise RecordError(
                f"{self.path} was written by a newer version of monarch_kernel (its schema is {self.version}, this version "
                f"reads {VERSION}): update monarch_kernel to read it"
            )
        if not {"run", "cell", "loop"} <= tables:
            raise RecordError(f"{self.path} is a file of SQLite, but no record")
        if foreign:
            raise RecordError(f"{self.path} has a part that no record has ({foreign}), and is not read")
        self._tables = tables

    def __repr__(self) -> str:
        return f"<record {self.folder}: {plural(len(self.cells), 'cell')}, {plural(len(self.loops), 'loop')}>"

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        """The folder of the record."""
        return self.path.parent

    def close(self) -> None:
        """Close the file; what was read stays."""
        self._connection.close()

    def reload(self, *names: str) -> None:
        """Read these tables again, or all, such as of a record that is being written."""
        for name in names or [name for name, value in vars(RecordReader).items() if isinstance(value, cached_property)]:
            self.__dict__.pop(name, None)

    def _open(self) -> sqlite3.Connection:
        uri = f"file:{str(self.path).replace('%', '%25').replace('?', '%3f').replace('#', '%23')}"
        error: sqlite3.Error | None = None
        for options in ("mode=ro", "mode=ro&immutable=1"):  # the second: where no -shm file can be made
            try:
                connection = sqlite3.connect(f"{uri}?{options}", uri=True, check_same_thread=False)
                connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
                connection.execute("PRAGMA trusted_schema=OFF")
                connection.execute("PRAGMA user_version").fetchone()
            except sqlite3.Error as problem:
                error = problem
            else:
                return connection
        raise RecordError(f"{self.path} can't be read: {error}; it is no record, or its first page is lost") from None

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Read rows up to the first that is damaged."""
        rows: list[tuple[Any, ...]] = []
        try:
            for row in self._connection.execute(query, values):
                rows.append(row)
        except sqlite3.Error as error:
            self._note(f"a part can't be read ({error}); what comes before it can")
        return rows

    def _note(self, what: str) -> None:
        text = f"{self.path}: {what}"
        if text not in self.damage:
            self.damage.append(text)

    def _table(self, kind: type[RowT], rows: Iterable[Sequence[Any] | None]) -> Table[RowT]:
        """Make a table of the rows whose values have the right types."""
        found = [row for row in rows if row is not None]
        fit = [kind(*row) for row in found if fitting(kind, row)]
        if len(fit) < len(found):
            self._note(
                f"{plural(len(found) - len(fit), 'row')} of {kind.__name__.lower()}s with values that no record has"
            )
        return Table(kind, fit)

    def _blocks(self, which: str, unpack: Callable[[bytes], Sequence[StepT]]) -> Iterator[tuple[int, int, StepT]]:
        """Return the loop, the number of the metric, and the value of each step in the blocks that a condition selects."""
        if "block" not in self._tables:
            return
        query = f"SELECT loop, name, until, data FROM block WHERE {which} ORDER BY id"
        for loop, number, until, data in self._rows(query):
            if not (all(isinstance(each, int) for each in (loop, number, until)) and isinstance(data, bytes)):
                self._note("a block has values that no record has")
                continue
            try:
                rows = unpack(data)
            except ValueError as error:
                self._note(f"a part can't be read ({error})")
                continue
            for row in rows:
                if row[0] < until:  # the loop went back, and ran the others again
                    yield loop, number, row

    # -- tables

    @cached_property
    def run(self) -> dict[str, str]:
        """What is known of where it ran: versions, packages, the commit, variables."""
        rows = self._rows("SELECT key, value FROM run")
        return {key: value for key, value in rows if isinstance(key, str) and isinstance(value, str)}

    @cached_property
    def cells(self) -> Table[Cell]:
        """The cells, in the order in which they started."""
        return self._table(Cell, self._rows(f"SELECT {', '.join(Cell._fields)} FROM cell ORDER BY id"))

    @cached_property
    def loops(self) -> Table[Loop]:
        """The live loops, in the order in which they started."""
        cells = dict(self._rows("SELECT request, cell FROM request"))
        rows = self._rows("SELECT id, request, number, mesh, steps, reached, ended FROM loop ORDER BY id")
        last: dict[Any, int] = {}
        if any(ended is None for *_, ended in rows):  # what a loop has reached is written when ranks leave it
            for table in ("metric", "data"):
                for loop, step in self._rows(f"SELECT loop, max(step) FROM {table} GROUP BY loop"):
                    if isinstance(step, int):
                        last[loop] = max(last.get(loop, 0), step + 1)
        return self._table(
            Loop,
            [
                (id, cells.get(request, 0), *rest, reached if ended is not None else max(reached, last.get(id, 0)))
                for id, request, *rest, reached, ended in rows
                if isinstance(reached, int)
            ],
        )

    @cached_property
    def knobs(self) -> Table[Knob]:
        """The values of knobs, with the step from which each holds."""
        rows = self._rows(
            "SELECT loop, step, name, value, is_default FROM knob ORDER BY loop, step, is_default DESC, name"
        )
        return self._table(Knob, map(self._knob, rows))

    def _knob(self, row: tuple[Any, ...]) -> tuple[Any, ...] | None:
        try:
            return (*row[:3], value_of(row[3]), bool(row[4]))
        except Unfit as problem:
            self._note(str(problem))
            return None

    @cached_property
    def metrics(self) -> Table[Metric]:
        """What ranks logged, by loop, name and step."""
        return self._metrics_where("1", "1")

    def metrics_after(self, loop: int, step: int) -> list[Metric]:
        """Return what ranks logged in a loop after a step, by name and step, as it is in the file now."""
        loop, step = int(loop), int(step)
        rows = self._metrics_where(f"loop = {loop} AND until > {step + 1}", f"loop = {loop} AND step > {step}")
        return [row for row in rows if row.step > step]

    def _metrics_where(self, blocks: str, rows: str) -> Table[Metric]:
        names = dict(self._rows("SELECT id, name FROM name"))
        # Rows first: a step that goes into a block between the two queries is read twice, and not missed.
        live = self._rows(f"SELECT loop, name, step, mean, least, most, ranks, size FROM metric WHERE {rows}")
        found = {
            (loop, name, row.step): row
            for loop, name, row in self._blocks(f"name != {BATCHES} AND {blocks}", unpack_metrics)
        }
        for loop, name, *values in live:
            found[loop, name, values[0]] = Summary(*values)  # a rank has reported it later
        metrics = [_metric(loop, names[name], row) for (loop, name, _), row in found.items() if name in names]
        table = self._table(Metric, metrics)
        return Table(Metric, sorted(table, key=lambda row: (row.loop, row.name, row.step)))

    @cached_property
    def events(self) -> Table[Event]:
        """What happened: deaths, heals, interrupts, stops, rollbacks."""
        return self._table(Event, self._rows(f"SELECT {', '.join(Event._fields)} FROM event ORDER BY id"))

    @cached_property
    def checks(self) -> Table[Check]:
        """Digests of parameters and random generators, for each rank."""
        rows = self._rows('SELECT loop, step, kind, digests FROM "check" ORDER BY loop, step, kind')
        return self._table(Check, [(*row[:3], _split(row[3])) for row in rows])

    @cached_property
    def batches(self) -> Table[Check]:
        """Digests of the batches of each step, for each rank."""
        live = {(loop, step): all for loop, step, all in self._rows("SELECT loop, step, digests FROM data")}
        found = {(loop, step): all for loop, _, (step, all) in self._blocks(f"name = {BATCHES}", unpack_digests)} | live
        rows = self._table(Check, [(loop, step, "batch", _split(all)) for (loop, step), all in found.items()])
        return Table(Check, sorted(rows, key=lambda row: (row.loop, row.step)))

    @cached_property
    def sources(self) -> list[tuple[int, str]]:
        """The loop, and a description of each DataLoader that it read."""
        rows = self._rows("SELECT loop, text FROM source ORDER BY loop, text")
        return [(loop, text) for loop, text in rows if isinstance(loop, int) and isinstance(text, str)]

    @cached_property
    def data_files(self) -> Table[DataSource]:
        """The files that data sets have read, as far as their attributes name them."""
        if "data_file" not in self._tables:
            return Table(DataSource, [])
        rows = self._rows(f"SELECT {', '.join(DataSource._fields)} FROM data_file ORDER BY loop, path, changed_at")
        return self._table(DataSource, rows)

    @cached_property
    def files(self) -> dict[str, tuple[str, str | None]]:
        """Path of each module of the user -> the hash and the text of its last version."""
        rows = self._rows("SELECT path, hash, text FROM file")
        return {str(path): (str(hashed), None if text is None else str(text)) for path, hashed, text in rows}

    def states(self, cell: int) -> dict[int, dict[str, bytes]]:
        """Return rank -> library -> the state of its random generator before a cell."""
        found: dict[int, dict[str, bytes]] = {}
        query = "SELECT rank, library, data FROM seed JOIN state USING (digest) WHERE cell = ?"
        for rank, library, data in self._rows(query, cell):
            try:
                found.setdefault(rank, {})[library] = state_of(data)
            except Unfit as problem:
                self._note(str(problem))
        return found

    # -- what follows from them

    @property
    def nbytes(self) -> int:
        """The size on the disk."""
        nbytes = 0
        for path in self.folder.glob(f"{FILE}*"):
            with suppress(FileNotFoundError):  # the log of SQLite, which ends with its writer
                nbytes += path.stat().st_size
        return nbytes

    def cell(self, id: int) -> Cell | None:
        """Return a cell by its id."""
        return next((cell for cell in self.cells if cell.id == id), None)

    def number_of(self, cell: int) -> int:
        """Return the number that the notebook showed for a cell."""
        found = self.cell(cell)
        return cell if found is None else found.number

    def cut_before(self, loop: int) -> int | None:
        """Return the step in which a loop was cut off, by an interrupt or with the record; None if it was not."""
        found = next((each for each in self.loops if each.id == loop), None)
        cell = None if found is None else self.cell(found.cell)
        if found is None or cell is None or cell.outcome not in ("", "interrupted"):
            return None
        return found.reached

    def stopped_before(self, loop: int) -> int | None:
        """Return the step before which a loop was stopped, or cut off; None if it came to its end."""
        steps = [event.step for event in self.events if event.kind == "stop" and event.loop == loop]
        found = [step for step in (*steps, self.cut_before(loop)) if step is not None]
        return min(found, default=None)

    def meshes(self) -> dict[str, int]:
        """Return the meshes that ran cells, and how many ranks each had."""
        found: dict[str, int] = {}
        for cell in self.cells:
            if cell.mesh:
                found[cell.mesh] = max(found.get(cell.mesh, 0), max(ranks_of(cell.ranks), default=-1) + 1)
        return found

    def redact(self, pattern: str) -> int:
        """Remove what matches a regular expression from the record; returns how many texts have changed.

        Raises:
            RecordError: the pattern is not valid, or the record can't be written.
        """
        redaction = Redaction()
        redaction.check(pattern)
        redaction.add(pattern)
        try:
            connection = sqlite3.connect(self.path, isolation_level=None)
            try:
                connection.execute("PRAGMA secure_delete=ON")
                changed = redaction.apply(connection)
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise RecordError(f"{self.path} can't be changed: {error}") from None
        self.reload()
        return changed

    def text(self) -> str:
        """Describe the record: where it ran, its cells, loops, knobs, metrics and events."""
        return "\n".join(map(one_line, self._lines()))

    def _lines(self) -> Iterator[str]:
        run = self.run
        versions = [f"Python {run.get('python', '?')}"]
        versions += [f"torch {run['package:torch']}"] if "package:torch" in run else []
        commit = run.get("git_commit", "")[:12]
        changed = " with changes" if run.get("git_diff") else ""
        yield f"{self.folder}: {', '.join(versions)}{f', commit {commit}{changed}' if commit else ''}"
        if "ended" not in run:
            yield "  the record has no end: it is being written, or its kernel was killed"
        for cell in self.cells:
            where = f"on {cell.mesh}[{cell.ranks}]" if cell.mesh else "in the kernel"
            took = f", {cell.ended - cell.started:.1f} s" if cell.ended is not None else ""
            why = f"; {cell.unreplayable}" if cell.unreplayable else ""
            first = next((line for line in cell.code.splitlines() if line.strip()), "")
            yield f"  cell [{cell.number}] {where}: {cell.outcome or 'no end'}{took}{why}  | {first.strip()[:60]}"
        last: dict[tuple[int, str], Metric] = {(each.loop, each.name): each for each in self.metrics}
        for loop in self.loops:
            steps = "" if loop.steps is None else f" of {loop.steps:,}"
            values = ", ".join(f"{name} {each.mean:.6g}" for (of, name), each in last.items() if of == loop.id)
            head = f"  loop {loop.id} of cell [{self.number_of(loop.cell)}]: {loop.reached:,}{steps} steps"
            yield f"{head}; {values}" if values else head
        for knob in self.knobs:
            if not knob.is_default:
                yield f"  step {knob.step:,} of loop {knob.loop}: {knob.name} = {knob.value!r}"
        for event in self.events:
            rank = "" if event.rank is None else f"[{event.rank}]"
            yield f"  {event.kind} {event.mesh}{rank}: {event.text}".rstrip(": ")
        yield from self.damage


def _metric(loop: Any, name: Any, row: Summary) -> Sequence[Any]:
    value = math.nan if row.mean is None else row.mean
    least, most = (value if each is None else each for each in (row.least, row.most))
    return loop, name, row.step, value, least, most, row.ranks, row.size


def _split(digests: Any) -> tuple[bytes, ...] | None:
    if not isinstance(digests, bytes):
        return None
    return tuple(digests[at : at + _DIGEST] for at in range(0, len(digests), _DIGEST))


def ranks_of(text: str) -> list[int]:
    """Return the ranks of a text such as ``0-2,5``.

    Raises:
        RecordError: the text has something else, or far too many ranks.
    """
    ranks: list[int] = []
    for part in filter(None, text.strip("[]").split(",")):
        first, _, last = part.partition("-")
        try:
            least, most = int(first), int(last or first)
        except ValueError:
            least = most = -1
        if least < 0 or most - least + 1 + len(ranks) > MAX_RANKS:
            raise RecordError(f"the record names ranks of a cell as {text[:40]!r}: it is damaged")
        ranks += range(least, most + 1)
    return ranks
