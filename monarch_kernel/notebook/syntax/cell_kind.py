"""Determines from the text of a cell whether it runs on ranks or in the kernel, without running code or looking up meshes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from monarch_kernel.notebook.syntax.lines import UsageProblem, tokens
from monarch_kernel.notebook.syntax.options import parse_remote, split_options
from monarch_kernel.notebook.syntax.selector import root_name

__all__ = ["CellForm", "code_at", "read_cell"]

# Cells that work on meshes or may end the mode run in the kernel even while %autoremote is on.
_OURS = re.compile(
    r"%{1,2}(?:autoremote|mesh|remote|local|px|autopx|ranks?)(?![\w.])"
    r"|%(?:tb|xmode)(?![\w.])"  # the kernel shows errors of ranks
    r"|autoremote[ \t]+(?:off|on)[ \t]*$"
    r"|%(?:un|re)?load_ext[ \t]+monarch_kernel\b"
    r"|(?:exit|quit)(?:\(\))?[ \t;]*$"
)
_HEADER = re.compile(r"%%(?P<magic>remote|local)(?![\w.?])(?P<line>.*)")
_LINE = re.compile(r"[ \t]*%remote(?![\w.])")


@dataclass(frozen=True)
class CellForm:
    """Where a cell runs, and its parts.

    Attributes:
        runs: whether it runs on the ranks or in the kernel.
        why: ``%%remote``, ``%remote``, ``%%local``, ``%autoremote``; empty for a cell with no such magic.
        selector: expression that selects the mesh; empty for the mesh last brought up, and for cells of the kernel.
        line: the text after the magic's name.
        body: the code.
        start: offset of the body in the text, in characters.
        first_line: number of the line with the magic, counted from 0.
    """

    runs: Literal["ranks", "kernel"]
    why: str
    selector: str
    line: str
    body: str
    start: int
    first_line: int = 0


IsMesh = Callable[[str | None], bool]


def _no_mesh(name: str | None) -> bool:
    return False


def read_cell(text: str, autoremote: str | None = None, is_mesh: IsMesh = _no_mesh) -> CellForm:
    """Parse a cell, which may be incomplete, as the user may still be typing it.

    Args:
        text: the cell as the user wrote it; to parse a ``%remote`` in the middle of a cell, pass that line alone.
        autoremote: the arguments of ``%autoremote``, if it is on: a selector, and perhaps options.
        is_mesh: whether a variable is a mesh; ``%remote`` needs this to distinguish a selector from an expression.
    """
    number, position, line = _first_code(text)
    code = line.strip()
    if not code:
        return CellForm("kernel", "", "", "", text, 0)
    if header := _HEADER.fullmatch(code):
        start, options = position + len(line), header["line"].strip()
        if header["magic"] == "local":
            return CellForm("kernel", "%%local", "", options, text[start:], start, number)
        return CellForm("ranks", "%%remote", _selector_of(options), options, text[start:], start, number)
    if one := _LINE.match(line):
        return _read_line(text, number, position + one.end(), line[one.end() :], is_mesh)
    if autoremote is None or _OURS.match(code):
        return CellForm("kernel", "", "", "", text, 0, number)
    return CellForm("ranks", "%autoremote", _selector_of(autoremote), autoremote, text, 0)


def code_at(text: str, cursor: int, autoremote: str | None = None, is_mesh: IsMesh = _no_mesh) -> CellForm | None:
    """Return the code at the cursor if it will run on ranks; None in code of the kernel, or in a magic's options.

    Args:
        text: the whole cell.
        cursor: an offset into it.
        autoremote: see `read_cell`.
        is_mesh: see `read_cell`.
    """
    begin = text.rfind("\n", 0, cursor) + 1
    line = text[begin:].partition("\n")[0]
    form = read_cell(text, autoremote, is_mesh)
    if form.why in ("", "%remote") and _LINE.match(line):
        form = read_cell(line, None, is_mesh)
        form = replace(form, start=begin + form.start)
        if not form.body and not text[:cursor].endswith((" ", "\t")):
            return None  # the user is typing the selector
    if form.why == "%%remote" and not text[: form.start].endswith("\n"):
        return None  # the user is typing its options
    return form if form.runs == "ranks" and cursor >= form.start else None


def _first_code(text: str) -> tuple[int, int, str]:
    """Return number, offset and text of the first line that is neither empty nor a comment; no text if there is none."""
    position = 0
    for number, line in enumerate(text.splitlines(keepends=True)):
        code = line.strip()
        if code and not code.startswith("#"):
            return number, position, line
        position += len(line)
    return 0, 0, ""


def _read_line(text: str, number: int, start: int, rest: str, is_mesh: IsMesh) -> CellForm:
    """Parse ``%remote [SELECTOR] EXPRESSION``."""
    line = rest.strip()
    selector = ""
    _, body = split_options(line, "%remote")
    try:
        first = next(iter(tokens(body)), "")
    except UsageProblem:
        first = ""
    if first and is_mesh(root_name(first)):
        selector = first
        _, body = split_options(body[len(first) :], "%remote")
    start += len(rest.rstrip()) - len(body) if body else len(rest)
    return CellForm("ranks", "%remote", selector, line, body, start, number)


def _selector_of(line: str) -> str:
    """Return the selector of a line with options; if the line is not valid yet, its first word that may be a selector."""
    try:
        return parse_remote(line).selector
    except UsageProblem:
        pass
    try:
        return next((word for word in tokens(line) if not word.startswith("-")), "")
    except UsageProblem:
        return ""
