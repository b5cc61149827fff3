"""Where a cell runs, on ranks or in the kernel, read off its text alone: nothing is run, and no mesh is looked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from monarch_kernel.notebook.syntax.lines import UsageProblem, tokens
from monarch_kernel.notebook.syntax.options import parse_remote, split_options
from monarch_kernel.notebook.syntax.selector import root_name

__all__ = ["CellForm", "code_at", "read_cell"]

# What works on meshes, or may end the mode, is for the kernel also while every other cell is for the ranks.
_OURS = re.compile(
    r"%{1,2}(?:autoremote|mesh|remote|local|px|autopx|ranks?)(?![\w.])"
    r"|%(?:tb|xmode)(?![\w.])"  # errors of ranks are shown by the kernel
    r"|autoremote[ \t]+(?:off|on)[ \t]*$"
    r"|%(?:un|re)?load_ext[ \t]+monarch_kernel\b"
    r"|(?:exit|quit)(?:\(\))?[ \t;]*$"
)
_HEADER = re.compile(r"%%(?P<magic>remote|local)(?![\w.?])(?P<line>.*)")
_LINE = re.compile(r"[ \t]*%remote(?![\w.])")


@dataclass(frozen=True)
class CellForm:
    """What a cell is.

    Attributes:
        runs: on the ranks, or in the kernel.
        why: ``%%remote``, ``%remote``, ``%%local``, ``%autoremote``; empty for a cell with no such magic.
        selector: expression that gives the mesh; empty for the one last brought up, and for cells of the kernel.
        line: what was written after the magic's name.
        body: the code.
        start: where the body begins in the text, in characters.
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
    """Read a cell, which may be incomplete: it may be typed still.

    Args:
        text: as the user wrote it; of a cell with ``%remote`` in the middle, that line alone can be read.
        autoremote: what ``%autoremote`` was given, if it is on: a selector, and perhaps options.
        is_mesh: whether a variable is a mesh, by which ``%remote`` tells a selector from an expression.
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
    """What will run on ranks where the cursor is; None if it stands in code of the kernel, or in a magic's options.

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
            return None  # the selector is being written
    if form.why == "%%remote" and not text[: form.start].endswith("\n"):
        return None  # its options are being written
    return form if form.runs == "ranks" and cursor >= form.start else None


def _first_code(text: str) -> tuple[int, int, str]:
    """Number, place and text of the first line that is neither empty nor a comment; no text if there is none."""
    position = 0
    for number, line in enumerate(text.splitlines(keepends=True)):
        code = line.strip()
        if code and not code.startswith("#"):
            return number, position, line
        position += len(line)
    return 0, 0, ""


def _read_line(text: str, number: int, start: int, rest: str, is_mesh: IsMesh) -> CellForm:
    """``%remote [SELECTOR] EXPRESSION``."""
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
    """The selector of a line with options; of a line that is no good yet, its first word that may be one."""
    try:
        return parse_remote(line).selector
    except UsageProblem:
        pass
    try:
        return next((word for word in tokens(line) if not word.startswith("-")), "")
    except UsageProblem:
        return ""
