"""Writes what a record has executed as a script for torchrun, or as a notebook."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
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

_AWAIT = '''

def _await(code, name):
    """Run a cell that awaits outside of its functions."""
    import ast, asyncio, inspect

    found = eval(compile(code, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), globals())
    if inspect.iscoroutine(found):
        asyncio.run(found)
'''

_MAGIC = re.compile(r"^(\s*)(%{1,2}[A-Za-z_]\w*|!)\s*(.*)$")

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
    stops = {ids.index(loop) + 1: step for loop in ids if (step := record.stopped_before(loop)) is not None}
    head = _HEAD.format(
        name=_in_docstring(record.folder.name),
        mesh=_in_docstring(mesh),
        n=record.meshes()[mesh],
        file=_in_docstring(file),
        knobs=repr(knobs),
        stops=repr(stops),
    )
    code = list(_code(cells, record.meshes()[mesh]))
    uses_await = any("_await(" in each for each in code)
    return "".join([head, _LOOP if ids else "", _AWAIT if uses_await else "", *code, _TAIL])


def _in_docstring(text: str) -> str:
    return one_line(text).replace("\\", "\\\\").replace('"', '\\"')


def _code(cells: list[Cell], n_ranks: int) -> Iterator[str]:
    everywhere = "0" if n_ranks == 1 else f"0-{n_ranks - 1}"
    for cell in cells:
        head = f"\n# -- cell [{cell.number}]"
        if cell.outcome == "failed":
            head += ", which failed"
        elif cell.outcome == "interrupted":
            head += ", which was interrupted"
        code, tree = _without_magics(cell.code.strip("\n"))
        if tree is None:
            why = "it is no program of Python, or has magics that a program can't run"
            yield f"{head}: {why}\n" + "".join(f"# {line}\n" for line in code.splitlines())
            continue
        if code != cell.code.strip("\n"):
            head += ", without its magics"
        is_everywhere = cell.ranks.strip("[]") in (everywhere, "")
        is_plain = not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
        if is_everywhere and is_plain and cell.outcome != "failed" and not _awaits(tree):
            yield f"{head}\n{code}\n"
            continue
        run = f"exec(compile({code!r}, 'cell [{cell.number}]', 'exec'))"
        if _awaits(tree):
            run = f"_await({code!r}, 'cell [{cell.number}]')"
        if cell.outcome == "failed":
            run = (
                f"try:\n    {run}\nexcept Exception as _error:\n    print(f'cell [{cell.number}] failed: {{_error!r}}')"
            )
        if not is_everywhere:
            head += f", on ranks {one_line(cell.ranks)}"
            run = f"if rank in {tuple(ranks_of(cell.ranks))}:\n{textwrap.indent(run, '    ')}"
        yield f"{head}\n{run}\n"


def _tree(code: str) -> ast.Module | None:
    try:
        return compile(code, "", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)  # type: ignore[no-any-return]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _without_magics(code: str) -> tuple[str, ast.Module | None]:
    """Return a cell with ``pass`` in place of its magics, and its tree; None if it still is no program of Python."""
    if (tree := _tree(code)) is not None:
        return code, tree
    lines = [_MAGIC.sub(_in_place_of, line) for line in code.splitlines()]
    changed = "\n".join(lines)
    return (changed, tree) if (tree := _tree(changed)) is not None else (code, None)


def _in_place_of(magic: re.Match[str]) -> str:
    """What stands in place of a magic: the statement that ``%time`` measures, or nothing."""
    indent, name, rest = magic.groups()
    if name == "%time" and rest:
        return f"{indent}{rest}"
    return f"{indent}pass  # {one_line(magic.group().strip())}"


def _awaits(tree: ast.Module) -> bool:
    """Whether a cell awaits outside of its functions."""
    return bool(
        compile(tree, "", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True).co_flags & inspect.CO_COROUTINE
    )


def notebook_of(record: RecordReader) -> str:
    """Return a notebook of what was executed, in its order, with its outputs, as JSON."""
    cells = []
    # A cell of the notebook that runs on ranks is in the record twice: as it was typed, and as the ranks ran it.
    remote: dict[int, list[Cell]] = {}
    for cell in record.cells:
        if cell.mesh:
            remote.setdefault(cell.number, []).append(cell)
    typed = {cell.number for cell in record.cells if not cell.mesh}
    for at, cell in enumerate(record.cells):
        if cell.mesh and cell.number in typed:
            continue
        source = cell.code if not cell.mesh else f"%%remote {cell.mesh}\n{cell.code.lstrip()}"
        shown = [cell] if cell.mesh else remote.get(cell.number, [cell])
        outputs: list[dict[str, Any]] = [
            {"output_type": "stream", "name": "stdout", "text": each.output.splitlines(keepends=True)}
            for each in shown
            if each.output
        ]
        if failed := next((each for each in (*shown, cell) if each.error), None):
            outputs.append(
                {
                    "output_type": "error",
                    "ename": failed.outcome,
                    "evalue": failed.error.splitlines()[0],
                    "traceback": failed.error.splitlines(),
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
