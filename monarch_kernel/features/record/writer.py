"""Writes a record, in a thread that nothing else waits for."""

from __future__ import annotations

import math
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.collecting import Rows
from monarch_kernel.features.record.redaction import Redaction
from monarch_kernel.features.record.tables import FILE, SCHEMA, VERSION

__all__ = ["RecordWriter", "Task", "new_folder"]

COMMIT_S = 0.5
"""How often the writer commits what has come."""

_CLOSE_S = 30.0

Task = Callable[[], Rows]
"""Gives the rows to write. It runs on the thread of the writer."""


class Collecting(Protocol):
    """Collects rows that are due with the next commit."""

    def due(self) -> Rows:
        """Return the rows that have changed since the last call."""
        ...


def new_folder(folder: str | os.PathLike[str]) -> Path:
    """Make the folder of a new record.

    Raises:
        RecordError: the folder holds another record, or can't be written to.
    """
    try:
        path = Path(folder).expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise RecordError(f"can't make the folder {folder} for a record: {error}") from None
    if (path / FILE).exists():
        raise RecordError(f"{path} holds the record of another run; choose another folder, or remove {path / FILE}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise RecordError(f"no permission to write into {path}")
    return path


class RecordWriter:
    """The file of one record.

    Args:
        folder: where the file is made.
        collector: has rows that are written with each commit.
        say: tells the user of a problem.

    Attributes:
        path: the file.
        problem: why nothing is written any more; empty while all is well.
        nbytes: the size on the disk at the last commit.

    Raises:
        RecordError: the folder holds another record, or can't be written to.
    """

    def __init__(
        self, folder: str | os.PathLike[str], collector: Collecting, say: Callable[[str], None] | None = None
    ) -> None:
        self.folder = new_folder(folder)
        self.path = self.folder / FILE
        self.problem = ""
        self.nbytes = 0
        self._say = say or _say
        self._collector = collector
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._redaction = Redaction()
        self._is_closed = False
        try:
            self._connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA secure_delete=ON")  # what is redacted leaves no trace in free pages
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute("PRAGMA journal_size_limit=1048576")
            self._connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={VERSION}; COMMIT;")
            self._identity = _identity_of(self.path)
        except sqlite3.Error as error:
            raise RecordError(f"can't write a record into {self.folder}: {error}") from None
        self._thread = threading.Thread(target=self._work, name="monarch-record", daemon=True)
        self._thread.start()

    def put(self, task: Task) -> None:
        """Queue rows; does not wait. After `close` it has no effect."""
        if not self._is_closed:
            self._tasks.put(task)

    @property
    def is_closed(self) -> bool:
        """Whether the record has ended."""
        return self._is_closed

    def flush(self, timeout_s: float = _CLOSE_S) -> bool:
        """Wait until all that was put is committed; returns whether it is."""
        done = threading.Event()

        def mark() -> Rows:
            done.set()
            return ()

        self._tasks.put(lambda: self._commit_all())
        self._tasks.put(mark)
        return done.wait(timeout_s) and not self.problem

    def redact(self, pattern: str) -> None:
        """Replace what matches a regular expression, in what was written and in what is written from now on.

        Raises:
            RecordError: the pattern is not valid.
        """
        self._redaction.check(pattern)

        def redact() -> Rows:
            self._commit_all()
            self._redaction.add(pattern)
            self._redaction.apply(self._connection)
            return ()

        self.put(redact)

    def close(self) -> None:
        """Write all that was put, and close the file."""
        if not self._is_closed:
            self._is_closed = True
            self._tasks.put(None)
            self._thread.join(_CLOSE_S)

    # -- on the writer's thread

    def _work(self) -> None:
        commit_at, is_over = math.inf, False
        while not is_over:
            try:
                task = self._tasks.get(timeout=max(0.0, min(commit_at - time.monotonic(), 3600.0)))
            except Empty:
                task = self._commit_all
                commit_at = math.inf
            else:
                if task is None:
                    is_over, task = True, self._commit_all
                elif commit_at == math.inf:
                    commit_at = time.monotonic() + COMMIT_S
                if time.monotonic() >= commit_at:  # many tasks come
                    self._try(self._commit_all)
                    commit_at = time.monotonic() + COMMIT_S
            self._try(task)
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.close()
        except sqlite3.Error:
            pass
        self._measure()

    def _try(self, task: Task) -> None:
        try:
            for statement, values in task():
                if self.problem:
                    continue
                if not self._connection.in_transaction:
                    self._connection.execute("BEGIN")
                self._connection.execute(statement, self._redaction.clean(values))
        except (sqlite3.Error, OSError) as error:
            self._fail(str(error))
        except Exception as error:  # a defect of the record must not disturb the run
            self._fail(f"{type(error).__name__}: {error}")

    def _commit_all(self) -> Rows:
        if self.problem:
            list(self._collector.due())  # it keeps nothing
            return ()
        for statement, values in self._collector.due():
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN")
            self._connection.execute(statement, values)
        if self._connection.in_transaction:
            self._connection.execute("COMMIT")
        if _identity_of(self.path) != self._identity:  # SQLite goes on to write into the file that has no name any more
            self._fail(f"{FILE} was removed or moved", "")
        self._measure()
        return ()

    def _measure(self) -> None:
        total = 0
        for suffix in ("", "-wal"):
            try:
                total += os.stat(f"{self.path}{suffix}").st_size
            except OSError:
                pass
        self.nbytes = total

    def _fail(self, why: str, what_is_left: str = "What was written can be read; make room and ") -> None:
        if self.problem:
            return
        self.problem = why
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass
        self._say(
            f"the record {self.folder} ends here: {why}. The run goes on. {what_is_left}"
            f"{'s' if what_is_left else 'S'}tart another record with %mesh record FOLDER"
        )


def _identity_of(path: Path) -> tuple[int, int] | None:
    """Device and number of a file; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
