"""Shows places in code that local notebook cells define, such as an actor's class, under the cells' numbers."""

from __future__ import annotations

import linecache
import re
from dataclasses import replace

from IPython.core.getipython import get_ipython

from monarch_kernel.errors import Failure, Frame
from monarch_kernel.runtime.diagnostics.stacks import Doing

__all__ = ["in_notebook", "located", "with_cell_names"]

_FILE = re.compile(r"(?<![^\s(])(?:[^\s()]*ipykernel_\d+[/\\]\d+\.py|<ipython-input-[^\s>]*>)(?=, line \d)")
"""Matches the file of a local cell in a message: ``ValueError: below (/tmp/ipykernel_1/2.py, line 3)``."""


def with_cell_names(failure: Failure) -> Failure:
    """Return a failure whose frames and message name the notebook's local cells by their numbers."""

    def name(found: re.Match[str]) -> str:
        return in_notebook(Frame(found[0], 0, "")).file.strip("<>")

    message = _FILE.sub(name, failure.message)
    chain = tuple(replace(cause, frame=cause.frame and in_notebook(cause.frame)) for cause in failure.chain)
    return replace(failure, frames=tuple(map(in_notebook, failure.frames)), message=message, chain=chain)


def in_notebook(frame: Frame) -> Frame:
    """Return a frame of a local cell with the cell's name and source, which ranks may not have; other frames unchanged."""
    name_of = getattr(getattr(get_ipython(), "compile", None), "format_code_name", lambda file: None)
    name = name_of(frame.file)  # such as ("Cell", "In[5]")
    number = re.search(r"\d+", name[1]) if name else None
    source = "" if frame.source else linecache.getline(frame.file, frame.line).rstrip("\n")
    if number:
        frame = replace(frame, file=f"<notebook cell [{number[0]}]>", user=True)
    return replace(frame, source=(source,), first_line=frame.line) if source else frame


def located(doing: Doing) -> Doing:
    """Add the source of code that the notebook defines, such as an actor's class; ranks do not have this source."""
    activities = (replace(each, frames=tuple(map(in_notebook, each.frames))) for each in doing.activities)
    return replace(doing, activities=tuple(activities))
