"""Tests how far a loop of a cell is, as seen from another thread."""

from __future__ import annotations

import linecache
import sys
from typing import Any

import pytest

from monarch_kernel.runtime.diagnostics.loop_positions import LoopEnds, loop_turn

FLAT = "for step in range(9):\n    x = 1\n    if step == 4:\n        look()\n"
PAIRS = "for i, (name, x) in enumerate([('a', 1), ('b', 2)]):\n    if i: look()\n"
NESTED = "for epoch in range(3):\n    for batch in [[1], [2]]:\n        if epoch == 2: look()\n"
AFTER = "for step in range(9): pass\nlook()\n"
OTHERWISE = "for step in range(9): pass\nelse:\n    look()\n"
WITHIN = "def f():\n    for step in range(9): look()\nf()\n"
WHILE = "n = 0\nwhile n < 3:\n    n += 1\n    look()\n"


@pytest.mark.parametrize(
    ("code", "turn"),
    [
        (FLAT, "step = 4"),
        (PAIRS, "i = 1"),
        (NESTED, "epoch = 2"),
        (AFTER, ""),
        (OTHERWISE, ""),
        (WITHIN, ""),
        (WHILE, ""),
        ("for x in [0.5]: look()", ""),
        ("for step in [10**20]: look()", ""),
        ("for step in [True]: look()", ""),
    ],
)
@pytest.mark.parametrize("file", ["<remote cell [7]>", "<string>"])
def test_the_variable_of_the_innermost_loop_around_a_line(code: str, turn: str, file: str) -> None:
    seen: list[str] = []

    def look() -> None:
        frame = sys._getframe(1)
        seen.append(loop_turn(frame, frame.f_lineno))

    lines = code.splitlines(keepends=True)
    linecache.cache[file] = (len(code), None, lines, file)
    namespace: dict[str, Any] = {"look": look}
    try:
        exec(compile(code, file, "exec"), namespace)
    finally:
        del linecache.cache[file]
    assert seen[-1] == (turn if file.startswith("<remote") else "")


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        (FLAT, {"step": 8}),
        (PAIRS, {"i": 1, "x": 2}),
        (NESTED, {"epoch": 2}),
        (WITHIN, {}),
        (WHILE, {}),
        ("for kept in range(4): pass", {}),
        ("for step in range(0): pass", {}),
    ],
)
def test_what_the_loops_of_a_cell_have_set_is_known_after_it(code: str, ends: dict[str, int]) -> None:
    namespace: dict[str, Any] = {"kept": 3, "look": lambda: None}
    watched = LoopEnds(code, namespace)
    exec(code, namespace)
    assert watched.values() == ends
