"""Writes what a record has executed as a script for torchrun, or as a notebook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monarch_kernel.base.text import one_line
from monarch_kernel.errors import RecordError
from monarch_kernel.features.record.reading import RecordReader, ranks_of
from monarch_kernel.features.record.tables import Cell

__all__ = ["notebook_of", "script_of", "write"]

_HEAD = '''"""{name}: what ran on the ranks of mesh {mesh}, as one program.

Run it with: torchrun --nproc-per-node {n} {file}
"""

import os

import torch
import torch.distributed as dist

from monarch_kernel import live

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
local_rank = int(os.environ.get("LOCAL_RANK", 0))
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = dist.device_mesh.init_device_mesh(device.type, (world_size,))

# Number of the loop -> name of the knob -> the step from which it has a value.
KNOBS = {knobs}
# Number of the loop -> the step before which it was stopped.
STOPS = {stops}
'''

_LOOP = '''
_count = live.loop


class _Loops:
    """Counts the steps of each live loop, and gives knobs the values that they had."""

    number, step = 0, -1

    def loop(self, steps=None, **options):
        self.number, number = self.number + 1, self.number + 1
        for step in _count(steps):
            if step >= STOPS.get(number, float("inf")):
                break
            self.step = step
            yield step

    def knob(self, name, value, low=None, high=None):
        for step, turned in sorted(KNOBS.get(self.number, {}).get(name, {}).items()):
            if step <= self.step:
                value = turned
        return value


_loops = _Loops()
live.loop, live.knob = _loops.loop, _loops.knob
'''

_TAIL = """
dist.destroy_process_group()
"""


def script_of(record: RecordReader, file: str, mesh: str) -> str:
    """Return a program for ``torchrun`` that does what the cells of a mesh did, with the knobs as a schedule.

    Args:
        record: the record.
        file: the name of the program, for its help.
        mesh: the mesh.

    Raises:
        RecordError: the mesh ran no cells.
    """
    cells = [cell for cell in record.cells if cell.mesh == mesh]
    if not cells:
        raise RecordError(f"{record.folder}: no cell ran on {mesh!r}; meshes: {', '.join(record.meshes()) or 'none'}")
    ids = [loop.id for loop in record.loops if loop.mesh == mesh]
    knobs: dict[int, dict[str, dict[int, Any]]] = {}
    for knob in record.knobs:
        if not knob.is_default and knob.loop in ids:
            knobs.setdefault(ids.index(knob.loop) + 1, {}).setdefault(knob.name, {})[knob.step] = knob.value
    stops = {
        ids.index(event.loop) + 1: event.step for event in record.events if event.kind == "stop" and event.loop in ids
    }
    head = _HEAD.format(
        name=_in_docstring(record.folder.name),
        mesh=_in_docstring(mesh),
        n=record.meshes()[mesh],
        file=_in_docstring(file),
        knobs=repr(knobs),
        stops=repr(stops),
    )
    return "".join([head, _LOOP if ids else "", *_code(cells, record.meshes()[mesh]), _TAIL])


def _in_docstring(text: str) -> str:
    return one_line(text).replace("\\", "\\\\").replace('"', '\\"')


def _code(cells: list[Cell], n_ranks: int) -> Iterator[str]:
    everywhere = "0" if n_ranks == 1 else f"0-{n_ranks - 1}"
    for cell in cells:
        head = f"\n# -- cell [{cell.number}]"
        if cell.outcome not in ("", "ok"):
            head += f", which {'failed' if cell.outcome == 'failed' else 'was interrupted'}"
        lines = cell.code.strip("\n").splitlines()
        magic = any(line.lstrip().startswith(("%", "!")) for line in lines)
        if magic:
            yield f"{head}: it has magics, which a program can't run\n" + "".join(f"# {line}\n" for line in lines)
        elif cell.ranks.strip("[]") in (everywhere, ""):
            yield f"{head}\n" + "".join(f"{line}\n" for line in lines)
        else:
            yield f"{head}, on ranks {one_line(cell.ranks)}\nif rank in {tuple(ranks_of(cell.ranks))}:\n" + (
                f"    exec(compile({cell.code!r}, 'cell [{cell.number}]', 'exec'))\n"
            )


def notebook_of(record: RecordReader) -> str:
    """Return a notebook of what was executed, in its order, with its outputs, as JSON."""
    cells = []
    # A cell of the notebook that runs on ranks is in the record twice: as it was typed, and as the ranks ran it.
    remote = {cell.number: cell for cell in record.cells if cell.mesh}
    typed = {cell.number for cell in record.cells if not cell.mesh}
    for at, cell in enumerate(record.cells):
        if cell.mesh and cell.number in typed:
            continue
        source = cell.code if not cell.mesh else f"%%remote {cell.mesh}\n{cell.code.lstrip()}"
        shown = remote.get(cell.number, cell)
        outputs: list[dict[str, Any]] = []
        if shown.output:
            outputs.append({"output_type": "stream", "name": "stdout", "text": shown.output.splitlines(keepends=True)})
        if shown.error or cell.error:
            text = shown.error or cell.error
            outputs.append(
                {
                    "output_type": "error",
                    "ename": shown.outcome,
                    "evalue": text.splitlines()[0],
                    "traceback": text.splitlines(),
                }
            )
        cells.append(
            {
                "cell_type": "code",
                "id": f"cell-{at}",
                "execution_count": cell.number,
                "metadata": {},
                "outputs": outputs,
                "source": source.splitlines(keepends=True),
            }
        )
    kernel = {"display_name": "Monarch", "language": "python", "name": "monarch"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return f"{json.dumps(book, indent=1, ensure_ascii=False)}\n"


def write(path: str | Path, text: str) -> Path:
    """Write a file, and return its path.

    Raises:
        RecordError: it can't be written.
    """
    target = Path(path).expanduser()
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecordError(f"can't write {target}: {error}") from None
    return target
