"""Leaves lines about this package out of what faulthandler writes when a process crashes.

Its report has the frames of the user's code, below them those of this package, and the names of all extension modules. It
comes through the pipe of stderr in pieces, each of which is written at once, and some of which are shorter than a line. The log
of the rank keeps all of it.
"""

from __future__ import annotations

import re

__all__ = ["CrashFilter"]

_BEGIN = "Fatal Python error: "
_REPORT = re.compile(
    r"Fatal Python error: |Python runtime state: |(Current )?[Tt]hread |Stack \(|  (File|Binary file) |  [<.]"
    r"|Extension modules: |\s*$"
)
"""How the lines of a report begin."""

_MAX_LENGTH = 1 << 16
"""A longer line belongs to no report."""

_OURS = re.compile(r'  File "(.*/monarch_kernel/.*|<frozen runpy>)", line')
_OF_COMMAND = '  File "<string>", line'
"""The frame of ``python -c``, which runs this package; below other frames it is ``exec`` of the user."""


class CrashFilter:
    """Filters the text of one stream."""

    def __init__(self) -> None:
        self._rest: str | None = None  # a line of a report that has not ended; None outside of a report
        self._was_ours = False

    def feed(self, text: str) -> str:
        """Return what to show of the text that follows, without the line of a report that has not ended."""
        shown: list[str] = []
        text, is_report, at = (self._rest or "") + text, self._rest is not None, 0
        self._rest = None
        while at < len(text):
            if not is_report:
                begin = text.find(_BEGIN, at)
                if begin < 0:
                    shown.append(text[at:])
                    break
                shown.append(text[at:begin])
                at, is_report = begin, True
            end = text.find("\n", at) + 1
            line = text[at : end or len(text)]
            is_report = bool(_REPORT.match(line)) and len(line) <= _MAX_LENGTH
            if is_report and not end:
                self._rest = line
                break
            if is_report and self._shows(line):
                shown.append(line)
            if is_report:
                at = end
            elif line.startswith(_BEGIN):  # it is too long
                shown.append(line)
                at += len(line)
        else:
            self._rest = "" if is_report else None
        return "".join(shown)

    def end(self) -> str:
        """End the report; return what to show of the line that has not ended."""
        rest, self._rest = self._rest or "", None
        return rest if self._shows(rest) else ""

    def _shows(self, line: str) -> bool:
        self._was_ours = bool(_OURS.match(line)) or (self._was_ours and line.startswith(_OF_COMMAND))
        return not self._was_ours and not line.startswith("Extension modules: ") and bool(line.strip())
