"""Shortens the texts of errors: the first lines, the user's part of tracebacks in them, and always the last line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from monarch_kernel.runtime.diagnostics.failures import is_machinery, is_user_file
from monarch_kernel.runtime.diagnostics.source_names import short_file

__all__ = ["condensed", "narrow"]

_MAX_LINES = 10
_MAX_TAIL = 4  # of the lines that are shown, at the end
_MAX_USER_FRAMES = 4  # of a traceback in a text

_START = re.compile(r"\s*(?:\S.*)?Traceback \(most recent call last\):$")
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_CARETS = re.compile(r"\s*[~^]+$")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib/python3[^/]*/")  # also of other machines


def condensed(text: str, *, whole: bool = False) -> list[str]:
    """Return the lines of a text, without libraries' frames in tracebacks, and of many the first and the last ones."""
    lines = text.strip("\n").rstrip().split("\n")
    if whole:
        return lines
    lines = [line for line in _without_library_frames(lines) if line.strip()]
    if len(lines) <= _MAX_LINES:
        return lines or [""]
    n_head = _MAX_LINES - _MAX_TAIL
    hidden = len(lines) - _MAX_LINES
    more = f"… {hidden:,} more line{'' if hidden == 1 else 's'} of the message"
    return [*lines[:n_head], more, *lines[-_MAX_TAIL:]]


def narrow(line: str, width: int, *, keep_end: bool = False) -> str:
    """Cut a line that is longer than ``width``, at its end, or in its middle."""
    if len(line) <= width:
        return line
    n_tail = width // 3 if keep_end else 0
    return line[: width - n_tail - 1] + "…" + line[len(line) - n_tail :]


def _without_library_frames(lines: Sequence[str]) -> Iterator[str]:
    """Yield lines, with one line for each run of libraries' frames in a traceback."""
    i = 0
    while i < len(lines):
        yield lines[i]
        i += 1
        if _START.match(lines[i - 1]):
            frames: list[list[str]] = []
            while i < len(lines) and (_FRAME.match(lines[i]) or (frames and _is_of_frame(lines[i], frames[-1][0]))):
                if _FRAME.match(lines[i]):
                    frames.append([])
                if not _CARETS.match(lines[i]):
                    frames[-1].append(lines[i])
                i += 1
            yield from _frames(frames)


def _is_of_frame(line: str, place: str) -> bool:
    """Whether a line belongs to the frame in the line ``place``: its source is indented more."""
    return not line.strip() or _indent(line) > _indent(place) or line.lstrip().startswith("[Previous line repeated")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _frames(frames: Sequence[list[str]]) -> Iterator[str]:
    of_user = [i for i, frame in enumerate(frames) if _is_of_user(frame)]
    shown = {*of_user[:1], *of_user[1:][-(_MAX_USER_FRAMES - 1) :]} or {len(frames) - 1}
    for is_shown, group in groupby(range(len(frames)), key=shown.__contains__):
        indices = list(group)
        if is_shown:
            for i in indices:
                yield from frames[i]
        else:
            files = dict.fromkeys(short_file(_file(frames[i])) for i in indices)
            names = ", ".join(list(files)[:2]) + (", …" if len(files) > 2 else "")
            indent = " " * _indent(frames[indices[0]][0])
            yield f"{indent}… {len(indices):,} frame{'' if len(indices) == 1 else 's'} in {names} …"


def _is_of_user(frame: Sequence[str]) -> bool:
    file = _file(frame)
    return is_user_file(file) and not is_machinery(file) and not _INSTALLED.search(file)


def _file(frame: Sequence[str]) -> str:
    found = _FRAME.match(frame[0])
    return found["file"] if found else ""
