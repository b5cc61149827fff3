"""Names of source files as the user knows them."""

from __future__ import annotations

import re

from monarch_kernel.base.text import one_line
from monarch_kernel.errors import Frame

__all__ = ["code_of", "describe_line", "is_of_notebook", "short_cell", "short_file"]

_MAX_WIDTH = 120
_CELL = re.compile(r"<remote cell \[(\d+)\]>")
_NOTEBOOK = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input-")  # files of the kernel's own cells


def is_of_notebook(file: str) -> bool:
    """Whether code of this file is a cell that the kernel runs itself, whose number only the notebook knows."""
    return _NOTEBOOK.search(file) is not None


def short_file(file: str) -> str:
    """Shorten a file name: a cell without its angle brackets, a library's file from its package on, others unchanged."""
    if is_of_notebook(file):
        return "a cell of the notebook"
    if file == "<remote cell [0]>":  # not a cell of the notebook, but code that a program runs with `ProcMesh.run`
        return "code"
    if file.startswith("<") and file.endswith(">"):
        return one_line(file[1:-1])
    return one_line(re.split(r"(?:site|dist)-packages/|/lib/python3[^/]*/", file)[-1])


def short_cell(file: str) -> str:
    """Shorten a file name where the context is clearly about ranks: ``cell [5]``."""
    return short_file(file).removeprefix("remote ") if _CELL.fullmatch(file) else short_file(file)


def describe_line(frame: Frame) -> str:
    """Describe a line of code: ``cell [5], line 12, in step: dist.all_reduce(x)``.

    A text that is too wide loses the first folders of its file, and then the end of its code.
    """
    function = "" if frame.function in ("", "<module>") else f", in {one_line(frame.function)}"
    code = code_of(frame)
    rest = f", line {frame.line}{function}" + (f": {code}" if code else "")
    text = _last_folders(one_line(short_cell(frame.file)), _MAX_WIDTH - len(rest)) + rest
    return text if len(text) <= _MAX_WIDTH else text[: _MAX_WIDTH - 1] + "…"


def code_of(frame: Frame) -> str:
    """Return the line of source of a frame; empty where there is no source."""
    index = frame.line - frame.first_line
    source = frame.source[index] if 0 <= index < len(frame.source) else ""
    return "".join(char for char in source if char.isprintable()).strip()


def _last_folders(path: str, width: int) -> str:
    """Leave out the first folders of a path that is too wide; its file name stays."""
    while len(path) > width and "/" in path.removeprefix("…/"):
        path = "…/" + path.removeprefix("…/").partition("/")[2]
    return path
