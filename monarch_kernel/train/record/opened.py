"""A record that is open for reading: tables, comparison, replay and export."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.archiving import CRATE, crate_of, write_parquet
from monarch_kernel.features.record.differences import Differences, compare
from monarch_kernel.features.record.exporting import notebook_of, script_of, write
from monarch_kernel.features.record.reading import RecordReader
from monarch_kernel.train.record.mirroring import send
from monarch_kernel.train.record.replaying import Replay, replay

__all__ = ["Record", "open"]


class Record(RecordReader):
    """A record that was opened with `open`."""

    def __enter__(self) -> Record:
        return self

    def diff(self, other: str | os.PathLike[str] | RecordReader) -> Differences:
        """Compare this record with another: packages, code by cell, files, knobs, batches, metrics and parameters.

        Raises:
            RecordError: the other one can't be read.
        """
        if isinstance(other, RecordReader):
            return compare(self, other)
        with RecordReader(other) as reader:
            return compare(self, reader)

    def replay(
        self,
        mesh: ProcMesh,
        until_step: int | None = None,
        *,
        changed: Mapping[int, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        say: Callable[[str], None] = print,
    ) -> Replay:
        """Run the recorded cells of a mesh again, in their order, and compare the results.

        Knobs change at their recorded steps, and random generators start each cell with their recorded state. Cells of the
        kernel are left out. Deaths are not repeated: the replay shows whether the recovery has given equal results.

        Args:
            mesh: a whole mesh with as many ranks as the recorded one; its ranks should be new.
            until_step: end each loop before this step.
            changed: number of a cell -> the code to run instead.
            folder: the folder of the record that the replay writes; by default a new one in that of this record.
            say: gets a line for each cell.

        Raises:
            RecordError: the record has no cells for this mesh, the number of ranks differs, or a record runs.
        """
        return replay(self, mesh, until_step, changed or {}, folder, say)

    def script(self, path: str | os.PathLike[str], mesh: str = "") -> Path:
        """Write a program for ``torchrun`` that does what the cells of a mesh did, with the knobs as a schedule.

        Raises:
            RecordError: the record has several meshes and none is named, the mesh ran no cells, or the file can't be written.
        """
        name = mesh or self.only_mesh()
        return write(os.fspath(path), script_of(self, Path(path).name, name))

    def notebook(self, path: str | os.PathLike[str]) -> Path:
        """Write a notebook of what was executed, with its outputs.

        Raises:
            RecordError: the file can't be written.
        """
        return write(os.fspath(path), notebook_of(self))

    def parquet(self, path: str | os.PathLike[str], table: str = "metrics") -> Path:
        """Write a table as Parquet: cells, loops, knobs, metrics, events, batches, checks or data_files.

        Raises:
            RecordError: there is no such table, pyarrow is not installed, or the file can't be written.
        """
        target = Path(path).expanduser()
        write_parquet(self, target, table)
        return target

    def crate(self, license: str = "") -> Path:
        """Describe the folder of the record as an RO-Crate: write ``ro-crate-metadata.json`` into it.

        Args:
            license: the address of a licence, such as ``https://spdx.org/licenses/CC-BY-4.0``.

        Raises:
            RecordError: the file can't be written.
        """
        return write(self.folder / CRATE, crate_of(self, license))

    def send(self, to: str, **options: Any) -> str:
        """Send the metrics and knobs to an experiment tracker, as one run; returns where to look at it.

        Args:
            to: ``wandb``, ``mlflow`` or ``trackio``, which must be installed.
            options: for the tracker: of ``wandb.init`` or ``trackio.init``; or ``tracking_uri`` and ``experiment`` for MLflow.

        Raises:
            RecordError: the tracker is unknown, not installed, or fails.
        """
        return send(self, to, options)

    def only_mesh(self) -> str:
        """Return the name of the mesh that ran the cells.

        Raises:
            RecordError: there are several, or none.
        """
        names = list(self.meshes())
        if len(names) != 1:
            raise RecordError(f"{self.folder}: name one of its meshes: {', '.join(names) or 'no cell ran on one'}")
        return names[0]


def open(folder: str | os.PathLike[str]) -> Record:
    """Open a record, also while it is being written.

    Raises:
        RecordError: there is no record, it is no record, or a newer version has written it.
    """
    return Record(folder)
