"""Takes the events of a session, and queues them for the writer of a record. No method waits."""

from __future__ import annotations

import ast
import itertools
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from monarch_kernel.base.text import format_nbytes
from monarch_kernel.features.live.loops import LoopRecord
from monarch_kernel.features.record.collecting import Collector, Rows
from monarch_kernel.features.record.environment import describe, git_state
from monarch_kernel.features.record.files import FileBook, hash_of_text, read_module
from monarch_kernel.features.record.messages import EventNoted, Noted, StateNoted
from monarch_kernel.features.record.tables import VERSION
from monarch_kernel.features.record.writer import RecordWriter
from monarch_kernel.net.wire.messages import Change, Logged

__all__ = ["Recorder", "names_of", "unreplayable"]

_HEAD, _TAIL = 64 << 10, 32 << 10
"""Characters of an output that a record holds: those at its beginning, and those at its end."""

_LOOK_S = 2.0
"""How often the kernel looks for modules of the user that are new."""

_DESCRIBE_S = 10.0
"""How long the end of a record waits for what git says."""

_LONGEST_CODE = 4 << 20

_LOOPS = 8
"""The last loops, of which ranks may still report something."""

_ENDED = 32
"""The last cells that have ended, which may still show something."""

_CALLS = {
    "input": "asks for input()",
    "time": "reads the clock",
    "time_ns": "reads the clock",
    "now": "reads the clock",
    "today": "reads the clock",
    "urandom": "uses random numbers of the system",
    "uuid4": "uses random numbers of the system",
}
_MODULES = {
    "requests": "uses the network",
    "urllib": "uses the network",
    "httpx": "uses the network",
    "aiohttp": "uses the network",
    "socket": "uses the network",
    "secrets": "uses random numbers of the system",
}


def names_of(code: str) -> str:
    """Return the names that a cell assigns at its top level; empty if the code can't be read."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    names: dict[str, None] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = None
        for each in (
            ast.walk(node) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For, ast.With)) else ()
        ):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                names[each.id] = None
    return " ".join(names)


def unreplayable(code: str) -> str:
    """Return why a replay of a cell may differ; empty if the code shows no reason."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _CALLS:
                found[_CALLS[name]] = None
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for module in modules:
                if why := _MODULES.get(module.partition(".")[0]):
                    found[why] = None
    return "; ".join(found)


@dataclass
class _Output:
    """The output of a cell that runs: its ends, and a digest of all."""

    head: str = ""
    tail: str = ""
    nbytes: int = 0
    left_out: int = 0
    digest: Any = field(default_factory=lambda: blake2b(digest_size=16))

    def add(self, text: str) -> None:
        data = text.encode("utf-8", "backslashreplace")
        text = data.decode()
        self.digest.update(data)
        self.nbytes += len(data)
        room = _HEAD - len(self.head)
        self.head += text[:room] if room > 0 else ""
        rest = self.tail + (text[room:] if room > 0 else text)
        self.left_out += max(0, len(rest) - _TAIL)
        self.tail = rest[-_TAIL:]

    @property
    def text(self) -> str:
        between = f"\n… {self.left_out:,} characters are not in the record …\n" if self.left_out else ""
        return f"{self.head}{between}{self.tail}"


