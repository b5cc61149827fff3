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
        shown = ""
        if self._rest is None:
            at = text.find(_BEGIN)
            if at < 0:
                return text
            shown, text = text[:at], text[at:]
        lines = ((self._rest or "") + text).split("\n")
        self._rest = lines.pop()
        for i, line in enumerate(lines):
            if not _REPORT.match(line):
                rest, self._rest = self._rest, None
                return shown + self.feed("\n".join([*lines[i:], rest]))
            if self._shows(line):
                shown += f"{line}\n"
        if not _REPORT.match(self._rest):
            rest, self._rest = self._rest, None
            shown += rest
        return shown

    def end(self) -> str:
        """End the report; return what to show of the line that has not ended."""
        rest, self._rest = self._rest or "", None
        return rest if self._shows(rest) else ""

    def _shows(self, line: str) -> bool:
        self._was_ours = bool(_OURS.match(line)) or (self._was_ours and line.startswith(_OF_COMMAND))
        return not self._was_ours and not line.startswith("Extension modules: ") and bool(line.strip())
