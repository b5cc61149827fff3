"""Transforms cells for ``%autoremote``, ``%%local`` and ``%%remote --local`` before IPython reads them.

Theory of operation. IPython passes the lines of a cell, as the user wrote them, to a list of input transformers first, and ours
is the first in that list. It turns a cell into a call of a cell magic (``%autoremote``), into plain code (``%%local``), or into
both (``--local``). Each line of code stays where the user wrote it, so that line numbers in errors are right. So a cell that
runs in the kernel is an ordinary cell, with top-level ``await``, ``Out`` and interrupts.

A transformer also receives code that is not a user's cell: code that other code runs (``%run``, ``%%time``,
``get_ipython().run_cell``), and silent requests of frontends (completion of variables, widgets). None of it goes to the ranks.

A user's own cell is recognised by the stack, on which there is no ``run_code`` of IPython, and in kernels by the request,
which is neither silent nor without history. With ``--local`` the first line becomes the call for the ranks, and the code
follows once more.
"""

from __future__ import annotations

import re
import sys
from textwrap import dedent
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from monarch_kernel.net.wire.shared_classes import CellClasses
from monarch_kernel.notebook.syntax.cell_kind import read_cell
from monarch_kernel.notebook.syntax.lines import UsageProblem, tokens

__all__ = ["CellTransformer", "share_classes"]

_HELP = re.compile(r"\s*%mesh[ \t]+(?P<command>\w+)[ \t]*\?{1,2}\s*")
_HELP_OF_RANKS = re.compile(r"\s*%remote[ \t]+(?P<line>[^\n]*[\w\])*]\?{1,2})\s*")
_LOCAL = re.compile(r"(?<!\S)--local(?!\S)")
_MODE_HEADER = re.compile(r"\s*%%autoremote(?![\w.])[^\n]*\n?")


class CellTransformer:
    """Transforms the user's cells into code that runs them on ranks or in the kernel.

    Attributes:
        mode: the arguments of ``%autoremote``: a selector, and perhaps options; None while it is off.
    """

    has_side_effects = True  # tells IPython to skip this when it only checks whether a cell is complete

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.mode: str | None = None
        self._local_call: tuple[str, str] | None = None

    def __call__(self, lines: list[str]) -> list[str]:
        """Transform the lines of a cell, each with its newline."""
        text = "".join(lines)
        if one := _HELP.fullmatch(text):
            return [f"%mesh help {one['command']}\n"]
        if one := _HELP_OF_RANKS.fullmatch(text):  # IPython would look for the name here
            return [f"get_ipython().run_line_magic('remote', {one['line']!r})\n"]
        if header := _MODE_HEADER.match(
            text
        ):  # typed by the user; else IPython would take the first line of code for the first line of the cell
            return [header[0].strip() + "\n", "\n", *text[header.end() :].splitlines(keepends=True)]
        form = read_cell(text, self.mode if self.mode is not None and self._is_users_own() else None)
        at = form.first_line
        if form.why == "%autoremote":
            return [f"%%autoremote {form.line}\n", *lines]
        if form.why == "%%local":
            following = form.body.lstrip().startswith("%%")  # IPython recognizes cell magics on the first line only
            return lines[at + 1 :] if following else [*lines[:at], f"# {lines[at].lstrip()}", *lines[at + 1 :]]
        is_local = form.why == "%%remote" and _has_local(form.line)
        is_indented = bool(lines) and lines[at][:1].isspace()
        if is_local or (form.why == "%%remote" and (at or is_indented)):  # IPython recognizes cell magics there only
            options = _LOCAL.sub("", form.line).strip()
            body = "\n" * at + (form.body or "\n")
            if is_indented:
                body = dedent(body)
            self._local_call = (options, body) if is_local else None
            call = f"get_ipython().run_cell_magic('remote', {options!r}, {body!r})\n"
            return [*lines[:at], call, *(lines[at + 1 :] if is_local else ())]
        if form.why == "%%remote" and not form.body.strip():  # IPython refuses a cell magic without a body
            return [*lines[: at + 1], "\n"]
        return lines

    def _is_users_own(self) -> bool:
        """Whether the lines are a cell that the user entered."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is InteractiveShell.run_code.__code__:
                return False  # the code of a running cell runs more code
            frame = frame.f_back
        get_parent: Any = getattr(self._shell, "get_parent", None)  # only kernels have it
        content = (get_parent() or {}).get("content", {}) if get_parent is not None else {}
        return not content.get("silent", False) and bool(content.get("store_history", True))

    def takes_local_call(self, line: str, cell: str) -> bool:
        """Whether this is the call of ``%%remote`` that was made for the last cell with ``--local``; true once."""
        call, self._local_call = self._local_call, None
        return call == (line, cell)

    def install(self) -> None:
        """Make this the first input transformer of the shell."""
        self._shell.input_transformer_manager.cleanup_transforms.insert(0, self)

    def remove(self) -> None:
        """Undo `install`."""
        self.mode = None
        transforms = self._shell.input_transformer_manager.cleanup_transforms
        if self in transforms:
            transforms.remove(self)


def share_classes(shell: InteractiveShell, classes: CellClasses) -> None:
    """Give ids to the classes that the rest of the running cell defines in the notebook, until the cell ends."""
    depth = 0  # the cell may run others, such as %run or get_ipython().run_cell

    def note_begin(*_: object) -> None:
        nonlocal depth
        depth += 1

    def note_end(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth < 0:
            shell.events.unregister("pre_run_cell", note_begin)
            shell.events.unregister("post_run_cell", note_end)
            classes.__exit__(None, None, None)

    classes.__enter__()
    shell.events.register("pre_run_cell", note_begin)
    shell.events.register("post_run_cell", note_end)


def _has_local(line: str) -> bool:
    try:
        return "--local" in tokens(line)  # ignores comments
    except UsageProblem:  # the magic reports the error
        return False
