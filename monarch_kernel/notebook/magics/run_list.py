"""The records of runs that the panel lists and compares."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.features.record.summaries import comparison_of, summary_of
from monarch_kernel.features.record.tables import FILE
from monarch_kernel.notebook.syntax.lines import UsageProblem
from monarch_kernel.train.record import running

__all__ = ["RunList"]

_MOST = 50
"""Runs in the list: those that were written last."""

_DEFAULT = "runs"
"""A folder beside the notebook in which runs are looked for."""


class RunList:
    """The runs that this kernel has recorded, those in the same folders, and those in ``runs``. For any thread."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Any, dict[str, Any]]] = {}  # folder -> state of its file, summary
        self._lock = threading.Lock()

    def message(self) -> dict[str, Any]:
        """Return the message with all runs, the newest first."""
        with self._lock:
            runs = [self._run(folder, is_running) for folder, is_running in self._folders()]
        return {"kind": "runs", "runs": sorted(runs, key=lambda run: -(run.get("started") or 0.0))}

    def comparison(self, names: object) -> dict[str, Any]:
        """Return the message that compares two runs of the list.

        Raises:
            RecordError: a record can't be read.
            UsageProblem: these are not two runs of the list.
        """
        folders = {_name(folder): folder for folder, _ in self._folders()}
        if not (
            isinstance(names, list) and len(names) == 2 and all(isinstance(n, str) and n in folders for n in names)
        ):
            raise UsageProblem("choose two runs of the list to compare")
        with RecordReader(folders[names[0]]) as old, RecordReader(folders[names[1]]) as new:
            return {"kind": "compared", "runs": names, **comparison_of(old, new)}

    def _folders(self) -> list[tuple[Path, bool]]:
        """Return the folders of runs, those that were written last first, and whether each is being written."""
        ours = running.folders()
        looked_in = dict.fromkeys([*(folder.parent for folder in ours), Path.cwd() / _DEFAULT])
        found: dict[Path, bool] = dict(ours)
        for parent in looked_in:
            for folder in _records_in(parent):
                found.setdefault(folder, False)
        files = [(folder, is_running, _stamp(folder)) for folder, is_running in found.items()]
        newest = sorted((each for each in files if each[2] is not None), key=lambda each: each[2] or (), reverse=True)
        return [(folder, is_running) for folder, is_running, _ in newest[:_MOST]]

    def _run(self, folder: Path, is_running: bool) -> dict[str, Any]:
        stamp = _stamp(folder), is_running
        known = self._known.get(folder)
        if known is None or known[0] != stamp:
            try:
                with RecordReader(folder) as reader:
                    summary = summary_of(reader, is_running=is_running)
            except RecordError as error:
                summary = {"outcome": "unreadable", "problem": str(error)}
            known = self._known[folder] = stamp, summary
        return {"name": _name(folder), **known[1]}


def _records_in(parent: Path) -> Iterator[Path]:
    """Find the records in a folder, and those of their replays."""
    for pattern in (f"*/{FILE}", f"*/replays/*/{FILE}"):
        try:
            yield from (path.parent for path in parent.glob(pattern))
        except OSError:
            continue


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Return when a record was written last, and its size; None if it is gone."""
    at, size = 0, 0
    for suffix in ("", "-wal"):
        try:
            status = os.stat(f"{folder / FILE}{suffix}")
        except OSError:
            if not suffix:
                return None
            continue
        at, size = max(at, status.st_mtime_ns), size + status.st_size
    return at, size


def _name(folder: Path) -> str:
    """The path of a folder, from the current one if it is in it."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
