"""What the user calls the files that code is in."""

from __future__ import annotations

import re

from monarch_kernel.errors import Frame

__all__ = ["describe_line", "short_cell", "short_file"]

_MAX_WIDTH = 120
_CELL = re.compile(r"<remote cell \[(\d+)\]>")
_NOTEBOOK = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input-")  # what the kernel calls its own cells


def short_file(file: str) -> str:
    """A cell without its angle brackets, a library's file from its package on, any other as it is."""
    if _NOTEBOOK.search(file):
        return "a cell of the notebook"
    if file == "<remote cell [0]>":  # no cell of the notebook, but what a program runs with `ProcMesh.run`
        return "code"
    if file.startswith("<") and file.endswith(">"):
        return file[1:-1]
    return re.split(r"(?:site|dist)-packages/|/lib/python3[^/]*/", file)[-1]


def short_cell(file: str) -> str:
    """The same where it is plain that ranks are spoken of: ``cell [5]``."""
    return short_file(file).removeprefix("remote ") if _CELL.fullmatch(file) else short_file(file)


def describe_line(frame: Frame) -> str:
    """A line of code in words: ``cell [5], line 12, in step: dist.all_reduce(x)``."""
    function = "" if frame.function in ("", "<module>") else f", in {frame.function}"
    index = frame.line - frame.first_line
    source = frame.source[index] if 0 <= index < len(frame.source) else ""
    code = "".join(char for char in source if char.isprintable()).strip()
    text = f"{short_cell(frame.file)}, line {frame.line}{function}" + (f": {code}" if code else "")
    return text if len(text) <= _MAX_WIDTH else text[: _MAX_WIDTH - 1] + "…"
