"""Runs the cells of a record again on a mesh, and compares what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_kernel.actor.proc_mesh import ProcMesh
from monarch_kernel.base.text import format_seconds, plural
from monarch_kernel.errors import RanksError, RecordError, format_ranks
from monarch_kernel.features.record.controller import RecordControl
from monarch_kernel.features.record.differences import Difference, Differences, compare
from monarch_kernel.features.record.reading import RecordReader, ranks_of
from monarch_kernel.features.record.recorder import Recorder
from monarch_kernel.features.record.tables import FILE, Cell
from monarch_kernel.features.record.worker import restore_generators
from monarch_kernel.net.wire.messages import Change
from monarch_kernel.runtime.rpc.future import Future
from monarch_kernel.train.process_group.worker import GroupStore

__all__ = ["Replay", "replay"]

_POLL_S = 0.1


@dataclass(frozen=True)
class Replay:
    """What a replay has done and found.

    Attributes:
        folder: the folder of the record of the replay.
        differences: how the replay differs from the record.
        ran: the numbers of the cells that ran again.
        left_out: the numbers of the cells that did not.
        seconds: how long it took.
    """

    folder: Path
    differences: Differences
    ran: tuple[int, ...]
    left_out: tuple[int, ...]
    seconds: float

    @property
    def first(self) -> Difference | None:
        """The difference that took effect first; None if there is none."""
        return self.differences.first

    @property
    def are_equal(self) -> bool:
        """Whether all results that were compared are equal."""
        return self.differences.are_equal

    def __str__(self) -> str:
        cells = f"{len(self.ran)} cell{'s' * (len(self.ran) != 1)} ran again in {format_seconds(self.seconds)}"
        out = f"; left out: {', '.join(f'[{number}]' for number in self.left_out)}" if self.left_out else ""
        verdict = "all results that were compared are equal" if self.are_equal else "results differ"
        return f"{cells}{out}: {verdict}\n{self.differences}"

    __repr__ = __str__


def replay(
    record: RecordReader,
    mesh: ProcMesh,
    until_step: int | None,
    changed: Mapping[int, str],
    folder: str | os.PathLike[str] | None,
    say: Callable[[str], None],
) -> Replay:
    """Run the cells of a record again; see `opened.Record.replay`."""
    name = _mesh_of(record, mesh)
    cells = [cell for cell in record.cells if cell.mesh == name]
    control = RecordControl(mesh.runtime)
    if control.recorder is not None:
        raise RecordError(f"a record runs, in {control.recorder.folder}: end it first with %mesh record close")
    if unknown := sorted(set(changed) - {cell.number for cell in cells}):
        raise RecordError(
            f"changed: no cell {unknown[0]} ran on {name}; cells: {', '.join(str(c.number) for c in cells)}"
        )
    if until_step is not None and until_step < 1:
        raise RecordError(f"until_step={until_step}: pass a step of 1 or more")
    began = time.monotonic()
    run = _Run(record, mesh, until_step, say)
    recorder = Recorder(
        _new_folder(record) if folder is None else Path(folder),
        every=_every(record),
        schedule=run.schedule,
    )
    control.start(recorder)
    ran: list[int] = []
    try:
        for cell in cells:
            ran.append(cell.number)
            if not run.cell(cell, changed.get(cell.number, cell.code), recorder, control):
                break
    finally:
        control.stop()
        run.close()
    with RecordReader(recorder.folder) as again:
        found = compare(record, again, until_step=until_step, mesh=name)
    left_out = tuple(cell.number for cell in record.cells if not cell.mesh and cell.unreplayable)
    return Replay(recorder.folder, found, tuple(ran), left_out, time.monotonic() - began)


def _mesh_of(record: RecordReader, mesh: ProcMesh) -> str:
    """Return the name of the recorded mesh that a mesh stands for.

    Raises:
        RecordError: there is none, or the number of ranks differs.
    """
    if not mesh.is_whole:
        raise RecordError(f"{mesh.name} is a slice of a mesh: a replay needs a whole one")
    sizes = record.meshes()
    name = mesh.name if mesh.name in sizes or len(sizes) != 1 else next(iter(sizes))
    if name not in sizes:
        raise RecordError(f"{record.folder}: no cell ran on {name}; meshes: {', '.join(sizes) or 'none'}")
    if len(mesh) < sizes[name]:
        raise RecordError(f"{record.folder}: {name} had {plural(sizes[name], 'rank')}, but {mesh.name} has {len(mesh)}")
    return name


def _every(record: RecordReader) -> int:
    text = record.run.get("every", "")[:9]
    return int(text) if text.isdecimal() else 100


def _new_folder(record: RecordReader) -> Path:
    number = 1
    while (record.folder / "replays" / str(number) / FILE).exists():
        number += 1
    return record.folder / "replays" / str(number)


class _Run:
    """The cells that run again."""

    def __init__(
        self, record: RecordReader, mesh: ProcMesh, until_step: int | None, say: Callable[[str], None]
    ) -> None:
        self._record = record
        self._mesh = mesh
        self._until = until_step
        self._say = say
        self._store = GroupStore()
        self._needs_group = True
        # Read now, because `schedule` must not wait for the disk.
        self._knobs, self._all_loops = list(record.knobs), list(record.loops)
        self._stops = {loop.id: record.stopped_before(loop.id) for loop in self._all_loops}
        self._loops: list[int] = []  # the recorded loops of the cell that runs, which have not started yet

    def close(self) -> None:
        """Form no more process groups."""
        self._store.close()

    def schedule(self, number: int) -> Sequence[Change]:
        """Return the changes of the next loop of the cell. Called with the I/O lock held."""
        changes: list[Change] = []
        if self._loops:
            loop = self._loops.pop(0)
            changes += [
                Change(knob.step, knob.name, knob.value)
                for knob in self._knobs
                if knob.loop == loop and not knob.is_default
            ]
            if (step := self._stops.get(loop)) is not None:
                changes.append(Change(step, ""))
        if self._until is not None:
            changes.append(Change(self._until, ""))
        ends = [change for change in changes if not change.name]
        first_end = [min(ends, key=lambda change: change.step)] if ends else []
        return [*(change for change in changes if change.name), *first_end]

    def cell(self, cell: Cell, code: str, recorder: Recorder, control: RecordControl) -> bool:
        """Run a cell; returns whether the next one can run."""
        mesh = self._mesh
        ranks = ranks_of(cell.ranks) or list(mesh.ranks)
        part = mesh if len(ranks) == len(mesh) else mesh[ranks]
        self._loops = [loop.id for loop in self._all_loops if loop.cell == cell.id]
        if self._needs_group:
            self._await(self._store.form(mesh))
            self._needs_group = False
        states = self._record.states(cell.id)
        if states:
            self._await(part.map(restore_generators, [states.get(rank, {}) for rank in ranks]))
        id = recorder.cell_started(code, cell.number, cell.mesh, cell.ranks)
        control.before_cell(part.procs, id)
        outcome, error = "ok", ""
        future = part.run_cell(code, cell=cell.number, listen=lambda event: _listen(recorder, id, event))
        recorder.cell_sent(id, future.id)
        try:
            self._await(future)
        except RanksError as problem:
            outcome, error = "failed", str(problem)
        except KeyboardInterrupt:
            recorder.cell_ended(id, "interrupted")
            raise
        self._needs_group = not future.in_step
        recorder.cell_ended(id, outcome, error)
        where = "" if len(ranks) == len(mesh) else format_ranks(ranks)
        self._say(f"cell [{cell.number}]{where}: {outcome}")
        return outcome == "ok" or cell.outcome != "ok"

    def _await(self, future: Future[Any]) -> None:
        try:
            while not future.wait(_POLL_S):
                pass
        except KeyboardInterrupt:
            future.interrupt()
            future.wait(2.0)
            raise
        future.get()


def _listen(recorder: Recorder, cell: int, event: Any) -> None:
    text = getattr(event, "text", "")
    if isinstance(text, str) and text:
        recorder.cell_output(cell, text)
