"""Says how far a ``for`` loop of a cell is, from outside the thread that runs it, and how far those of the last cell have come.

It reads only the global variables of the cell: to read the local variables of a function that runs can change them.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Mapping
from types import FrameType
from typing import Any

__all__ = ["LoopEnds", "loop_turn"]

_MAX_LINES = 5_000
_MAX_VALUE = 10**15
_FOR = re.compile(r"^[ \t]*(?:async )?for ([\w, ()]+?) in ", re.MULTILINE)
_MAX_NAMES = 16


class LoopEnds:
    """The integer variables of the ``for`` loops of a cell, as far as the cell has set them.

    A variable that has the value that it had before the cell is left out: its loop may have made no turn.

    Args:
        code: the code of the cell.
        namespace: the global variables of the cell, before it runs.
    """

    def __init__(self, code: str, namespace: Mapping[str, Any]) -> None:
        names = [name for targets in _FOR.findall(code) for name in re.findall(r"\w+", targets)]
        self._namespace = namespace
        self._before = {name: _integer(namespace, name) for name in names[:_MAX_NAMES]}

    def values(self) -> dict[str, int]:
        """Return the values by name, at this moment."""
        now = {name: _integer(self._namespace, name) for name in self._before}
        return {name: value for name, value in now.items() if value is not None and value != self._before[name]}


def _integer(namespace: Mapping[str, Any], name: str) -> int | None:
    value = namespace.get(name)
    return value if type(value) is int and abs(value) < _MAX_VALUE else None


def loop_turn(frame: FrameType, line: int) -> str:
    """Return the integer variable of the innermost ``for`` loop around a line, ``step = 4``; empty if there is none.

    Args:
        frame: a frame of a cell or a module.
        line: the line that it runs.
    """
    if frame.f_code.co_name != "<module>" or not frame.f_code.co_filename.startswith("<remote cell"):
        return ""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    for name in _loop_variables(tuple(lines), line) if len(lines) <= _MAX_LINES else ():
        if (value := _integer(frame.f_globals, name)) is not None:
            return f"{name} = {value}"
    return ""


@functools.lru_cache(maxsize=16)
def _loop_variables(lines: tuple[str, ...], line: int) -> tuple[str, ...]:
    """Return the variables of the loops whose bodies have a line, those of the innermost loop first."""
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a cell with magics
        return ()
    names: list[str] = []
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.AsyncFor))]
    around = [loop for loop in loops if loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or 0)]
    for loop in sorted(around, key=lambda loop: -loop.lineno):
        names += [node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)]
    return tuple(names)
