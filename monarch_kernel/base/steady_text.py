"""Replaces the parts of texts that differ between processes and carry no meaning: times, addresses, process ids, own ranks.

Texts that are then equal say the same. A number that may carry meaning, such as a loss or the result of a rank, stays.
"""

from __future__ import annotations

import re

__all__ = ["is_stamped", "may_vary", "rank_in_prefix", "steady_line", "steady_message", "without_gloo_place"]

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,16}\b")
_PORT = re.compile(r"(\[[0-9a-fA-F.:]+\]):\d{2,5}\b")  # as gloo writes the address of a peer
_TIME = re.compile(r"\b(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?\b")
_PID = re.compile(r"\b(pids?(?:\(s\))?[ =:]{1,2}\(?|[Pp]rocess )\d{3,}(?:, ?\d+)*\b")
_MEMORY = re.compile(r"\b\d+(?:\.\d+)? ?(?:bytes|[KMGT]i?B)\b|\b(?:GPU |cuda:)\d+\b")
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)
_GLOO_WAIT = re.compile(r"\[\S{0,300}\.cc:\d{1,6}\] (Timed out waiting \d+ms for) (?:send|recv) operation")
_DURATION = re.compile(
    r"\b((?:after|elapsed|ran for|took|waited(?: for)?)[ :=]{1,2})\d+(?:\.\d+)?(?= ?(?:[mµu]?s|secs?|(?:milli)?seconds?)\b)"
)  # as measured, unlike the limit in "waiting 2000ms for"
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
    text = _GLOO_WAIT.sub(r"\1 …", text)  # whether a rank sends or receives in a collective depends on its place there
    text = _LIBRARY_TIME.sub("…", text)
    text = _TIME.sub("…", text)
    text = _DURATION.sub(r"\1…", text)
    text = _PID.sub(r"\1…", text)
    if pid > 99:
        text = re.sub(rf"\b{pid}\b", "…", text)
    if _OUT_OF_MEMORY.search(text):
        text = _MEMORY.sub("…", text)
    return _without_rank(text, rank)


def _without_rank(text: str, rank: int | None) -> str:
    return text if rank is None else re.sub(rf"\b(rank[ :=#]{{0,2}}){rank}\b", r"\1…", text, flags=re.IGNORECASE)


_COLOR = r"(?:\x1b\[[0-9;]*m)*"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_MAY_VARY = re.compile(r"\d:\d\d:\d\d|\bat 0x|\(pid=|(?:^|:)[\[(<]?(?:[Rr]ank|RANK)[ \[:=#\d]", re.MULTILINE)
_RANK_WORDS = ("rank", "Rank", "RANK")
# A rank is a prefix in brackets, or before a colon, a bar or a dash, and may follow the level and the name of a logger.
_RANK = (
    r"(?:[\[(<](?:[Rr]ank|RANK)[ :=#]{0,2}(\d{1,9})(?:/\d{1,9})?[\])>]"
    r"|\b(?:[Rr]ank|RANK)[ =#\[]?(\d{1,9})(?:/\d{1,9})?\]?(?= ?[:|>]| - ))"
)
_OWN_RANK = re.compile(rf"^((?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):[\w.]{{0,80}}:)?){_RANK}")
_RANK_FIELD = re.compile(_RANK)
# A time counts at the start of a line, after the name of a level, or with its date among the first words.
_STAMP = re.compile(
    rf"^({_COLOR}[\[(<]?{_COLOR}(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[\]: |-]+)?{_COLOR}){_CLOCK}(?![\d:])"
    rf"|^(.{{0,60}}?)\b\d{{4}}[-/]\d\d[-/]\d\d[T ,]{{1,2}}{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?(?![\d:])"
    rf"|^((?:\[[Rr]ank…\]:? ?)?\[?[DIWEF])\d{{4}} {_CLOCK}(?: +\d+)?"
)
_PID_AFTER_STAMP = re.compile(rf"^(\W*{_COLOR}\W*)\d{{2,7}}(?=\W+(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b)")
_LETTER = re.compile(r"[^\W\d_]")
_OBJECT = re.compile(r"\bat 0x[0-9a-fA-F]{6,16}\b")
_FIGURE_OF_LOG = re.compile(
    r"\b\d+(?:\.\d+)?(?= ?(?:[KMGT]i?B|[nµu]s|ms|s|secs?|(?:milli|micro)?seconds?)\b)|(?<=percent = )\d+(?:\.\d+)?(?=%)"
)  # of memory or of time
_PID_OF_LINE = re.compile(r"\(pid=\d+\)")


