"""Tells which cells are plain Python, that is, which IPython's transformers leave as they are.

The transformers tokenize a cell again and again: for 20 lines they take four times as long as Python's parser. Most cells have
nothing for them to do. So a cell goes past them if it looks like none of what they change, and Python can parse it. A cell that
looks like it by mistake, such as one with an ellipsis, only takes longer.
"""

from __future__ import annotations

import keyword
import re

__all__ = ["may_be_plain"]

_NOT_PLAIN = re.compile(
    r"""
    ^[ \t]*[%!?,;/]     # magics, commands and help
    | \?[ \t]*$
    | =[ \t]*[%!]       # their results
    | >>> | \.\.\. | In[ ]\[   # prompts
    | ^[ \t]+$          # a blank line, of which IPython removes the blanks, even in a string
    | \A\s*\n[ \t]      # a cell that is indented as a whole
    | \A[ \t]
    """,
    re.MULTILINE | re.VERBOSE,
)
_WORD = re.compile(r"\s*(\w+)")


def may_be_plain(code: str) -> bool:
    """Whether a cell is plain Python if Python can parse it.

    A cell of one line is not, unless it starts with a keyword: its first word may be the name of a magic, an alias or a macro.
    """
    if _NOT_PLAIN.search(code):
        return False
    if "\n" in code.strip():
        return True
    word = _WORD.match(code)
    return word is not None and keyword.iskeyword(word[1])
