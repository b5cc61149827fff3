"""Remembers which line of the program issued each of the last operations.

To look up a line number costs microseconds, and walking up the stack costs more. So the issuing thread keeps only the code
object and the offset of the instruction in it, of the innermost frame of the user's code. Both are decoded when an error needs
them.
"""

from __future__ import annotations

import itertools
import linecache
import re
import sys
import warnings
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user
from monarch_kernel.runtime.diagnostics.source_names import short_file

__all__ = ["MAX_WAITS", "SIZE", "Lines", "Place", "describe_place", "user_place"]

SIZE = 1 << 16
"""Number of operations whose lines are known."""

MAX_WAITS = 100
"""Number of waits of one line for values, after which the program gets a hint."""

_MAX_DEPTH = 60
_MAX_KNOWN = 20_000
_NO_PLACE = (None, 0)

Place = tuple[CodeType | None, int]
"""A code object, and the offset of an instruction in it."""

_is_of_user: dict[int, tuple[bool, CodeType]] = {}  # by the address of the code: to hash a long one takes 0.4 us


def user_place(frame: FrameType | None) -> Place:
    """Find the innermost frame of the user's code, from a frame outward."""
    for _ in range(_MAX_DEPTH):
        if frame is None:
            break
        code = frame.f_code
        known = _is_of_user.get(id(code))
        if known is None:
            known = _learn(code, frame)
        if known[0]:
            return code, frame.f_lasti
        frame = frame.f_back
    return _NO_PLACE


def _learn(code: CodeType, frame: FrameType) -> tuple[bool, CodeType]:
    if len(_is_of_user) >= _MAX_KNOWN:  # cells that run often with new code must not fill the memory
        _is_of_user.clear()
    known = _is_of_user[id(code)] = not is_machinery(code.co_filename) and is_user(frame), code
    return known


class Lines:
    """The lines and the names of the last operations of a session."""

    def __init__(self) -> None:
        self.ring: list[tuple[int, str, CodeType | None, int] | None] = [None] * SIZE
        self._kept: dict[int, tuple[int, str, CodeType | None, int]] = {}
        self._waits: dict[Place, int] = {}

    def keep(self, op: int) -> None:
        """Keep the line of an operation that ranks repeat."""
        known = self._known(op)
        if known is not None:
            self._kept[op] = known

    def _known(self, op: int) -> tuple[int, str, CodeType | None, int] | None:
        known = self.ring[op & (SIZE - 1)] if op >= 0 else None
        return known if known is not None and known[0] == op else self._kept.get(op)

    def note_wait(self, title: str, place: Place) -> None:
        """Count a wait for values, and warn once about a line that waits often."""
        if len(self._waits) >= _MAX_KNOWN:
            self._waits.clear()
        count = self._waits[place] = self._waits.get(place, 0) + 1
        if count == MAX_WAITS:
            warnings.warn(
                f"{title} has waited {count} times for the ranks in {describe_place(place) or 'a line'}\n"
                "  the ranks are idle after each wait: keep such values as distributed tensors, such as a sum of them, and "
                "read them once after the loop, or use fetch_shard(x), which returns a future",
                stacklevel=2,
            )

    def place_of(self, op: int) -> Place | None:
        """Where an operation was issued; None if it is too long ago."""
        known = self._known(op)
        return None if known is None else (known[2], known[3])

    def name_of(self, op: int) -> str:
        """The name of an operation; empty if it is too long ago."""
        known = self._known(op)
        return "" if known is None else known[1]

    def describe(self, op: int) -> str:
        """Say where an operation was issued: ``cell [7], line 1: y = f(x)``; empty if that is not known."""
        known = self._known(op)
        return "" if known is None else describe_place((known[2], known[3]))


@lru_cache(maxsize=4096)
def describe_place(place: Place) -> str:
    """Describe a place in the user's code: ``cell [7], line 1: y = f(x)``; empty if there is none."""
    code, offset = place
    if code is None:
        return ""
    line = _line_of(code, offset)
    source = linecache.getline(code.co_filename, line).strip()
    function = "" if code.co_name == "<module>" else f", in {code.co_name}"
    return f"{_file_name(code.co_filename)}, line {line}{function}" + (f": {source}" if source else "")


def _line_of(code: CodeType, offset: int) -> int:
    if sys.version_info >= (3, 11):
        line, *_ = next(itertools.islice(code.co_positions(), offset // 2, None), (None,))
        return line or code.co_firstlineno
    found = [line for start, end, line in code.co_lines() if start <= offset < end and line]
    return found[0] if found else code.co_firstlineno


def _file_name(file: str) -> str:
    """Name a file as the user knows it: a cell of the notebook by its number."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = (
        shell.compile.format_code_name(file)
        if shell is not None and hasattr(shell.compile, "format_code_name")
        else None
    )
    number = re.fullmatch(r"In ?\[(\d+)\]", named[1]) if named else None
    return f"cell [{number[1]}]" if number else short_file(file)