def may_vary(text: str) -> bool:
    """Whether a line of the text may have a part that `steady_line` replaces; much faster than that."""
    return _MAY_VARY.search(text) is not None


def is_stamped(line: str) -> bool:
    """Whether the line starts with a time stamp, as lines of logs do, and has a text after it."""
    _, line = _split_rank(line)
    stamp = _STAMP.match(line)
    return stamp is not None and _LETTER.search(line, stamp.end()) is not None


def rank_in_prefix(line: str) -> int | None:
    """Return the rank with which a line begins, as in ``[rank0]: text``, ``Rank 0: text`` and ``INFO:root:rank 0 | text``."""
    return _split_rank(line)[0]


def _split_rank(line: str) -> tuple[int | None, str]:
    """Return the rank in the prefix of a line, and the line with a mark in its place."""
    own = _OWN_RANK.match(line) if any(word in line for word in _RANK_WORDS) else None
    if own is None:
        return None, line
    return int(own[2] or own[3]), f"{own[1]}[rank…]{line[own.end() :]}"


def steady_line(line: str, rank: int | None) -> str:
    """Return a line of output without its time stamp, its prefix with its own rank, addresses of objects, and process ids.

    Args:
        line: the line.
        rank: the rank that wrote it; None replaces no rank.

    A process id is a number in ``(pid=17)``, or between a time stamp and the name of a level. In a line with a time stamp,
    which a library has logged, figures of memory and of time (``1.5 GiB``, ``12 ms``) and a field with its own rank
    (``- rank 3 -``) are replaced, too; others are printed to be compared.

    All other numbers stay, also those that look like a time or a process id elsewhere in a line: a rank may print them as its
    result. A line that is nothing but a time or the prefix and a number stays, too.
    """
    named, unnamed = _split_rank(line)
    steady = unnamed if named is not None and named == rank else line
    stamp = _STAMP.match(steady)
    if stamp is not None:
        rest = _PID_AFTER_STAMP.sub(r"\1…", steady[stamp.end() :])
        if _LETTER.search(rest):
            rest = _RANK_FIELD.sub(
                lambda field: "[rank…]" if int(field[1] or field[2]) == rank else field[0],
                _FIGURE_OF_LOG.sub("…", rest),
            )
            if steady.startswith("[rank…]") or stamp[3] is not None:  # of torch's own log
                rest = _without_rank(rest, rank)
            steady = f"{stamp[1] or stamp[2] or stamp[3] or ''}…{rest}"
    elif named is not None and not _LETTER.search(unnamed, unnamed.index("…") + 1):
        return line
    if " 0x" in steady:
        steady = _OBJECT.sub("at 0x…", steady)
    return _PID_OF_LINE.sub("(pid=…)", steady) if "(pid=" in steady else steady


_GLOO_PLACE = re.compile(
    r"\[\S{0,300}\.cc:\d{1,6}\] ?| \[[0-9a-f.:%]{1,60}\]:\d{1,5}(?:\.[^\n]{0,300}GLHF[^\n]{0,20})?"
)


def without_gloo_place(text: str) -> str:
    """Remove from the error of a connection what is for developers of gloo: its line of C++, the address, and its advice."""
    return _GLOO_PLACE.sub("", text)
