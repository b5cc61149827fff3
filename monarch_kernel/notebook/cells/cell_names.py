"""Names that users know for places in code that local cells of the notebook have defined, such as an actor's class."""

from __future__ import annotations

import linecache
import re
from dataclasses import replace

from IPython.core.getipython import get_ipython

from monarch_kernel.errors import Failure, Frame

__all__ = ["in_notebook", "placed"]

_FILE = re.compile(r"(?<=\()[^\s()]*ipykernel_\d+[/\\]\d+\.py(?=, line \d+\))|(?<=\()<ipython-input-[^>]*>")


def placed(failure: Failure) -> Failure:
    """A report with its places in the notebook's own cells named as the notebook numbers them, also in what it quotes."""

    def name(found: re.Match[str]) -> str:
        return in_notebook(Frame(found[0], 0, "")).file.strip("<>")

    message = _FILE.sub(name, failure.message)
    return replace(failure, frames=tuple(map(in_notebook, failure.frames)), message=message)


def in_notebook(frame: Frame) -> Frame:
    """A frame of a local cell under the name of that cell, with its source, which ranks may not have; any other as it is."""
    name_of = getattr(getattr(get_ipython(), "compile", None), "format_code_name", lambda file: None)
    name = name_of(frame.file)  # such as ("Cell", "In[5]")
    number = re.search(r"\d+", name[1]) if name else None
    source = "" if frame.source else linecache.getline(frame.file, frame.line).rstrip("\n")
    if number:
        frame = replace(frame, file=f"<notebook cell [{number[0]}]>", user=True)
    return replace(frame, source=(source,), first_line=frame.line) if source else frame