class Recorder:
    """The record of one run while it is written.

    Args:
        folder: its folder.
        say: tells the user of a problem.
        every: the number of steps between two hashes of the parameters.
        schedule: for a replay, the changes that a loop of a mesh gets when it starts.

    Attributes:
        every: the number of steps between two hashes of the parameters.

    Raises:
        RecordError: the folder holds another record, or can't be written to.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        say: Callable[[str], None] | None = None,
        every: int = 100,
        schedule: Callable[[int], Sequence[Change]] | None = None,
    ) -> None:
        self.every = every
        self._collector = Collector()
        self._writer = RecordWriter(folder, self._collector, say)
        self._schedule = schedule
        self._lock = threading.Lock()
        self._cells = itertools.count(1)
        self._n_cells = 0
        self._marks: dict[int, tuple[int, str]] = {}
        self._outputs: dict[int, _Output] = {}
        self._ended: deque[int] = deque()  # cells that may still show something
        self._loops: dict[tuple[int, int], int] = {}
        self._knobs: set[tuple[int, int, str, bool, str]] = set()
        self._turns = 0
        self._meshes: set[str] = set()
        self._n_metrics: set[tuple[int, str]] = set()
        self._files = FileBook()
        self._look_at = 0.0
        self.started_at = time.time()
        self.put_run({"started": repr(self.started_at), "every": str(every), "schema": str(VERSION)})
        # Not on the thread of the writer: git may take seconds, and what comes first must be committed meanwhile.
        here = str(Path.cwd())
        self._describing = threading.Thread(
            target=self._describe, args=(here,), name="monarch-record-facts", daemon=True
        )
        self._describing.start()

    # -- what is known of it

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self._writer.folder

    @property
    def problem(self) -> str:
        """Why nothing is written any more; empty while all is well."""
        return self._writer.problem

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._writer.is_closed

    @property
    def nbytes(self) -> int:
        """Its size on the disk."""
        return self._writer.nbytes

    def line(self) -> str:
        """Say in one line that it runs, and how large it is."""
        if self.problem:
            return f"record {self.folder}: stopped ({self.problem})"
        return f"record {self.folder}: {format_nbytes(self.nbytes)}"

    def text(self) -> str:
        """Say what has been recorded, and what can't be replayed."""
        with self._lock:
            marks = dict(self._marks)
            counts = [
                (self._n_cells, "cell"),
                (len(set(self._loops.values())), "loop"),
                (self._turns, "change of knobs"),
                (len(self._n_metrics), "metric"),
            ]
        what = ", ".join(f"{count:,} {_plural(name, count)}" for count, name in counts)
        lines = [f"{self.line()}; {what}"]
        by_reason: dict[str, list[int]] = {}
        for number, why in marks.values():
            by_reason.setdefault(why, []).append(number)
        lines += [
            f"  a replay may differ, or leaves it out: cell{'s' * (len(numbers) > 1)} "
            f"{', '.join(f'[{number}]' for number in numbers[:8])}{' …' * (len(numbers) > 8)}: {why}"
            for why, numbers in by_reason.items()
        ]
        return "\n".join(lines)

    def flush(self) -> bool:
        """Wait until all that has come is committed; returns whether it is."""
        return self._writer.flush()

    def redact(self, pattern: str) -> None:
        """Remove what matches a regular expression, now and from now on.

        Raises:
            RecordError: the pattern is not valid.
        """
        self._writer.redact(pattern)

    def close(self) -> None:
        """End the record."""
        self._describing.join(_DESCRIBE_S)
        self._look_at = 0.0
        self._writer.put(lambda: _file_rows(self._new_files()))
        self.put_run({"ended": repr(time.time())})
        self._writer.close()

    # -- the run

    def put_run(self, values: Mapping[str, str]) -> None:
        """Write facts of the run."""
        values = dict(values)
        self._writer.put(lambda: _run_rows(values))

    def _describe(self, folder: str) -> None:
        self.put_run({**describe(), "folder": folder})
        self.put_run(git_state(folder))

    def mesh_used(self, name: str, describe: Callable[[], str]) -> None:
        """A mesh runs a cell; its description is asked for once."""
        with self._lock:
            if name in self._meshes:
                return
            self._meshes.add(name)
        self.put_run({f"mesh:{name}": describe()})

    def event(
        self,
        kind: str,
        text: str = "",
        *,
        mesh: str = "",
        rank: int | None = None,
        loop: int | None = None,
        step: int | None = None,
    ) -> None:
        """Something happened."""
        row = time.time(), kind, mesh, rank, loop, step, _utf8(text)
        self._writer.put(lambda: [("INSERT INTO event VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", row)])

    # -- cells

    def cell_started(self, code: str, number: int, mesh: str = "", ranks: str = "", why: str = "") -> int:
        """A cell starts; returns its id.

        Args:
            code: its code.
            number: its number in the notebook.
            mesh: the mesh that runs it; empty for the kernel.
            ranks: the ranks.
            why: why it can't be replayed; empty to look into the code.
        """
        code = _utf8(code)[:_LONGEST_CODE]
        with self._lock:
            cell = next(self._cells)
            self._n_cells += 1
            self._outputs[cell] = _Output()
            why = why or (unreplayable(code) if mesh else "")
            if why:
                self._marks[cell] = number, why
        at = time.time()
        values = cell, number, mesh, ranks, code, hash_of_text(code), at, names_of(code), why
        self._writer.put(
            lambda: [
                (
                    "INSERT INTO cell VALUES (?, ?, ?, ?, ?, ?, ?, NULL, '', '', '', '', 0, ?, ?)",
                    values,
                )
            ]
        )
        return cell

    def cell_sent(self, cell: int, request: int) -> None:
        """A cell was sent to ranks as a request; a cell that recovers has several."""
        self._writer.put(lambda: [("INSERT OR REPLACE INTO request VALUES (?, ?)", (request, cell))])

    def cell_output(self, cell: int, text: str) -> None:
        """A cell shows text."""
        with self._lock:
            output = self._outputs.get(cell)
            if output is None:
                return
            output.add(text)
            is_late = cell in self._ended
        if is_late:  # such as the values that a cell shows at its end
            self._put_output(cell, output)

    def cell_ended(self, cell: int, outcome: str, error: str = "") -> None:
        """A cell has ended: ``ok``, ``failed`` or ``interrupted``."""
        with self._lock:
            output = self._outputs.setdefault(cell, _Output())
            self._ended.append(cell)
            while len(self._ended) > _ENDED:
                self._outputs.pop(self._ended.popleft(), None)
        values = time.time(), outcome, _utf8(error)[:_HEAD], cell
        self._writer.put(
            lambda: [
                ("UPDATE cell SET ended = ?, outcome = ?, error = ? WHERE id = ?", values),
                *_file_rows(self._new_files()),
            ]
        )
        self._put_output(cell, output)

    def _new_files(self) -> Mapping[str, str]:
        """Modules that are new; looks at most every `_LOOK_S`, as many cells may end in a moment. For the writer's thread."""
        now = time.monotonic()
        if now < self._look_at:
            return {}
        self._look_at = now + _LOOK_S
        return self._files.news()

    def _put_output(self, cell: int, output: _Output) -> None:
        with self._lock:
            values = output.text, output.digest.hexdigest(), output.nbytes, cell
        statement = "UPDATE cell SET output = ?, output_hash = ?, output_nbytes = ? WHERE id = ?"
        self._writer.put(lambda: [(statement, values)])

    # -- loops; called with the I/O lock held

    def loop_started(self, loop: LoopRecord) -> None:
        """A loop starts; in a replay it gets the changes of the recorded one."""
        key, at = loop.key, time.time()
        before = self._loops.get(loop.follows) if loop.follows is not None else None
        if before is not None:
            self._loops[key] = before
            self._writer.put(partial(self._collector.back, before, loop.first))
            text = f"the loop goes on at step {loop.first:,}"
            self.event("recovery", text, mesh=loop.mesh, loop=before, step=loop.first)
            return
        with self._lock:
            number = self._loops[key] = len(set(self._loops.values())) + 1
        values = number, loop.request, loop.number, loop.mesh, loop.steps, 0, at
        collector, long_over = self._collector, number - _LOOPS
        self._writer.put(lambda: collector.forget(long_over))
        self._writer.put(lambda: [("INSERT INTO loop VALUES (?, ?, ?, ?, ?, ?, ?, NULL)", values)])
        if loop.first:
            self.event(
                "rollback", f"the loop starts at step {loop.first:,}", mesh=loop.mesh, loop=number, step=loop.first
            )
        if self._schedule is not None:
            loop.pace.changes = [*loop.pace.changes, *self._schedule(number)]

    def loop_reported(self, loop: LoopRecord, rank: int, logged: Mapping[str, tuple[Logged, ...]]) -> None:
        """A rank has reported what it logged."""
        number = self._loops.get(loop.key)
        if number is None:
            return
        self._note_knobs(number, loop)
        if logged:
            with self._lock:
                self._n_metrics.update((number, name) for name in logged)
            collector = self._collector
            self._writer.put(lambda: collector.logged(number, rank, logged))

    def loop_left(self, loop: LoopRecord) -> None:
        """A rank has left the loop."""
        number = self._loops.get(loop.key)
        if number is None:
            return
        self._note_knobs(number, loop)
        reached = loop.pace.progress
        ended = time.time() if loop.pace.is_over else None
        self._writer.put(
            lambda: [("UPDATE loop SET reached = max(reached, ?), ended = ? WHERE id = ?", (reached, ended, number))]
        )

    def _note_knobs(self, number: int, loop: LoopRecord) -> None:
        """Write the knobs and the changes of a loop that are new."""
        rows: list[tuple[int, int, str, str, bool]] = []
        for knob in list(loop.knobs.values()):
            rows.append((number, 0, knob.name, json.dumps(knob.value), True))
        for change in loop.pace.changes:
            if not change.name:
                rows.append((number, change.step, "", "null", False))
            elif not change.name.startswith("\0"):
                rows.append((number, change.step, change.name, json.dumps(change.value), False))
        for row in rows:
            key = row[0], row[1], row[2], row[4], row[3]
            if key in self._knobs:
                continue
            self._knobs.add(key)
            if not row[2]:
                self.event("stop", f"the loop ends before step {row[1]:,}", mesh=loop.mesh, loop=number, step=row[1])
                continue
            if not row[4]:
                self._turns += 1
            elif any(each[0] == number and each[2] == row[2] and each[3] and each != key for each in self._knobs):
                continue  # ranks with different defaults keep them
            self._writer.put(partial(_knob_rows, row))

    # -- notes of ranks; called with the I/O lock held

    def noted(self, rank: int, note: Noted) -> None:
        """A rank has sent digests of steps."""
        number = self._loops.get((note.request, note.number))
        if number is None:
            return
        collector = self._collector

        def rows() -> Rows:
            collector.noted(number, rank, [(each.step, each.digests) for each in note.steps])
            sources = [("INSERT OR IGNORE INTO source VALUES (?, ?)", (number, _utf8(text))) for text in note.sources]
            read = [
                ("INSERT OR REPLACE INTO data_file VALUES (?, ?, ?, ?, ?)", (number, _utf8(path), *rest))
                for path, *rest in note.data_files
            ]
            return [*sources, *read, *_file_rows(dict(note.files))]

        self._writer.put(rows)

    def event_noted(self, mesh: str, rank: int, note: EventNoted) -> None:
        """A rank has sent an event."""
        loop = self._loops.get((note.request, note.number))
        self.event(note.kind, note.text, mesh=mesh, rank=rank, loop=loop, step=None if note.step < 0 else note.step)

    def state_noted(self, rank: int, note: StateNoted) -> None:
        """A rank has sent the state of its random generators before a cell."""

        def rows() -> Rows:
            yield from (
                ("INSERT OR IGNORE INTO state VALUES (?, ?)", (note.digests[library], zlib.compress(state, 6)))
                for library, state in note.states.items()
                if state
            )
            yield from (
                ("INSERT OR REPLACE INTO seed VALUES (?, ?, ?, ?)", (note.cell, rank, library, digest))
                for library, digest in note.digests.items()
            )
            yield from _file_rows(note.files)

        self._writer.put(rows)


def _knob_rows(row: Sequence[Any]) -> Rows:
    return [("INSERT OR REPLACE INTO knob VALUES (?, ?, ?, ?, ?)", row)]


def _run_rows(values: Mapping[str, str]) -> Rows:
    return [("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, _utf8(value))) for key, value in values.items()]


def _file_rows(files: Mapping[str, str]) -> Rows:
    """The rows of modules; with their text, where the file here has the hash that a process has seen."""
    for path, hashed in files.items():
        data = read_module(path)
        text = data.decode("utf-8", "backslashreplace") if hash_of_text(data) == hashed else None
        yield "INSERT OR REPLACE INTO file VALUES (?, ?, ?)", (_utf8(path), hashed, text)


def _utf8(text: str) -> str:
    """Replace lone surrogates, which UTF-8 and SQLite can't hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plural(name: str, count: int) -> str:
    if count == 1:
        return name
    return "changes of knobs" if name.startswith("change") else f"{name}s"
