"""Replaces the parts of texts that differ between processes and carry no meaning: times, addresses, process ids, own ranks.

Texts that are then equal say the same. A number that may carry meaning, such as a loss or the result of a rank, stays.
"""

from __future__ import annotations

import re

__all__ = ["steady_message"]

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,16}\b")
_PORT = re.compile(r"(\[[0-9a-fA-F.:]+\]):\d{2,5}\b")  # as gloo writes the address of a peer
_TIME = re.compile(r"\b(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?\b")
_PID = re.compile(r"\b(pids?(?:\(s\))?[ =:]{1,2}\(?|[Pp]rocess )\d{3,}(?:, ?\d+)*\b")
_MEMORY = re.compile(r"\b\d+(?:\.\d+)? ?(?:bytes|[KMGT]i?B)\b|\b(?:GPU |cuda:)\d+\b")
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)
_LIBRARY_TIME = re.compile(r"\b[EWIF]\d{4} \d\d:\d\d:\d\d(?:\.\d+)?(?: \d+)?")  # of c10's log


def steady_message(text: str, rank: int | None, pid: int = 0) -> str:
    """Return the text of a rank's error without what differs in the texts of other ranks that have the same error.

    Args:
        text: the message of an exception.
        rank: the rank that raised it; a number after the word *rank* is replaced where it is this one. None replaces none.
        pid: its process.
    """
    if not any(map(str.isdigit, text)):
        return text
    text = _ADDRESS.sub("0x…", text)
    text = _PORT.sub(r"\1:…", text)
    text = _LIBRARY_TIME.sub("…", text)
    text = _TIME.sub("…", text)
    text = _PID.sub(r"\1…", text)
    if pid > 99:
        text = re.sub(rf"\b{pid}\b", "…", text)
    if _OUT_OF_MEMORY.search(text):
        text = _MEMORY.sub("…", text)
    if rank is None:
        return text
    return re.sub(rf"\b(rank[ :=#]{{0,2}}){rank}\b", r"\1…", text, flags=re.IGNORECASE)
